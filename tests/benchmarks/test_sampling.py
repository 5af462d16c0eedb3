import dataclasses
import json
import os
import sys
from contextlib import ExitStack

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import reference, roofline, sampling
from benchmarks.commands import sampling_figures
from benchmarks.drawing import Drawing, RenderTimes, choices_after, draw, rows
from benchmarks.matmul_chain import (
    bare_chain,
    packed_chain,
    random_inputs,
    read_bytes,
    step_bytes,
    step_flop,
    step_weights,
)
from benchmarks.reference import SMALL, random_batch
from benchmarks.sampling_figures import REFERENCE_BATCH, WAYS, drawing_figures, reference_figures
from inference.sampling.kv_cache import KVCache
from inference.sampling.prefill import read_prompts
from inference.sampling.sampler import sample_codes

TINY = dataclasses.replace(
    SMALL, text_vocab_size=32, text_len=4, image_side=4, hidden_size=48, num_layers=6, num_heads=2, head_size=24
)
CPU = torch.device("cpu")
TEXT = random_batch(TINY, 2)["text_ids"]


@pytest.fixture(scope="module")
def pipeline():
    return sampling.make_pipeline(TINY, CPU)


def found(*rounds):
    """Of (seconds of a drawing, seconds of the reference) in each round, at batch 8."""
    codes, count = torch.zeros(8, TINY.image_len, dtype=torch.long), len(rounds)
    return {
        (8, "bare chain", "fp32"): [0.1] * count,
        (8, "packed chain", "fp32"): [0.05] * count,
        (8, "drawing", "fp32"): [Drawing(codes, 0.0, ours / 2, ours / 2, cache_bytes=10) for ours, _ in rounds],
        (8, "pictures", "fp32"): [RenderTimes(1.0, 1.0)] * count,
        (8, "dalle-pytorch", "shipped"): [{"seconds": 9.0, "cache_bytes": 0}] * count,
        (8, "dalle-pytorch", "mended"): [{"seconds": theirs, "cache_bytes": 80} for _, theirs in rounds],
    }


def test_what_is_timed_is_what_people_get(pipeline):
    decoder, read = pipeline.decoders["fp32"], KVCache.decode_step
    drawing = draw(decoder, TEXT, 3)
    *_, codes = sample_codes(decoder, read_prompts(decoder, TEXT), rows(3) * 2)
    assert torch.equal(drawing.codes, codes)
    assert KVCache.decode_step is read, "and nothing is timed any more"
    assert min(drawing.prefill_s, drawing.steps_s, drawing.sampling_s) > 0
    assert drawing.cache_bytes == KVCache(decoder, read_prompts(decoder, TEXT), 6).num_bytes


def test_after_its_own_codes_a_decoder_chooses_them_again(pipeline):
    for decoder in pipeline.decoders.values():
        codes = draw(decoder, TEXT, 4).codes
        assert torch.equal(choices_after(decoder, TEXT, codes), codes)


def test_after_other_codes_it_chooses_by_what_it_was_given(pipeline):
    codes = torch.zeros(8, TINY.image_len, dtype=torch.long)
    chosen = choices_after(pipeline.decoders["fp32"], TEXT, codes)
    drawn = draw(pipeline.decoders["fp32"], TEXT, 4).codes
    assert torch.equal(chosen[:, 0], drawn[:, 0]), "nothing was given before the first code"
    assert not torch.equal(chosen[:, 1:], drawn[:, 1:])


def test_the_bare_chain_is_the_operations_counted_for_a_step(pipeline):
    with FlopCounterMode(display=False) as counter:
        bare_chain(pipeline.model, 3)()
    assert counter.get_total_flops() == step_flop(pipeline.model, 3)
    width, inner, codes = TINY.hidden_size, TINY.num_heads * TINY.head_size, TINY.image_vocab_size
    assert step_flop(pipeline.model, 1) == 2 * (6 * (4 * width * inner + 12 * width**2) + codes * width)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_the_packed_chain_is_the_same_products(pipeline, precision):
    decoder = pipeline.decoders[precision]
    packed_chain(decoder, 3)()
    weights = step_weights(pipeline.model)
    products = [p for layer in decoder.layers for p in (layer.qkv, layer.out, layer.up, layer.down)] + [decoder.output]
    inputs = random_inputs(weights, 3, decoder.dtype)
    for x, weight, product in zip(inputs, weights, products, strict=True):
        zeros = product(torch.zeros_like(x)).float()
        torch.testing.assert_close(product(x).float() - zeros, x.float() @ weight.T, rtol=0.1, atol=0.1)


def test_a_step_reads_shared_weights_once_and_what_its_pictures_see(pipeline):
    weights = {id(p): p.numel() for block in pipeline.model.blocks for p in block.parameters() if p.dim() > 1}
    num_weights = sum(weights.values()) + TINY.image_vocab_size * TINY.hidden_size
    for precision, size in (("fp32", 4), ("bf16", 2), ("int8", 1)):
        assert step_bytes(pipeline.model, precision, 8) - read_bytes(TINY, precision, 8) == size * num_weights
    full = dataclasses.replace(TINY, attention_pattern=("full",), last_attention=None)
    pairs = 2 * full.num_layers * full.num_heads * full.head_size
    assert read_bytes(full, "fp32", 8) == 4 * pairs * (full.num_text_positions + 8 * full.image_len)
    assert read_bytes(full, "bf16", 8) == read_bytes(full, "fp32", 8) / 2


def test_ratios_are_the_median_of_those_within_each_round():
    figures = reference_figures(TINY, found((4.0, 2.0), (2.0, 2.0), (40.0, 60.0)))
    mended = next(line for line in figures if line["way"] == "mended")
    assert mended["speed_up_fp32"] == 16.0, "the median of 8, 16 and 24"
    assert mended["codes_per_s"] == REFERENCE_BATCH / 2.0
    assert mended["cache_less_by_fp32"] == 8


def test_a_cache_that_was_not_used_is_compared_with_nothing():
    shipped = next(line for line in reference_figures(TINY, found((4.0, 2.0))) if line["way"] == "shipped")
    assert "cache_less_by_fp32" not in shipped


def test_shares_of_the_chain_hold_all_of_drawing(pipeline):
    rates = {"matmul_fp32_flop_per_s": 1e9, "bandwidth_bytes_per_s": 1e9}
    line = drawing_figures(pipeline.model, found((4.0, 2.0)), rates)[0]
    assert line["of_bare_chain"] == pytest.approx(0.1 * 15 / 4.0)
    assert line["step_of_bare_chain"] == pytest.approx(0.1 * 15 / 2.0)
    assert line["step_of_packed_chain"] == pytest.approx(0.05 * 15 / 2.0)
    assert line["codes_per_s"] == pytest.approx(8 * 16 / 4.0)
    assert line["pictures_per_s"] == pytest.approx(8 / 6.0)
    assert line["matmul_rate_reached"] == pytest.approx(step_flop(pipeline.model, 8) / (2.0 / 15) / 1e9)


@pytest.mark.slow
def test_the_report_is_tables_and_a_line_of_json(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sampling", "--batches", "1", "3", "--rounds", "2", "--threads", "1"])
    monkeypatch.setattr(sampling, "SMALL", TINY)
    monkeypatch.setattr(sampling, "AGREEMENT_PROMPTS", sampling.AGREEMENT_PROMPTS[:1])
    monkeypatch.setattr(sampling, "AGREEMENT_PICTURES", 2)
    monkeypatch.setattr(roofline, "MATMUL_SIZES", (64, 64, 64))
    monkeypatch.setattr(roofline, "BANDWIDTH_BYTES", 2**20)
    sampling.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| ---") for line in lines) == 4
    assert any("--versus" in line for line in lines), "it says that it measured ours alone"
    figures = json.loads(lines[-1])
    assert figures["benchmark"] == "sampling"
    found = {(line["batch"], line["precision"]): line for line in figures["drawing"]}
    assert set(found) == {(batch, precision) for batch in (1, 3) for precision in ("fp32", "bf16", "int8")}
    for line in found.values():
        assert 0 < line["pictures_per_s"] < line["codes_per_s"] / TINY.image_len
        assert line["cache_bytes"] > 0
    assert {(line["batch"], line["precision"]) for line in figures["guided"]} == set(found)
    assert all(line["step_s"] > 0 < line["sampling_s"] for line in figures["guided"])
    same = {line["precision"]: line["same_codes"] for line in figures["agreement"]}
    assert same["fp32"] == 1
    assert 0.5 < same["int8"] <= 1
    assert "batch 3, bf16: codes/s" in sampling_figures(figures)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--reference", "no/such/python"], "no such interpreter"),
        (["--reference", sys.executable, "--paper"], "leave out --paper and --device"),
        (["--batches", "0"], "--batches 0: must be at least 1"),
        (["--reference", "a", "--versus"], "not allowed with argument"),
        (["--device", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_option_is_a_clear_mistake(arguments, words, monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["sampling", *arguments])
    with pytest.raises(SystemExit) as end:
        sampling.main()
    assert end.value.code == 2
    assert words in capfd.readouterr().err


@pytest.mark.skipif("DALLE_PYTORCH_PYTHON" not in os.environ, reason="DALLE_PYTORCH_PYTHON names no interpreter")
def test_dalle_pytorch_draws_with_the_same_function_cached_or_not(pipeline):
    with ExitStack() as stack:
        child, differences = sampling.start_reference(
            os.environ["DALLE_PYTORCH_PYTHON"], pipeline.model, 1, stack, num_codes=4
        )
        found = {way: child.ask(way) for way in (*WAYS, *WAYS)}
    assert set(differences) == set(WAYS)
    assert max(differences.values()) <= sampling.LOGITS_AGREEMENT
    assert found["shipped"]["cache_bytes"] == 0, "which is the fault that is mended"
    # Keys and values of five layers and the convolution layer's inputs, for all that is read: all but the last code.
    inner, read, batch = TINY.num_heads * TINY.head_size, TINY.text_len + TINY.image_len, REFERENCE_BATCH
    a_code = 4 * batch * (2 * inner * (TINY.num_layers - 1) + TINY.hidden_size)
    shifted = 4 * batch * 2 * TINY.num_layers * TINY.image_side * TINY.hidden_size // 2
    assert found["mended"]["cache_bytes_a_code"] == a_code
    assert found["mended"]["cache_bytes"] == a_code * read + shifted
    assert all(way["seconds"] > 0 for way in found.values())


def test_a_complete_environment_is_taken_as_it_is(tmp_path):
    (tmp_path / reference.COMPLETE).touch()
    assert reference.make_environment(tmp_path) == str(tmp_path / "bin" / "python")
    assert [path.name for path in tmp_path.iterdir()] == [reference.COMPLETE]


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_is_a_clear_mistake_and_not_complete(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match="cannot install dalle-pytorch into"):
        reference.make_environment(tmp_path / "environment")
    assert "torch==2.15.0" in capfd.readouterr().err
    assert not (tmp_path / "environment" / reference.COMPLETE).exists()
