import dataclasses
import json

import pytest
import torch

from benchmarks import memory
from benchmarks.training import KEEP

SIZES = {"hidden_size": 48, "num_heads": 2, "head_size": 24, "text_len": 8, "image_side": 4, "text_vocab_size": 32}
TINY = dataclasses.replace(memory.SMALL, image_vocab_size=32, **SIZES)


@pytest.fixture(scope="module")
def layers():
    return {line["way"]: line for line in memory.layer_figures(TINY)}


def test_a_plain_layer_keeps_24_widths_as_counted_by_hand(layers):
    # The input of each LayerNorm and its output (2 + 2), queries, keys, values and output of attention (4), the halves
    # of the feed-forward (8), the gate's GELU (4), their product (4); besides, statistics of norms and of attention.
    line = layers["plain PyTorch, torch's attention"]
    assert 24 <= line["widths"] < 24.5


def test_another_reversible_layer_keeps_no_activations(layers):
    assert layers["reversible: reversible"]["live_bytes"] == 0
    assert layers["reversible: keep"]["widths"] > layers["plain PyTorch, torch's attention"]["widths"]


def test_checkpoints_keep_the_input_of_each_branch(layers):
    line = layers["sequential: checkpoint"]
    assert line["live_bytes"] == 2 * TINY.hidden_size * memory.FLOAT_BYTES
    assert line["live_bytes"] < layers["sequential: selective"]["live_bytes"] < layers["sequential: keep"]["live_bytes"]


def test_pieces_make_the_peak_smaller():
    figures = memory.peak_figures(dataclasses.replace(TINY, num_layers=2), (2,))
    peaks = {(line["function"], line["way"]): line["peak_bytes"] for line in figures}
    assert peaks["reversible", "+ branches in pieces"] < peaks["reversible", "reversible"] < peaks["reversible", "keep"]
    assert peaks["sequential", "+ branches in pieces"] < peaks["sequential", "checkpoint"] < peaks["sequential", "keep"]


def test_growth_is_counted_by_layer_sample_and_position(monkeypatch):
    wanted = ("reversible", "+ gradients in place")
    monkeypatch.setattr(memory, "PLANS", {True: {way: memory.PLANS[True][way] for way in wanted}, False: {}})
    growth = {
        (line["function"], line["way"]): line for line in memory.growth_figures(TINY, 6, depths=(2, 4), batch_size=2)
    }
    leanest = growth["reversible", "+ gradients in place"]
    assert leanest["peak_bytes_a_sample"] < growth["reversible", "reversible"]["peak_bytes_a_sample"] / 2
    state_bytes = len(torch.get_rng_state())
    own_bytes = 6 * TINY.hidden_size * memory.FLOAT_BYTES
    for way in wanted:
        line = growth["reversible", way]
        assert line["kept_bytes_a_layer"] <= 2 * state_bytes, "at most a random state for each branch"
        more_bytes = line["peak_bytes_a_layer"] - line["kept_bytes_a_layer"]
        assert more_bytes == (own_bytes if way == "reversible" else 0), "gradients of norms and scales, unless in place"


def test_the_report_is_three_tables_and_a_line_of_json(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["memory", "--threads", "1"])
    monkeypatch.setattr(memory, "PAPER_LAYERS", TINY)
    monkeypatch.setattr(memory, "PAPER", dataclasses.replace(TINY, num_layers=2))
    monkeypatch.setattr(memory, "SMALL", TINY)
    monkeypatch.setattr(memory, "LONGER_SIDE", 6)
    monkeypatch.setattr(memory, "PLANS", {True: {"keep": KEEP}, False: {"keep": KEEP}})
    memory.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| ---") for line in lines) == 3
    figures = json.loads(lines[-1])
    assert figures["benchmark"] == "memory"
    assert all(figures[part] for part in ("layers", "peaks", "growth"))
