"""Bytes that a layer's branches save and need, whole or in the chunks of a recomputing backward.

b samples at once, S positions, n = b S tokens, D hidden size.
"""

from dataclasses import dataclass, replace

from dalle_lean.memory.operations import (
    STATISTIC_BYTES,
    NumberBytes,
    Op,
    attention_chain,
    backward_peak,
    feed_forward_chain,
    forward_peak,
    input_chain,
    output_chain,
)
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.memory_plan import MemoryPlan


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


def whole_chain(config: DalleConfig, number: NumberBytes, branch: BranchSpec, samples: int) -> list[Op]:
    """The operations of a whole branch as autograd sees them, from the stream to the sum with the stream."""
    tokens = samples * config.sequence_len
    return [
        *input_chain(config, number, tokens),
        *inner_chain(config, number, branch, samples, config.num_heads, tokens, recomputed=False),
        *output_chain(config, number, tokens),
        Op(tokens * config.hidden_size * number.stream),
    ]


def inner_chain(
    config: DalleConfig,
    number: NumberBytes,
    branch: BranchSpec,
    samples: int,
    heads: int,
    tokens: int,
    recomputed: bool,
) -> list[Op]:
    """The operations of the shared module: attention of `heads` heads, or feed-forward of `tokens` tokens."""
    if branch.kind is None:
        return feed_forward_chain(config, number, tokens, recomputed)
    return attention_chain(config, number, branch.kind, samples, heads, recomputed)


def recomputed_branch_peak(
    config: DalleConfig, number: NumberBytes, plan: MemoryPlan, branch: BranchSpec, batch: int
) -> int:
    """Peak bytes of `Branch.backward`, reached in the backward of a chunk or of the branch's input part.

    The result of `prepare` and its gradient, 2 n D, exist throughout; during a chunk also its value and the gradients
    of the previous chunk and the previous samples.
    """
    samples = min(plan.samples or batch, batch)
    tokens = samples * config.sequence_len
    width = config.hidden_size
    h, stream = tokens * width * number.compute, tokens * width * number.stream
    held = 2 * h + tokens * STATISTIC_BYTES
    heads, chunk_tokens = chunk_sizes(config, plan, branch, tokens)
    first, *others = inner_chain(config, number, branch, samples, heads, chunk_tokens, recomputed=True)
    entering = chunk_tokens * width * number.compute
    first = replace(first, saved_bytes=first.saved_bytes - entering)  # only a view of h
    *others, last = [*others, *output_chain(config, number, chunk_tokens)]
    backward_last = replace(last, output_bytes=0)  # the value stays, its gradient is a view of the stream's
    several = samples < batch or chunk_tokens < tokens or heads < config.num_heads
    before = entering * several + stream * (samples < batch)
    enter = [Op(op.output_bytes, 0) for op in input_chain(config, number, tokens)]
    return held + max(
        before + forward_peak([first, *others, last]),
        before + last.output_bytes + backward_peak([first, *others, backward_last], entering),
        backward_peak(enter, stream) - enter[-1].output_bytes,
    )


def chunk_sizes(config: DalleConfig, plan: MemoryPlan, branch: BranchSpec, tokens: int) -> tuple[int, int]:
    """(heads, tokens) of the largest chunk."""
    if branch.kind is None:
        return config.num_heads, min(plan.feed_forward_tokens or tokens, tokens)
    divisible = not config.sandwich_norm and config.pixelfly_rank is None
    heads = plan.attention_heads if divisible else None
    return min(heads or config.num_heads, config.num_heads), tokens
