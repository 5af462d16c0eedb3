"""What the branches of the layers keep and need, as a whole or in the pieces that lean backward computes. In bytes.

b samples at once, S positions, n = b S tokens, D hidden size.
"""

from dataclasses import dataclass

from dalle_lean.memory.operations import (
    STATISTIC_BYTES,
    Chain,
    NumberBytes,
    Op,
    attention_chain,
    backward_peak,
    enter_chain,
    feed_forward_chain,
    forward_peak,
    leave_chain,
)
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.memory_plan import MemoryPlan


@dataclass(frozen=True)
class BranchSpec:
    """One branch of one layer."""

    block: int
    kind: str | None
    """Of attention; None is the feed-forward."""


def branches_of(config: DalleConfig) -> list[BranchSpec]:
    """The branches in the order of forward."""
    layers = zip(config.layer_blocks, config.layer_kinds, strict=True)
    return [branch for block, kind in layers for branch in (BranchSpec(block, kind), BranchSpec(block, None))]


def whole_chain(config: DalleConfig, number: NumberBytes, plan: MemoryPlan, branch: BranchSpec, samples: int) -> Chain:
    """A branch from the stream to the sum with the stream, as autograd sees it."""
    tokens = samples * config.sequence_len
    return [
        *enter_chain(config, number, tokens),
        *inner_chain(config, number, plan, branch, samples, config.num_heads, tokens, lean=False),
        *leave_chain(config, number, tokens),
        Op(tokens * config.hidden_size * number.stream),
    ]


def inner_chain(
    config: DalleConfig,
    number: NumberBytes,
    plan: MemoryPlan,
    branch: BranchSpec,
    samples: int,
    heads: int,
    tokens: int,
    lean: bool,
) -> list[Op]:
    """The module that layers share: attention of some heads, or feed-forward of some tokens."""
    if branch.kind is None:
        return feed_forward_chain(config, number, tokens, lean)
    return attention_chain(config, number, branch.kind, samples, heads, lean)


def lean_branch_peak(config: DalleConfig, number: NumberBytes, plan: MemoryPlan, branch: BranchSpec, batch: int) -> int:
    """The most inside of `undo_branch`: while one piece runs back, or while the entrance does.

    All the while there are the entrance's result and its gradient, 2 n D; while a piece runs, its value, the gradient
    of the piece before and that of the samples before.
    """
    samples = min(plan.samples or batch, batch)
    tokens = samples * config.sequence_len
    width = config.hidden_size
    h, stream = tokens * width * number.compute, tokens * width * number.stream
    held = 2 * h + tokens * STATISTIC_BYTES
    heads, piece_tokens = piece_sizes(config, plan, branch, tokens)
    first, *others = inner_chain(config, number, plan, branch, samples, heads, piece_tokens, lean=True)
    entering = piece_tokens * width * number.compute
    first = Op(first.out, first.keeps - entering, first.work, first.back)  # only a view of h
    *others, last = [*others, *leave_chain(config, number, piece_tokens)]
    back = Op(0, last.keeps, last.work, last.back)  # the value stays, its gradient is a view of the stream's
    several = samples < batch or piece_tokens < tokens or heads < config.num_heads
    before = entering * several + stream * (samples < batch)
    enter = [Op(op.out, 0) for op in enter_chain(config, number, tokens)]
    return held + max(
        before + forward_peak([first, *others, last]),
        before + last.out + backward_peak([first, *others, back], entering),
        backward_peak(enter, stream) - enter[-1].out,
    )


def piece_sizes(config: DalleConfig, plan: MemoryPlan, branch: BranchSpec, tokens: int) -> tuple[int, int]:
    """Heads and tokens of the largest piece."""
    if branch.kind is None:
        return config.num_heads, min(plan.feed_forward_tokens or tokens, tokens)
    divisible = not config.sandwich_norm and config.pixelfly_rank is None
    heads = plan.attention_heads if divisible else None
    return min(heads or config.num_heads, config.num_heads), tokens
