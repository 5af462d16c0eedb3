"""What the operations of a branch allocate: results, what they keep for backward, temporaries. All in bytes.

b samples at once, S positions, P text positions, f side of the grid, D hidden size, A = heads at once x head size,
U outputs of the feed-forward's first layer, I inputs of its second, n tokens at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dalle_lean.config import DalleConfig
from dalle_lean.memory.flops import window
from dalle_lean.memory.parameters import projection_shapes, projection_sizes
from dalle_lean.memory.plan import MemoryPlan
from dalle_lean.memory.setup import DTYPE_BYTES, TrainingSetup

STATISTIC_BYTES = 8
"""Mean and inverse deviation of a token in a LayerNorm."""


@dataclass(frozen=True)
class NumberBytes:
    """Bytes of one number."""

    weight: int
    compute: int
    """What projections and attention compute with."""
    stream: int
    """Of the residual streams."""

    @classmethod
    def of(cls, plan: MemoryPlan, setup: TrainingSetup) -> "NumberBytes":
        """What a plan and a setup say."""
        stream = DTYPE_BYTES[plan.residual_dtype] if plan.residual_dtype else max(4, setup.weight_bytes)
        return cls(setup.weight_bytes, setup.compute_bytes, stream)

    @property
    def wide(self) -> int:
        """At least float32: softmax, rotary, loss."""
        return max(4, self.compute)

    @property
    def buffer(self) -> int:
        """Of the buffers that hand-written backward passes add gradients to."""
        return max(4, self.weight)

    @property
    def casts(self) -> bool:
        """Whether weights are converted for the computation."""
        return self.weight != self.compute


@dataclass(frozen=True)
class Op:
    """One operation of a chain."""

    out: int
    """Its result; the gradient that arrives is as large."""
    keeps: int = 0
    """What it keeps for backward, its input included."""
    work: int = 0
    """The most that it needs besides in forward."""
    back: int = 0
    """The most that it needs besides in backward."""


Chain = Sequence[Op]


def kept(chain: Chain) -> int:
    """What a chain has kept when it has run."""
    return sum(op.keeps for op in chain)


def forward_peak(chain: Chain) -> int:
    """The most at any operation: what those before keep, input, result and temporaries."""
    peaks, before, entering = [0], 0, 0
    for op in chain:
        peaks.append(before + max(entering, op.keeps) + op.out + op.work)
        before, entering = before + op.keeps, op.out
    return max(peaks)


def backward_peak(chain: Chain, entering: int) -> int:
    """The most at any operation: what it and those before keep, both its gradients and temporaries.

    entering: bytes of the chain's input.
    """
    peaks, before = [0], 0
    for op, grad_in in zip(chain, [entering, *(op.out for op in chain)], strict=False):
        before += op.keeps
        peaks.append(before + op.out + grad_in + op.back)
    return max(peaks)


def enter_chain(config: DalleConfig, number: NumberBytes, tokens: int) -> list[Op]:
    """LayerNorm of the stream [n, D], which keeps it; conversion; token shift."""
    width = tokens * config.hidden_size
    chain = [Op(width * number.stream, keeps=width * number.stream + tokens * STATISTIC_BYTES)]
    if number.compute != number.stream:
        chain.append(Op(width * number.compute))
    if config.token_shift:
        chain.append(Op(width * number.compute))
    return chain


def leave_chain(config: DalleConfig, number: NumberBytes, tokens: int) -> list[Op]:
    """Conversion of the branch's output [n, D]; LayerNorm in a sandwich; LayerScale, which keeps its input."""
    width = tokens * config.hidden_size * number.stream
    chain = [Op(width)] if number.compute != number.stream else []
    if config.sandwich_norm:
        chain.append(Op(width, keeps=width + tokens * STATISTIC_BYTES))
    return [*chain, Op(width, keeps=width, back=width)]


def project_op(config: DalleConfig, number: NumberBytes, name: str, tokens: int, share: float, lean: bool) -> Op:
    """A projection of n tokens, which keeps its input; `share` of it where heads come in groups.

    Lean, the weight's gradient goes to its buffer directly where both have one type. An input of a lean piece that is
    only a view is subtracted by the caller.
    """
    in_features, out_features, _ = projection_shapes(config)[name]
    weight = sum(projection_sizes(config, in_features, out_features, bias=False))
    if name == "out":
        in_features = round(in_features * share)
    else:
        out_features = round(out_features * share)
    direct = lean and number.compute == number.buffer
    grad = 0 if direct else round(weight * share) * number.compute
    return Op(
        out=tokens * out_features * number.compute,
        keeps=tokens * in_features * number.compute,
        back=grad,
    )


def feed_forward_chain(config: DalleConfig, number: NumberBytes, tokens: int, lean: bool) -> list[Op]:
    """up, activation, down over n tokens.

    GEGLU keeps its input and in backward needs two of its results; the others keep the gate's activation too.
    """
    inner = tokens * config.ffn_multiplier * config.hidden_size * number.compute
    up = project_op(config, number, "up", tokens, 1, lean)
    down = project_op(config, number, "down", tokens, 1, lean)
    if not config.ffn_gated:
        keeps = 0 if config.ffn_activation == "relu" else inner
        activation = [Op(inner, keeps=keeps, back=inner)]
    elif config.ffn_activation == "gelu":
        activation = [Op(inner, keeps=2 * inner, back=2 * inner)]
    else:
        squared = inner if config.ffn_activation == "relu_squared" else 0
        activation = [Op(inner, keeps=3 * inner + squared, back=2 * inner)]
    return [up, *activation, down]


def attention_chain(
    config: DalleConfig, number: NumberBytes, plan: MemoryPlan, kind: str, samples: int, heads: int, lean: bool
) -> list[Op]:
    """qkv, rotation, the attention of that kind, out; over some samples and heads."""
    tokens, share = samples * config.sequence_len, heads / config.num_heads
    values = tokens * heads * config.head_size * number.compute  # bytes of the queries, as many as of keys or values
    chain = [project_op(config, number, "qkv", tokens, share, lean)]
    if heads < config.num_heads:
        chain.append(Op(3 * values))  # the stack of three projections
    if config.rotary:
        turned = round(values / number.compute * number.wide * rotated_share(config))
        casts = 3 * turned if number.compute < number.wide else 0
        chain.append(Op(3 * values, work=3 * turned + casts, back=3 * turned + casts))
    if kind == "full":
        chain.append(full_op(config, number, plan, samples, heads))
    else:
        chain += [Op(values), window_op(config, number, kind, samples, heads)]
    # Heads change places, which copies them.
    return [*chain, Op(values), project_op(config, number, "out", tokens, share, lean)]


def rotated_share(config: DalleConfig) -> float:
    """Of a head's channels: three blocks of pairs."""
    return 6 * (config.head_size // 3 // 2) / config.head_size


def full_op(config: DalleConfig, number: NumberBytes, plan: MemoryPlan, samples: int, heads: int) -> Op:
    """Attention that never holds its weights: keeps queries, keys, values, result and a sum for each query."""
    rows = samples * heads * config.sequence_len
    values = rows * config.head_size * number.compute
    return Op(values, keeps=4 * values + 4 * rows, back=3 * values)


def window_op(config: DalleConfig, number: NumberBytes, kind: str, samples: int, heads: int) -> Op:
    """Text over text; codes over text and their window."""
    values = samples * heads * config.sequence_len * config.head_size * number.compute
    text, side = config.num_text_positions, config.image_side
    text_scores = samples * heads * text**2
    image_scores = samples * heads * side**2 * (text + window(config, kind))
    codes = samples * heads * side**2 * config.head_size * number.compute
    weights = image_scores * (number.wide + (number.compute if number.compute < number.wide else 0))
    text_weights = text_scores * (number.wide + (number.compute if number.compute < number.wide else 0))
    keeps = 4 * values + 3 * codes + weights + text_weights
    return Op(values, keeps=keeps, work=2 * image_scores * number.compute, back=2 * image_scores * number.wide)
