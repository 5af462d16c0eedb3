"""The memory plans that the benchmarks compare; each "+" is added to the plan above it."""

from dataclasses import replace

from dalle_lean.memory import MemoryPlan


def in_pieces(whole: MemoryPlan, name: str) -> dict[str, MemoryPlan]:
    """A plan that computes branches again, then the same a piece at a time."""
    logits = replace(whole, loss_tokens=256)
    branches = replace(logits, samples=1, attention_heads=4, feed_forward_tokens=256)
    return {
        name: whole,
        "+ logits in pieces": logits,
        "+ branches in pieces": branches,
        "+ gradients in place": replace(branches, grads_in_place=True),
    }


KEEP = MemoryPlan(activations="keep", loss_tokens=None)
REVERSIBLE = {"keep": KEEP, **in_pieces(replace(KEEP, activations="reversible"), "reversible")}
"""For configs with reversible=True."""
SEQUENTIAL = {
    "keep": KEEP,
    "selective": replace(KEEP, activations="selective"),
    **in_pieces(replace(KEEP, activations="checkpoint"), "checkpoint"),
}
"""For configs with reversible=False."""
