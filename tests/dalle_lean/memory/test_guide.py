"""docs/memory.md says what the calculator says, and what was measured is near it."""

import dataclasses
import re
from pathlib import Path

import pytest

from dalle_lean import MemoryPlan
from dalle_lean.language import LanguageConfig
from dalle_lean.memory import TrainingSetup, cost_of

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
