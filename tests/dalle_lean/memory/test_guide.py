"""docs/memory.md says what the calculator says, and what was measured is near it."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from benchmarks.allocations import step_bytes
from dalle_lean import MemoryPlan
from dalle_lean.language import LanguageConfig, LanguageModel
from dalle_lean.memory import TrainingSetup, cost_of
from dalle_lean.memory.operations import Step, branches_of, recomputed_branch_peak
from dalle_lean.optim.lamb import Lamb
from dalle_lean.optim.parameter_groups import parameter_groups

GUIDE = (Path(__file__).parents[3] / "docs" / "memory.md").read_text()
PLAIN = LanguageConfig(text_vocab_size=8192, text_len=256, hidden_size=256, num_heads=8, head_size=32)
SHARED, REVERSIBLE = (dataclasses.replace(PLAIN, **fields) for fields in ({"shared_blocks": 4}, {"reversible": True}))
BOTH = dataclasses.replace(SHARED, reversible=True)
KEEP = MemoryPlan(activations="keep", loss_tokens=None)
PIECES = MemoryPlan(activations="reversible", loss_tokens=256, grads_in_place=True)
WAYS = {
    "plain": (PLAIN, KEEP, {}),
    "8-bit statistics": (PLAIN, KEEP, {"optimizer": "adamw8bit"}),
    "weights shared": (SHARED, KEEP, {}),
    "mixed precision": (PLAIN, KEEP, {"compute_dtype": "bfloat16"}),
    "selective checkpoints": (PLAIN, dataclasses.replace(KEEP, activations="selective"), {}),
    "checkpoints": (PLAIN, dataclasses.replace(KEEP, activations="checkpoint"), {}),
    "reversible layers": (REVERSIBLE, dataclasses.replace(KEEP, activations="reversible"), {}),
    "reversible, logits": (REVERSIBLE, PIECES, {}),
    "that, shared": (BOTH, PIECES, {"optimizer": "adamw8bit"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_line_of_the_table_is_computed_as_it_says(way):
    config, plan, setup = WAYS[way]
    found = re.search(rf"^\| {way}.*\| ([\d.]+) \| ([\d.]+) \|$", GUIDE, re.MULTILINE)
    cost = cost_of(config, plan, TrainingSetup(**{"batch": 4, "optimizer": "adamw", "device": "cpu", **setup}))
    assert found[1] == f"{cost.peak_bytes / 1e6:.3g}"
    assert float(found[2]) == pytest.approx(cost.peak_bytes / 1e6, rel=0.04)


SAID = " ".join(GUIDE.split())


def lamb_cost(device="cpu", plan=KEEP, **setup):
    return cost_of(PLAIN, plan, TrainingSetup(**{"batch": 4, "device": device, **setup}))


def test_offloaded_statistics_are_computed_as_the_text_says():
    eight, wide = (lamb_cost("cuda", optimizer=name).host.optimizer_state / 1e6 for name in ("lamb8bit", "lamb"))
    assert f"{eight:.3g} MB in 8 bits and {wide:.3g} MB in float32" in SAID


def test_low_precision_weights_are_computed_as_the_text_says():
    copies = dataclasses.replace(KEEP, master_weights=True)
    found = re.search(r"included: (\S+) MB computed and (\S+) MB measured, instead of (\S+) and (\S+) MB", SAID)
    low, wide = lamb_cost(plan=copies, weight_dtype="bfloat16"), lamb_cost()
    for cost, computed, measured in ((low, found[1], found[2]), (wide, found[3], found[4])):
        assert computed == f"{cost.peak_bytes / 1e6:.3g}"
        assert float(measured) == pytest.approx(cost.peak_bytes / 1e6, rel=0.04)
    host = lamb_cost("cuda", copies, weight_dtype="bfloat16").host
    assert f"Of these, {(host.optimizer_state + host.master_weights) / 1e6:.3g} MB would be offloaded" in SAID


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "group"), [(torch.bfloat16, 1), (torch.float32, 2)])
def test_low_precision_weights_take_the_measured_bytes_that_the_text_says(dtype, group):
    found = re.search(r"computed and (\S+) MB measured, instead of \S+ and (\S+) MB with float32 weights", SAID)
    model, ids = LanguageModel(PLAIN, KEEP, dtype=dtype), torch.randint(8192, (4, 257))
    optimizer = Lamb(parameter_groups(model, 0.01), lr=1e-3, master_weights=True)
    model.loss(ids).backward()
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    kept_bytes = sum(value.nbytes for value in values if torch.is_tensor(value))
    kept_bytes += 2 * sum(parameter.nbytes for parameter in model.parameters())
    peak_bytes = step_bytes(lambda: model.loss(ids), model.parameters()).peak_bytes
    assert (kept_bytes + peak_bytes) / 1e6 == pytest.approx(float(found[group]), rel=0.02)


def test_the_feed_forwards_backward_takes_what_the_text_says():
    setup, tokens, width = TrainingSetup(batch=4, device="cpu"), 4 * 256, 256 * 4
    feed_forward = branches_of(REVERSIBLE)[1]

    def peak_bytes(plan):
        return recomputed_branch_peak(Step(REVERSIBLE, plan, setup), feed_forward)

    assert "16 D n b at once; t tokens at a time, (2 n + 16 t) D b, but at least 3 n D b" in SAID
    assert peak_bytes(PIECES) == pytest.approx(16 * tokens * width, rel=0.01)
    for t in (16, 64, 256):
        pieces = dataclasses.replace(PIECES, feed_forward_tokens=t)
        assert peak_bytes(pieces) == pytest.approx(max(3 * tokens, 2 * tokens + 16 * t) * width, rel=0.05)
