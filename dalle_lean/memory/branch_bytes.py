"""Bytes that a layer's branches save and need, whole or in the chunks of a recomputing backward.

b samples at once, S positions, n = b S tokens, D hidden size.
"""

from dataclasses import dataclass, replace

from dalle_lean.memory.operations import (
    STATISTIC_BYTES,
    Op,
    Step,
    attention_chain,
    backward_peak,
    feed_forward_chain,
    forward_peak,
    input_chain,
    output_chain,
)
from dalle_lean.model.config import DalleConfig


@dataclass(frozen=True)
class BranchSpec:
    """One branch of one layer."""

    block: int
    kind: str | None
    """Kind of attention; None is the feed-forward."""


def branches_of(config: DalleConfig) -> list[BranchSpec]:
    """All branches in forward order."""
    layers = zip(config.layer_blocks, config.layer_kinds, strict=True)
    return [branch for block, kind in layers for branch in (BranchSpec(block, kind), BranchSpec(block, None))]


def whole_chain(step: Step, branch: BranchSpec) -> list[Op]:
    """The operations of a whole branch as autograd sees them, from the stream to the sum with the stream."""
    tokens = step.setup.batch * step.config.sequence_len
    return [
        *input_chain(step, tokens),
        *inner_chain(step, branch, step.setup.batch, step.config.num_heads, tokens, recomputed=False),
        *output_chain(step, tokens),
        Op(tokens * step.config.hidden_size * step.stream),
    ]


def inner_chain(step: Step, branch: BranchSpec, samples: int, heads: int, tokens: int, recomputed: bool) -> list[Op]:
    """The operations of the shared module: attention of `heads` heads, or feed-forward of `tokens` tokens."""
    if branch.kind is None:
        return feed_forward_chain(step, tokens, recomputed)
    return attention_chain(step, branch.kind, samples, heads, recomputed)


def recomputed_branch_peak(step: Step, branch: BranchSpec) -> int:
    """Peak bytes of `Branch.backward`, reached in the backward of a chunk or of the branch's input part.

    The result of `prepare` and its gradient, 2 n D, exist throughout; during a chunk also its value and the gradients
    of the previous chunk and the previous samples.
    """
    config, batch = step.config, step.setup.batch
    samples = min(step.plan.samples or batch, batch)
    tokens = samples * config.sequence_len
    width = config.hidden_size
    h, stream = tokens * width * step.compute, tokens * width * step.stream
    held = 2 * h + tokens * STATISTIC_BYTES
    heads, chunk_tokens = chunk_sizes(step, branch, tokens)
    first, *others = inner_chain(step, branch, samples, heads, chunk_tokens, recomputed=True)
    entering = chunk_tokens * width * step.compute
    first = replace(first, saved_bytes=first.saved_bytes - entering)  # only a view of h
    *others, last = [*others, *output_chain(step, chunk_tokens)]
    backward_last = replace(last, output_bytes=0)  # the value stays, its gradient is a view of the stream's
    several = samples < batch or chunk_tokens < tokens or heads < config.num_heads
    before = entering * several + stream * (samples < batch)
    enter = [Op(op.output_bytes, 0) for op in input_chain(step, tokens)]
    return held + max(
        before + forward_peak([first, *others, last]),
        before + last.output_bytes + backward_peak([first, *others, backward_last], entering),
        backward_peak(enter, stream) - enter[-1].output_bytes,
    )


def chunk_sizes(step: Step, branch: BranchSpec, tokens: int) -> tuple[int, int]:
    """(heads, tokens) of the largest chunk."""
    config, plan = step.config, step.plan
    if branch.kind is None:
        return config.num_heads, min(plan.feed_forward_tokens or tokens, tokens)
    divisible = not config.sandwich_norm and config.pixelfly_rank is None
    heads = plan.attention_heads if divisible else None
    return min(heads or config.num_heads, config.num_heads), tokens
