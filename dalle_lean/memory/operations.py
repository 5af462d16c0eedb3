"""Step: what memory depends on; the bytes that the operations of a branch allocate (results, what they save for
backward, temporaries); and what a layer's branches save and need, whole or in the chunks of a recomputing backward.

b samples at once, S positions, P text positions, f side of the grid, D hidden size, A = heads at once x head size,
U outputs of the feed-forward's first layer, I inputs of its second, n tokens at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dalle_lean.memory.flops import window
from dalle_lean.memory.parameters import projection_shapes, projection_sizes
from dalle_lean.memory.setup import DTYPE_BYTES, TrainingSetup
from dalle_lean.model.config import ALONG_COLUMNS, DalleConfig
from dalle_lean.model.memory_plan import MemoryPlan

STATISTIC_BYTES = 8
"""LayerNorm's mean and inverse standard deviation of one token."""


class Step:
    """One forward and backward under a plan and a setup. `weight` to `mixed` are bytes of one number, by its role."""

    def __init__(self, config: DalleConfig, plan: MemoryPlan, setup: TrainingSetup):
        self.config, self.plan, self.setup = config, plan, setup
        self.activations, self.recomputes = plan.activations_for(config), plan.recomputes(config)
        self.weight = setup.weight_bytes  # in the weights and their gradients
        self.compute = setup.compute_bytes  # in projections and attention
        self.wide = max(4, self.compute)  # at least float32: softmax, rotary, loss
        self.buffer = max(4, self.weight)  # in the gradient buffers of hand-written backward passes: at least float32
        self.stream = DTYPE_BYTES[plan.residual_dtype] if plan.residual_dtype else self.buffer  # in residual streams
        # In the wider copy of a `compute` number that a CPU makes to add it to a buffer; 0 on a GPU.
        self.mixed = self.buffer if setup.device == "cpu" and self.compute != self.buffer else 0
        self.casts = self.weight != self.compute  # whether weights are converted for the computation
        self.stream_bytes = setup.batch * config.sequence_len * config.hidden_size * self.stream  # a stream [B, S, D]


@dataclass(frozen=True)
class Op:
    """One operation of a chain."""

    output_bytes: int
    """Its result; the incoming gradient is as large."""
    saved_bytes: int = 0
    """What it saves for backward, its input included."""
    forward_temp_bytes: int = 0
    """Peak temporaries in forward."""
    backward_temp_bytes: int = 0
    """Peak temporaries in backward."""


def saved_bytes(chain: Sequence[Op]) -> int:
    """Bytes that a chain has saved for backward after its forward."""
    return sum(op.saved_bytes for op in chain)


def forward_peak(chain: Sequence[Op]) -> int:
    """Peak bytes of a chain's forward: what earlier operations saved, and the input, result and temporaries of one."""
    peaks, before, entering = [0], 0, 0
    for op in chain:
        peaks.append(before + max(entering, op.saved_bytes) + op.output_bytes + op.forward_temp_bytes)
        before, entering = before + op.saved_bytes, op.output_bytes
    return max(peaks)


def backward_peak(chain: Sequence[Op], entering: int) -> int:
    """Peak bytes of a chain's backward: what an operation and earlier ones saved, its two gradients and temporaries.

    entering: bytes of the chain's input.
    """
    peaks, before = [0], 0
    grads_in = [entering, *(op.output_bytes for op in chain[:-1])] if chain else []
    for op, grad_in in zip(chain, grads_in, strict=True):
        before += op.saved_bytes
        peaks.append(before + op.output_bytes + grad_in + op.backward_temp_bytes)
    return max(peaks)


def input_chain(step: Step, tokens: int) -> list[Op]:
    """LayerNorm of the stream [n, D], which saves it; conversion; token shift."""
    width = tokens * step.config.hidden_size
    chain = [Op(width * step.stream, saved_bytes=width * step.stream + tokens * STATISTIC_BYTES)]
    if step.compute != step.stream:
        chain.append(Op(width * step.compute))
    if step.config.token_shift:
        chain.append(Op(width * step.compute))
    return chain


def output_chain(step: Step, tokens: int) -> list[Op]:
    """Conversion of the branch's output [n, D]; sandwich LayerNorm; LayerScale, which saves its input."""
    width = tokens * step.config.hidden_size * step.stream
    chain = [Op(width)] if step.compute != step.stream else []
    if step.config.sandwich_norm:
        chain.append(Op(width, saved_bytes=width + tokens * STATISTIC_BYTES))
    return [*chain, Op(width, saved_bytes=width, backward_temp_bytes=width)]


def project_op(step: Step, name: str, tokens: int, share: float, recomputed: bool) -> Op:
    """A projection of n tokens, which saves its input; `share` is the part of it that a group of heads uses.

    Backward makes the weight's gradient; a recomputing one adds it to its buffer directly if the types agree. PixelFly
    saves an input wider than its result reordered, and as it was for a low-rank term. Forward holds two more results.
    Backward holds the result's gradient reordered and, beside the sum of the input's gradients, one more of them; a
    wide input with a single block per butterfly has freed as much by then.
    """
    config = step.config
    in_features, out_features, _ = projection_shapes(config)[name]
    elements = round(share * sum(projection_sizes(config, in_features, out_features, bias=False)))
    if name == "out":
        in_features = round(in_features * share)
    else:
        out_features = round(out_features * share)
    inputs, outputs = (tokens * features * step.compute for features in (in_features, out_features))
    if config.pixelfly_rank is not None:
        wide = in_features > out_features
        saved = inputs * (1 + (wide and config.pixelfly_rank > 0))
        summed = inputs * (not wide or config.pixelfly_butterfly_size > 1)
        return Op(outputs, saved_bytes=saved, forward_temp_bytes=2 * outputs, backward_temp_bytes=outputs + summed)
    in_place = recomputed and step.compute == step.buffer
    grad = 0 if in_place else elements * (step.compute + step.mixed)
    return Op(outputs, saved_bytes=inputs, backward_temp_bytes=grad)


def feed_forward_chain(step: Step, tokens: int, recomputed: bool) -> list[Op]:
    """up, activation, down over n tokens.

    A gated activation saves values and gates; GEGLU's backward makes a temporary of its result's size, the other
    activations save one more tensor of that size.
    """
    config = step.config
    inner = tokens * config.ffn_multiplier * config.hidden_size * step.compute
    squared = config.ffn_activation == "relu_squared"
    if config.ffn_gated and config.ffn_activation == "gelu":
        activation = Op(inner, saved_bytes=2 * inner, backward_temp_bytes=inner)
    elif config.ffn_gated:
        activation = Op(inner, saved_bytes=3 * inner + inner * squared)
    else:
        # ReLU saves its result, which a dense layer behind it saves as well.
        shared = config.ffn_activation == "relu" and config.pixelfly_rank is None
        activation = Op(inner, saved_bytes=0 if shared else inner, backward_temp_bytes=2 * inner * squared)
    up, down = (project_op(step, name, tokens, 1, recomputed) for name in ("up", "down"))
    return [up, activation, down]


def attention_chain(step: Step, kind: str, samples: int, heads: int, recomputed: bool) -> list[Op]:
    """qkv, rotation, attention of the given kind, out; over some samples and heads."""
    config = step.config
    tokens, share = samples * config.sequence_len, heads / config.num_heads
    values = tokens * heads * config.head_size * step.compute  # bytes of the queries; as many of keys and of values
    chain = [project_op(step, "qkv", tokens, share, recomputed)]
    if heads < config.num_heads:
        chain.append(Op(3 * values))  # three projections are stacked
    if config.rotary:
        share_rotated = 6 * (config.head_size // 3 // 2) / config.head_size  # of a head's channels: 3 blocks of pairs
        pairs = round(3 * values / step.compute * step.wide * share_rotated)
        rotated = pairs if step.compute == step.wide else 2 * pairs
        chain.append(Op(3 * values, forward_temp_bytes=rotated, backward_temp_bytes=rotated))
    # Splitting into queries, keys and values copies nothing, but their gradients are stacked.
    chain.append(Op(3 * values))
    out = project_op(step, "out", tokens, share, recomputed)
    if kind == "full" or step.plan.fuses_attention(config, step.setup.device, step.compute):
        # Saves queries, keys, values, its result and a log-sum-exp for each query.
        kernel = [Op(values, saved_bytes=4 * values + tokens * heads * step.wide)]
        if kind in ALONG_COLUMNS:  # queries, keys and values are reordered, and the result is put back
            kernel = [Op(3 * values), *kernel, Op(values)]
        return [*chain, *kernel, Op(values), out]
    return [*chain, Op(values), *window_chain(step, kind, samples, heads), Op(values), out]


def window_chain(step: Step, kind: str, samples: int, heads: int) -> list[Op]:
    """Text over text, then codes over the text and their windows; from scaled queries to the heads' results.

    With X scores of codes and W codes in all windows: the text saves queries, scaled queries, keys and values; the
    codes save their part of them and 2 W; both save their softmax, twice if it is converted. Peak temporaries in
    forward: 2 X, or X and three results; in backward: 3 X, or the window's scores with the gradients of its lines and
    keys.
    """
    config = step.config
    text, side, size = config.num_text_positions, config.image_side, config.head_size
    each = samples * heads * step.compute
    values, text_values = each * config.sequence_len * size, each * text * size
    text_scores, scores = each * text**2, each * side**2 * (text + window(config, kind))
    codes = each * side**2 * size
    windows = codes * window(config, kind) // side
    softmax = (step.wide + step.compute * (step.compute < step.wide)) // step.compute
    # Without rotation they are views of qkv, and products save copies of the text's part.
    whole = 4 * values if config.rotary else 3 * text_values
    # Columns are strided: products copy their operands once more, queries twice.
    across = kind in ALONG_COLUMNS
    saved = (1 + across) * codes + 2 * windows + softmax * scores
    forward_temp = max(2 * scores, scores + (6 if across else 3) * codes + text_values) - values
    backward_temp = max(3 * scores, each * side**2 * window(config, kind) + codes + windows)
    text_back = text_scores // step.compute * (2 * step.wide - step.compute * (step.compute < step.wide))
    return [
        Op(
            text_values,
            saved_bytes=whole + softmax * text_scores,
            forward_temp_bytes=2 * text_scores,
            backward_temp_bytes=text_back + 3 * codes,
        ),
        Op(values, saved_bytes=saved, forward_temp_bytes=max(0, forward_temp), backward_temp_bytes=backward_temp),
    ]


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
