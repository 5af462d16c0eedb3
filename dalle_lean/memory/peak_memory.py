"""The points of a training step at which memory may peak, and the bytes in use there.

B batch, S positions, L layers, D hidden size, V rows of the vocabulary, v of a section of it (text or image).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from dalle_lean.memory.operations import (
    STATISTIC_BYTES,
    BranchSpec,
    Step,
    backward_peak,
    branches_of,
    recomputed_branch_peak,
    saved_bytes,
    whole_chain,
)
from dalle_lean.memory.parameters import block_sizes, layer_sizes, projection_shapes, projection_sizes
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.memory_plan import MemoryPlan


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes by kind at one moment."""

    weights: int = 0
    gradients: int = 0
    gradient_buffers: int = 0
    """Gradients that backward accumulates before it hands them over."""
    master_weights: int = 0
    optimizer_state: int = 0
    activations: int = 0
    """Saved for backward; during backward also the residual streams and their gradients."""
    layer: int = 0
    """Peak bytes of one branch's backward."""
    logits: int = 0
    """Logits, their softmax and gradient."""
    copies: int = 0
    """Low-precision copies of weights, the rotary table."""
    transfer: int = 0
    """Float32 weights and gradients on their way to LAMB."""

    def __add__(self, other: Self) -> Self:
        return replace(self, **{kind: number + getattr(other, kind) for kind, number in vars(self).items()})

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """By names of the kinds that people read."""
        return {KIND_NAMES.get(kind, kind.replace("_", " ")): count for kind, count in vars(self).items()}


KIND_NAMES = {
    "gradient_buffers": "gradients being summed",
    "master_weights": "float32 copies of weights",
    "layer": "backward of one layer",
    "copies": "low-precision weights, position table",
    "transfer": "transfer to the optimizer",
}
"""Of those fields of Bytes whose own names say too little."""

PeakPoint = tuple[str, Bytes]
"""The name of a point, and its bytes besides weights, their gradients and the optimizer's."""


def peak_points(config: DalleConfig, plan: MemoryPlan, setup: TrainingSetup) -> Iterator[PeakPoint]:
    """The loss, each branch's backward from the last to the first, the embedding's backward."""
    if setup.weight_bytes < 4:  # gradients of low-precision weights are accumulated in float32 first
        plan = replace(plan, grads_in_place=False)
    step = Step(config, plan, setup)
    yield from loss_peaks(step)
    yield from recomputed_peaks(step) if step.recomputes else kept_peaks(step)
    yield embedding_peak(step)


def rotary_bytes(step: Step) -> int:
    """The table of cosines and sines, [2, S, 3 n], for three blocks of n pairs of channels."""
    if not step.config.rotary:
        return 0
    pairs = 3 * (step.config.head_size // 3 // 2)
    return 2 * step.config.sequence_len * pairs * (8 if step.stream == 8 else 4)


def block_copies(step: Step) -> int:
    """Copies of all blocks' projections in the compute dtype, if the weights have another."""
    blocks = max(step.config.layer_blocks) + 1
    return sum(block_sizes(step.config)) * blocks * step.compute if step.casts else 0


def stack_kept(step: Step) -> int:
    """What the stack saves for backward.

    reversible: two streams. checkpoint: the input of each branch, 2 L streams. selective: the input of each layer and
    the outputs of its projections. keep: everything that the branches' operations save.
    """
    if step.activations == "reversible":
        return 2 * step.stream_bytes
    if step.activations == "checkpoint":
        return 2 * step.config.num_layers * step.stream_bytes
    return sum(branch_kept(step, branch) for branch in branches_of(step.config))


def branch_kept(step: Step, branch: BranchSpec) -> int:
    """What "keep" and "selective" save of a branch: everything that autograd saves; the outputs of its projections and
    for attention also the layer's input."""
    if step.activations == "keep":
        return saved_bytes(whole_chain(step, branch))
    config = step.config
    tokens = step.setup.batch * config.sequence_len
    inner = config.num_heads * config.head_size
    outputs = (1 + config.ffn_gated) * config.ffn_multiplier * config.hidden_size if branch.kind is None else 3 * inner
    return tokens * (outputs + config.hidden_size) * step.compute + (step.stream_bytes if branch.kind else 0)


def sections(config: DalleConfig) -> list[tuple[int, int]]:
    """(positions, vocabulary rows) of each part of the loss."""
    image = [(config.image_len, config.image_vocab_size)] if config.image_len else []
    return [(config.text_len, config.num_text_tokens), *image]


def output_buffer(step: Step, number_bytes: int) -> int:
    """Gradients of the output layer: [V, D] and [V]."""
    return step.config.num_tokens * (step.config.hidden_size + 1) * number_bytes


def loss_peaks(step: Step) -> Iterator[PeakPoint]:
    """The loss over `loss_tokens` tokens at once: logits with their softmax, or with their gradient and its product."""
    config = step.config
    # The last LayerNorm saves its input (a stream) and statistics; the loss saves its result (another stream).
    statistics = step.setup.batch * config.sequence_len * STATISTIC_BYTES
    standing = stack_kept(step) + 2 * step.stream_bytes + statistics
    copies = rotary_bytes(step) + (0 if step.recomputes else block_copies(step))
    if step.plan.loss_tokens is None:
        yield from whole_loss_peaks(step, standing, copies)
        return
    held = Bytes(activations=standing + step.stream_bytes, copies=copies)
    buffers = 0 if step.plan.grads_in_place else output_buffer(step, step.buffer)
    for positions, rows in sections(config):
        samples = min(step.setup.batch, max(1, step.plan.loss_tokens // positions))
        logits = samples * min(step.plan.loss_tokens, positions) * rows
        narrow = logits * step.compute if step.compute < step.wide else 0
        mixed = step.compute + step.mixed if step.compute != step.buffer else 0
        product = rows * config.hidden_size * mixed
        cast = rows * (config.hidden_size + 1) * step.compute if step.casts else 0
        at_once = logits * step.wide + max(logits * step.wide, narrow + product)
        yield "loss", held + Bytes(gradient_buffers=buffers, logits=at_once, copies=cast)
    if step.buffer != step.weight:
        yield (
            "hand-over of the gradients",
            held + Bytes(gradient_buffers=output_buffer(step, step.buffer + step.weight)),
        )


def whole_loss_peaks(step: Step, standing: int, copies: int) -> Iterator[PeakPoint]:
    """The loss over all tokens at once: end of forward; backward of the image's part; the output layer's gradient.

    Autograd holds three of the latter: the image rows' gradient padded to all rows, the text rows', and that padded to
    all rows; a language model has one section only, and so one less.
    """
    config, batch = step.config, step.setup.batch
    width = config.hidden_size
    log_probabilities = sum(batch * positions * rows for positions, rows in sections(config)) * step.wide
    cast = config.num_tokens * width * step.compute if step.casts else 0
    inputs = batch * config.sequence_len * width * step.compute
    image = batch * math.prod(sections(config)[-1])
    narrow = image * step.compute if step.compute < step.wide else 0
    kept = Bytes(activations=standing + inputs, copies=copies + cast)
    yield "loss", kept + Bytes(logits=log_probabilities + image * step.wide + narrow)
    yield "backward of the loss", kept + Bytes(logits=log_probabilities + 2 * image * step.wide)
    text_rows = sections(config)[0][1] * width * step.weight if config.image_len else 0
    buffers = 2 * output_buffer(step, step.weight) + text_rows
    yield "gradient of the output layer", Bytes(gradient_buffers=buffers, activations=standing, copies=copies)


def tied_buffer(step: Step) -> int:
    """The output layer's gradient, kept until the embedding's if they share a table, unless the chunked loss adds it in
    place."""
    waits = step.config.tie_embeddings and not (step.plan.grads_in_place and step.plan.loss_tokens is not None)
    return step.config.num_tokens * step.config.hidden_size * step.weight if waits else 0


def held_bytes(step: Step) -> Bytes:
    """What is held through the backward of all branches."""
    return Bytes(gradient_buffers=tied_buffer(step), copies=rotary_bytes(step) + block_copies(step))


def recomputed_peaks(step: Step) -> Iterator[PeakPoint]:
    """Each branch's backward, with the gradient buffers of all branches from the last to this one.

    reversible: the two streams, which are rebuilt in place, their two gradients and the incoming one; at the end also
    the sum of the two gradients.
    checkpoint: the kept inputs, the incoming gradient and two of the branch, of which one is left at the end.
    """
    config = step.config
    kept = 2 * config.num_layers
    streams, last_streams = (5, 6) if step.activations == "reversible" else (kept + 3, kept + 2)
    branches = branches_of(config)
    peaks = {branch: recomputed_branch_peak(step, branch) for branch in set(branches)}
    own, touched = sum(layer_sizes(config)) // 2, set[tuple[int, bool]]()
    held, elements = held_bytes(step), 0
    for branch in reversed(branches):
        part = (branch.block, branch.kind is None)
        elements += own + (0 if part in touched else sum(branch_sizes(config, branch)))
        touched.add(part)
        buffers = 0 if step.plan.grads_in_place else elements * step.buffer
        at_once = Bytes(gradient_buffers=buffers, activations=streams * step.stream_bytes, layer=peaks[branch])
        yield "backward of a branch", held + at_once
    if step.buffer != step.weight:
        buffers = elements * (step.buffer + step.weight)  # and their copies in the weights' type
        yield (
            "hand-over of the gradients",
            held + Bytes(gradient_buffers=buffers, activations=last_streams * step.stream_bytes),
        )


def branch_sizes(config: DalleConfig, branch: BranchSpec) -> list[int]:
    """Elements of a branch's parameters in its block."""
    names = ("up", "down") if branch.kind is None else ("qkv", "out")
    shapes = projection_shapes(config)
    return [size for name in names for size in projection_sizes(config, *shapes[name])]


def kept_peaks(step: Step) -> Iterator[PeakPoint]:
    """Each branch's backward, from the last to the first, while the activations of those before it are still kept.

    selective: when backward reaches a layer, everything in its two branches is computed again.
    The gradient of a block's weights stays in the compute dtype until the block's first layer is done.
    """
    config = step.config
    branches = branches_of(config)
    held, before = held_bytes(step), [0, *accumulate(branch_kept(step, branch) for branch in branches)]
    for index in reversed(range(len(branches))):
        branch, first_of_layer = branches[index], index - index % 2
        beside = 0 if index == first_of_layer else saved_bytes(whole_chain(step, branches[first_of_layer]))
        later, earlier = {b.block for b in branches[index + 1 :]}, {b.block for b in branches[: index + 1]}
        own = Bytes(
            gradient_buffers=len(later & earlier) * sum(block_sizes(config)) * step.compute,
            activations=before[first_of_layer] + beside,
            layer=backward_peak(whole_chain(step, branch), step.stream_bytes) + step.stream_bytes,
        )
        yield "backward of a branch", held + own


def embedding_peak(step: Step) -> PeakPoint:
    """The gradient of the table, [V, D], beside the tied output layer's; in place, only the stream's."""
    table = step.config.num_tokens * step.config.hidden_size * step.weight
    return "gradient of the embedding", Bytes(
        gradient_buffers=tied_buffer(step) + (0 if step.plan.grads_in_place else table),
        activations=step.stream_bytes,
        copies=rotary_bytes(step),
    )
