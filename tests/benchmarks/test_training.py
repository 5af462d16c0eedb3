import dataclasses
import json
import os
import sys

import pytest
import torch

from benchmarks import reference, training
from benchmarks.training import REVERSIBLE
from dalle_lean import Dalle, DalleConfig
from dalle_lean.convert import from_dalle_pytorch

TINY = dataclasses.replace(
    reference.SMALL,
    text_vocab_size=32,
    text_len=4,
    image_vocab_size=32,
    image_side=4,
    hidden_size=48,
    num_layers=6,
    num_heads=2,
    head_size=24,
)
PLANS = {name: REVERSIBLE[name] for name in ("keep", "reversible")}


def result(name, seconds, step_bytes, loss=1.0):
    first = {"peak_bytes": 3 * step_bytes, "step_bytes": step_bytes, "loss": loss, "gradient_norm": 2.0}
    return training.Result(name, {"base_bytes": 1, "weight_bytes": 1, "seconds": 9.0, **first}, seconds)


def test_ways_take_turns_and_report_time_and_memory(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["training", "--threads", "1", "--turns", "2"])
    monkeypatch.setattr(training, "small_comparisons", lambda turns: [training.Comparison(TINY, 2, PLANS, turns)])
    training.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| reversible |") for line in lines) == len(PLANS)
    assert any("--reference" in line for line in lines), "it says that it measured ours alone"
    figures = json.loads(lines[-1])
    assert figures["benchmark"] == "training"
    weight_bytes = 4 * sum(p.numel() for p in Dalle(TINY).parameters())
    for way in figures["ways"]:
        assert way["weight_bytes"] == weight_bytes
        assert 0 < way["step_bytes"] < way["peak_bytes"]
        assert way["base_bytes"] < way["peak_bytes"]
        assert way["tokens_per_s"] == pytest.approx(2 * TINY.sequence_len / way["seconds"])
        assert way["loss_difference"] <= training.AGREEMENT


@pytest.mark.skipif("DALLE_PYTORCH_PYTHON" not in os.environ, reason="DALLE_PYTORCH_PYTHON names no interpreter")
@pytest.mark.parametrize("reversible", [True, False])
def test_dalle_pytorch_trains_the_same_function(reversible):
    config = dataclasses.replace(TINY, reversible=reversible)
    comparison = training.Comparison(config, 2, {"keep": REVERSIBLE["keep"]}, 1)
    theirs, ours = training.run(comparison, os.environ["DALLE_PYTORCH_PYTHON"], threads=1)
    assert theirs.name == reference.REFERENCE
    assert training.relative_difference(ours, theirs, "loss") <= training.AGREEMENT
    assert training.relative_difference(ours, theirs, "gradient_norm") <= training.AGREEMENT


def test_a_speed_up_is_the_median_of_each_turns_ratio():
    comparison = training.Comparison(TINY, 2, PLANS, 3)
    results = [result(reference.REFERENCE, [4.0, 4.0, 40.0], 80), result("keep", [2.0, 1.0, 20.0], 20)]
    ours = training.way_figures(comparison, results, rate=None)[1]
    assert ours["speed_up"] == 2
    assert ours["seconds"] == 2
    assert ours["step_less_by"] == 4


def test_another_function_is_refused():
    with pytest.raises(ValueError, match=r"loss of keep is 1\.5 .* they do not train the same function"):
        training.check_agreement([result(reference.REFERENCE, [], 1), result("keep", [], 1, loss=1.5)])
    with pytest.raises(ValueError, match="loss of keep is nan"):
        training.check_agreement([result(reference.REFERENCE, [], 1), result("keep", [], 1, loss=float("nan"))])


@pytest.mark.parametrize(
    ("python", "words"), [(sys.executable, "ended before it answered"), ("no/such/python", "no such interpreter")]
)
def test_an_interpreter_without_dalle_pytorch_is_a_clear_mistake(python, words, monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["training", "--reference", python])
    monkeypatch.setattr(training, "small_comparisons", lambda turns: [training.Comparison(TINY, 2, PLANS, turns)])
    with pytest.raises(SystemExit) as end:
        training.main()
    assert end.value.code == 2
    assert words in capfd.readouterr().err


def test_the_centred_window_has_no_counterpart():
    with pytest.raises(ValueError, match="conv_window='centred'"):
        reference.reference_task(dataclasses.replace(TINY, conv_window="centred"))


def test_weights_travel_once_under_published_names():
    weights = reference.weights_of(TINY)
    assert len({value.data_ptr() for value in weights.values()}) == len(weights)
    model = from_dalle_pytorch(weights, TINY)
    torch.manual_seed(0)
    for ours, fresh in zip(model.parameters(), Dalle(TINY).parameters(), strict=True):
        assert torch.equal(ours, fresh)


def test_captions_end_in_padding_and_batches_are_the_same_again():
    batch, again = reference.random_batch(TINY, 64), reference.random_batch(TINY, 64)
    assert torch.equal(batch["text_ids"], again["text_ids"])
    padding = batch["text_ids"] == 0
    assert padding.any()
    assert torch.equal(padding, padding.cummax(dim=1).values), "nothing follows padding"
    assert (batch["image_codes"].min() >= 0) & (batch["image_codes"].max() < TINY.image_vocab_size)


def test_the_papers_step_costs_11_teraflop_in_projections():
    paper = DalleConfig.paper()
    again, once = (training.step_flop(paper, 1, forward_again=again) for again in (True, False))
    projections = 8 * 16 * 1024**2 * 1280 * 64
    assert projections == pytest.approx(11.0e12, rel=1e-3)
    output = 6 * 1024 * (256 * (32100 + 256) + 1024 * 8192)
    assert projections + output < again < 1.1 * projections
    assert again - output == pytest.approx((once - output) * 4 / 3)
