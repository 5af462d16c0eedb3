"""What the operations of a branch allocate: results, what they keep for backward, temporaries. All in bytes.

b samples at once, S positions, P text positions, f side of the grid, D hidden size, A = heads at once x head size,
U outputs of the feed-forward's first layer, I inputs of its second, n tokens at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dalle_lean.memory.flops import window
from dalle_lean.memory.parameters import projection_shapes, projection_sizes
from dalle_lean.memory.setup import DTYPE_BYTES, TrainingSetup
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.memory_plan import MemoryPlan

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
    buffer: int
    """Of what hand-written backward passes add gradients to: at least float32."""
    mixed: int
    """Of a number of `compute` while it is added to a wider one: a CPU converts it first, a GPU on the way."""

    @classmethod
    def of(cls, plan: MemoryPlan, setup: TrainingSetup) -> "NumberBytes":
        """What a plan and a setup say."""
        stream = DTYPE_BYTES[plan.residual_dtype] if plan.residual_dtype else max(4, setup.weight_bytes)
        buffer = max(4, setup.weight_bytes)
        mixed = buffer if setup.device == "cpu" and setup.compute_bytes != buffer else 0
        return cls(setup.weight_bytes, setup.compute_bytes, stream, buffer, mixed)

    @property
    def wide(self) -> int:
        """At least float32: softmax, rotary, loss."""
        return max(4, self.compute)

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
    grads_in = [entering, *(op.out for op in chain[:-1])] if chain else []
    for op, grad_in in zip(chain, grads_in, strict=True):
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

    In backward the weight's gradient, which lean goes to its buffer directly where both have one type. PixelFly adds
    reordered inputs and products: two in forward, three in backward, lean also the result of running it again.
    """
    in_features, out_features, _ = projection_shapes(config)[name]
    elements = round(share * sum(projection_sizes(config, in_features, out_features, bias=False)))
    if name == "out":
        in_features = round(in_features * share)
    else:
        out_features = round(out_features * share)
    inputs, outputs = (tokens * features * number.compute for features in (in_features, out_features))
    if config.pixelfly_rank is not None:
        keeps = inputs * (1 if in_features <= out_features else 2)
        return Op(outputs, keeps=keeps, work=2 * outputs, back=(3 + lean) * max(inputs, outputs))
    grad = elements * (number.compute + number.mixed)
    return Op(outputs, keeps=inputs, back=0 if lean and number.compute == number.buffer else grad)


def feed_forward_chain(config: DalleConfig, number: NumberBytes, tokens: int, lean: bool) -> list[Op]:
    """up, activation, down over n tokens.

    Gated, the activation keeps values and gates; GEGLU needs two of its results in backward, the others keep one more.
    """
    inner = tokens * config.ffn_multiplier * config.hidden_size * number.compute
    squared = config.ffn_activation == "relu_squared"
    if config.ffn_gated and config.ffn_activation == "gelu":
        activation = Op(inner, keeps=2 * inner, back=2 * inner)
    elif config.ffn_gated:
        activation = Op(inner, keeps=3 * inner + inner * squared)
    else:
        # relu keeps its result, which the next layer keeps as well.
        activation = Op(inner, keeps=0 if config.ffn_activation == "relu" else inner, back=2 * inner * squared)
    up, down = (project_op(config, number, name, tokens, 1, lean) for name in ("up", "down"))
    return [up, activation, down]


def attention_chain(
    config: DalleConfig, number: NumberBytes, kind: str, samples: int, heads: int, lean: bool
) -> list[Op]:
    """qkv, rotation, the attention of that kind, out; over some samples and heads."""
    tokens, share = samples * config.sequence_len, heads / config.num_heads
    values = tokens * heads * config.head_size * number.compute  # bytes of the queries; as many of keys and of values
    chain = [project_op(config, number, "qkv", tokens, share, lean)]
    if heads < config.num_heads:
        chain.append(Op(3 * values))  # three projections are stacked
    if config.rotary:
        pairs = round(3 * values / number.compute * number.wide * rotated_share(config))
        turned = pairs if number.compute == number.wide else 2 * pairs
        chain.append(Op(3 * values, work=turned, back=turned))
    # Taking queries, keys and values apart copies nothing, but their gradients are stacked.
    chain.append(Op(3 * values))
    out = project_op(config, number, "out", tokens, share, lean)
    if kind == "full":
        return [*chain, full_op(config, number, samples, heads), Op(values), out]
    return [*chain, Op(values), *window_chain(config, number, kind, samples, heads), Op(values), out]


def rotated_share(config: DalleConfig) -> float:
    """Of a head's channels: three blocks of pairs."""
    return 6 * (config.head_size // 3 // 2) / config.head_size


def full_op(config: DalleConfig, number: NumberBytes, samples: int, heads: int) -> Op:
    """Attention that never holds its weights: keeps queries, keys, values, its result and a sum for each query."""
    rows = samples * heads * config.sequence_len
    values = rows * config.head_size * number.compute
    return Op(values, keeps=4 * values + rows * number.wide)


def window_chain(config: DalleConfig, number: NumberBytes, kind: str, samples: int, heads: int) -> list[Op]:
    """Text over text, then codes over the text and their window; from scaled queries to the heads' results.

    X scores of codes, K codes of all heads, W codes of all windows, T scores of the text. The text keeps queries,
    scaled ones, keys and values; the codes keep their part of them, W of keys and of values; both keep their softmax,
    twice where it is converted. The most besides in forward: 2 X, or X and three results; in backward: 3 X, or those of
    the window with the gradients of its lines and keys.
    """
    text, side, size = config.num_text_positions, config.image_side, config.head_size
    each = samples * heads * number.compute
    values, text_values = each * config.sequence_len * size, each * text * size
    text_scores, scores = each * text**2, each * side**2 * (text + window(config, kind))
    codes = each * side**2 * size
    windows = codes * window(config, kind) // side
    softmax = (number.wide + number.compute * (number.compute < number.wide)) // number.compute
    # Not rotated, they are views of qkv, of which products keep copies of the text.
    whole = 4 * values if config.rotary else 3 * text_values
    # Columns lie across: what products read of them is copied once more, queries twice.
    across = kind == "column"
    keeps = (1 + across) * codes + 2 * windows + softmax * scores
    work = max(2 * scores, scores + (6 if across else 3) * codes + text_values) - values
    back = max(3 * scores, each * side**2 * window(config, kind) + codes + windows)
    text_back = text_scores // number.compute * (2 * number.wide - number.compute * (number.compute < number.wide))
    return [
        Op(text_values, keeps=whole + softmax * text_scores, work=2 * text_scores, back=text_back + 3 * codes),
        Op(values, keeps=keeps, work=max(0, work), back=back),
    ]
