"""FLOP of a DALL-E's training step: multiplications and additions of its matrix products.

B batch, S positions, P text positions, f side of the grid, D hidden size, H heads, d head size.
"""

from dataclasses import dataclass

from dalle_lean.memory.parameters import projection_shapes, projection_sizes
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.memory_plan import MemoryPlan


@dataclass(frozen=True)
class Flop:
    """Floating-point operations of matrix products; a multiplication and an addition are two."""

    projections: float
    """Of attention and feed-forward."""
    attention: float
    """Scores, and weights times values."""
    output: float
    """Logits."""

    @property
    def total(self) -> float:
        return self.projections + self.attention + self.output


def forward_flop(config: DalleConfig, batch: int) -> Flop:
    """One forward: 2 B S (weights of the projections) a layer; 4 B H d (computed pairs) a layer; 2 B D (pairs of
    position and vocabulary row)."""
    tokens = batch * config.sequence_len
    # Every weight of a projection, dense or not, is multiplied once per token; biases are only added.
    weights = sum(
        sum(projection_sizes(config, in_features, out_features, bias=False))
        for in_features, out_features, _ in projection_shapes(config).values()
    )
    pairs = sum(attention_pairs(config, kind) for kind in config.layer_kinds)
    rows = config.text_len * config.num_text_tokens + config.image_len * config.image_vocab_size
    return Flop(
        projections=2.0 * tokens * weights * config.num_layers,
        attention=4.0 * batch * config.num_heads * config.head_size * pairs,
        output=2.0 * batch * config.hidden_size * rows,
    )


def step_flop(config: DalleConfig, batch: int, plan: MemoryPlan, fused: bool = False) -> Flop:
    """Forward and backward: backward is twice the forward, and what the plan does not keep is computed once more.

    projections: 3 forwards if kept, else 4. output: 3, in chunks 4.
    attention: 3 if kept, else 4; the kernels of full and of fused attention compute the scores again, half a forward
    more.
    """
    forward = forward_flop(config, batch)
    recomputes = plan.recomputes(config)
    by_kernel = [kind for kind in config.layer_kinds if kind == "full" or fused]
    pairs = sum(attention_pairs(config, kind) for kind in by_kernel)
    scores_again = 0.5 * 4.0 * batch * config.num_heads * config.head_size * pairs
    return Flop(
        projections=(3 + recomputes) * forward.projections,
        attention=(3 + (plan.activations_for(config) != "keep")) * forward.attention + scores_again,
        output=(3 + (plan.loss_tokens is not None)) * forward.output,
    )


def attention_pairs(config: DalleConfig, kind: str) -> int:
    """Pairs of query and key that one head of a layer computes, masked ones included.

    row, column: P^2 + f^2 (P + f). conv: P^2 + f^2 (P + rows f). full: the lower triangle, S (S + 1) / 2.
    """
    text, side, length = config.num_text_positions, config.image_side, config.sequence_len
    if kind == "full":
        return length * (length + 1) // 2
    return text**2 + side**2 * (text + window(config, kind))


def window(config: DalleConfig, kind: str) -> int:
    """Codes in the window of one line of queries: its own line, and the rows above that a convolution reaches."""
    if kind != "conv":
        return config.image_side
    return (config.conv_reach[0] + 1) * config.image_side
