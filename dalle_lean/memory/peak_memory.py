"""The moments of a step at which memory may be the most, and what exists then. All in bytes.

B batch, S positions, L layers, D hidden size, V rows of the vocabulary, v of a section of it (text or image).
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from dalle_lean.memory.branch_bytes import BranchSpec, branches_of, lean_branch_peak, whole_chain
from dalle_lean.memory.operations import STATISTIC_BYTES, NumberBytes, backward_peak, kept
from dalle_lean.memory.parameters import block_sizes, layer_sizes, projection_shapes, projection_sizes
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.memory_plan import MemoryPlan

INDEX_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What exists at one moment besides weights, their gradients and the optimizer; see dalle_lean.memory.cost."""

    name: str
    gradient_buffers: int = 0
    activations: int = 0
    layer: int = 0
    logits: int = 0
    copies: int = 0


@dataclass(frozen=True)
class Case:
    """What all of the functions below need."""

    config: DalleConfig
    plan: MemoryPlan
    setup: TrainingSetup

    @property
    def number(self) -> NumberBytes:
        """Bytes of numbers."""
        return NumberBytes.of(self.plan, self.setup)

    @property
    def stream(self) -> int:
        """One residual stream, B S D."""
        return self.setup.batch * self.config.sequence_len * self.config.hidden_size * self.number.stream

    @property
    def activations(self) -> str:
        """Where backward gets them."""
        return self.plan.activations_for(self.config)

    @property
    def lean(self) -> bool:
        """Whether branches are computed again in pieces."""
        return self.activations in ("checkpoint", "reversible")


def moments(config: DalleConfig, plan: MemoryPlan, setup: TrainingSetup) -> Iterator[Moment]:
    """Loss, the branches' backward from the last to the first, the embedding's backward."""
    if setup.weight_bytes < 4:  # gradients of narrow weights are added up in float32 first
        plan = dataclasses.replace(plan, grads_in_place=False)
    case = Case(config, plan, setup)
    yield from loss_moments(case)
    yield from lean_moments(case) if case.lean else kept_moments(case)
    yield embedding_moment(case)


def rotary_bytes(case: Case) -> int:
    """Cosines and sines of every position, [2, S, 3 n], for three blocks of n pairs of channels."""
    if not case.config.rotary:
        return 0
    pairs = 3 * (case.config.head_size // 3 // 2)
    return 2 * case.config.sequence_len * pairs * (8 if case.number.stream == 8 else 4)


def block_copies(case: Case) -> int:
    """All blocks' projections in the type of the computation, where weights have another."""
    blocks = max(case.config.layer_blocks) + 1
    return sum(block_sizes(case.config)) * blocks * case.number.compute if case.number.casts else 0


def final_norm_bytes(case: Case) -> int:
    """The last LayerNorm keeps its input, 1 stream, and statistics; its result, another, is kept by the loss."""
    return 2 * case.stream + case.setup.batch * case.config.sequence_len * STATISTIC_BYTES


def stack_kept(case: Case) -> int:
    """What the stack keeps for backward.

    reversible: two streams. checkpoint: the input of each branch, 2 L streams. selective: the input of each layer and
    the outputs of its projections. keep: everything that the branches' operations keep.
    """
    if case.activations == "reversible":
        return 2 * case.stream
    if case.activations == "checkpoint":
        return 2 * case.config.num_layers * case.stream
    branches = branches_of(case.config)
    if case.activations == "selective":
        return sum(selective_kept(case, branch) for branch in branches)
    return sum(branch_kept(case, branch) for branch in branches)


def branch_kept(case: Case, branch: BranchSpec) -> int:
    """What autograd keeps of a branch."""
    return kept(whole_chain(case.config, case.number, case.plan, branch, case.setup.batch))


def selective_kept(case: Case, branch: BranchSpec) -> int:
    """Outputs of the branch's projections; the attention's half brings the layer's input."""
    config = case.config
    tokens = case.setup.batch * config.sequence_len
    inner = config.num_heads * config.head_size
    outputs = (1 + config.ffn_gated) * config.ffn_multiplier * config.hidden_size if branch.kind is None else 3 * inner
    return tokens * (outputs + config.hidden_size) * case.number.compute + (case.stream if branch.kind else 0)


def sections(config: DalleConfig) -> list[tuple[int, int]]:
    """Positions and rows of the vocabulary of each part of the loss."""
    return [(config.text_len, config.num_text_tokens), (config.image_len, config.image_vocab_size)]


def output_buffer(case: Case, number_bytes: int) -> int:
    """A gradient of the output layer, [V, D] and V."""
    return case.config.num_tokens * (case.config.hidden_size + 1) * number_bytes


def loss_moments(case: Case) -> Iterator[Moment]:
    """Of t tokens at once: their logits, softmax and gradient; of all, log-probabilities and two gradients."""
    number, config = case.number, case.config
    standing = stack_kept(case) + final_norm_bytes(case)
    copies = rotary_bytes(case) + (0 if case.lean else block_copies(case))
    if case.plan.loss_tokens is None:
        yield from whole_loss_moments(case, standing, copies)
        return
    buffers = 0 if case.plan.grads_in_place else output_buffer(case, number.buffer)
    for positions, rows in sections(config):
        tokens = min(case.plan.loss_tokens, positions)
        logits = tokens * rows
        narrow = logits * number.compute if number.compute < number.wide else 0
        mixed = number.compute + number.mixed if number.compute != number.buffer else 0
        product = rows * config.hidden_size * mixed
        cast = rows * (config.hidden_size + 1) * number.compute if number.casts else 0
        yield Moment(
            name="loss",
            gradient_buffers=buffers,
            activations=standing + case.stream,
            logits=logits * number.wide + max(logits * number.wide, narrow + product),
            copies=copies + cast,
        )
    if number.buffer != number.weight:
        both = output_buffer(case, number.buffer + number.weight)
        yield Moment(name="hand-over", gradient_buffers=both, activations=standing + case.stream, copies=copies)


def whole_loss_moments(case: Case, standing: int, copies: int) -> Iterator[Moment]:
    """All logits at once: forward's end; the backward of the image's part; the output layer's gradient.

    The last is three: that of the image's rows spread over all, that of the text's rows, and that spread over all.
    """
    number, config, batch = case.number, case.config, case.setup.batch
    width = config.hidden_size
    log_probabilities = sum(batch * positions * rows for positions, rows in sections(config)) * number.wide
    cast = config.num_tokens * width * number.compute if number.casts else 0
    inputs = batch * config.sequence_len * width * number.compute
    image = batch * config.image_len * config.image_vocab_size
    narrow = image * number.compute if number.compute < number.wide else 0
    kept_bytes = standing + inputs
    yield Moment(
        name="loss",
        activations=kept_bytes,
        logits=log_probabilities + image * number.wide + narrow,
        copies=copies + cast,
    )
    yield Moment(
        name="loss backward",
        activations=kept_bytes,
        logits=log_probabilities + 2 * image * number.wide,
        copies=copies + cast,
    )
    text_rows = sections(config)[0][1] * width * number.weight
    yield Moment(
        name="output layer",
        gradient_buffers=2 * output_buffer(case, number.weight) + text_rows,
        activations=standing,
        copies=copies,
    )


def tied_buffer(case: Case) -> int:
    """The output layer's gradient waits for the embedding's where they are one table, unless the loss in pieces puts
    it in place."""
    waits = case.config.tie_embeddings and not (case.plan.grads_in_place and case.plan.loss_tokens is not None)
    return case.config.num_tokens * case.config.hidden_size * case.number.weight if waits else 0


def lean_moments(case: Case) -> Iterator[Moment]:
    """Each branch's backward, with the gradient buffers of all branches from the last to this one.

    reversible: the two streams, which are taken back in place, their two gradients and the one that came.
    checkpoint: inputs that were kept; the gradient that came and two of the branch.
    """
    config, plan, number = case.config, case.plan, case.number
    streams = 5 if case.activations == "reversible" else 2 * config.num_layers + 3
    branches = branches_of(config)
    peaks = {branch: lean_branch_peak(config, number, plan, branch, case.setup.batch) for branch in set(branches)}
    own, touched = sum(layer_sizes(config)) // 2, set[tuple[int, bool]]()
    elements = 0
    for branch in reversed(branches):
        part = (branch.block, branch.kind is None)
        elements += own + (0 if part in touched else sum(branch_sizes(config, branch)))
        touched.add(part)
        yield Moment(
            name="branch",
            gradient_buffers=tied_buffer(case) + (0 if plan.grads_in_place else elements * number.buffer),
            activations=streams * case.stream,
            layer=peaks[branch],
            copies=rotary_bytes(case) + block_copies(case),
        )
    if number.buffer != number.weight:
        yield Moment(
            name="hand-over",  # buffers and what they are converted to
            gradient_buffers=tied_buffer(case) + elements * (number.buffer + number.weight),
            activations=(streams + 1) * case.stream,
            copies=rotary_bytes(case) + block_copies(case),
        )


def branch_sizes(config: DalleConfig, branch: BranchSpec) -> list[int]:
    """The parameters of a branch that layers share."""
    names = ("up", "down") if branch.kind is None else ("qkv", "out")
    shapes = projection_shapes(config)
    return [size for name in names for size in projection_sizes(config, *shapes[name])]


def kept_moments(case: Case) -> Iterator[Moment]:
    """Each branch's backward while those before it are still kept, from the last to the first.

    selective: when backward reaches a layer, all that its two branches would have kept is there again.
    The gradient of a block's weights waits in the type of the computation until its first layer is done.
    """
    config, number = case.config, case.number
    branches = branches_of(config)
    kept_by = selective_kept if case.activations == "selective" else branch_kept
    before = [0]
    for branch in branches:
        before.append(before[-1] + kept_by(case, branch))
    for index in reversed(range(len(branches))):
        branch, first_of_layer = branches[index], index - index % 2
        beside = 0 if index == first_of_layer else branch_kept(case, branches[first_of_layer])
        later, earlier = {b.block for b in branches[index + 1 :]}, {b.block for b in branches[: index + 1]}
        yield Moment(
            name="branch",
            gradient_buffers=tied_buffer(case) + len(later & earlier) * sum(block_sizes(config)) * number.compute,
            activations=before[first_of_layer] + beside,
            layer=backward_peak(whole_chain(config, number, case.plan, branch, case.setup.batch), case.stream)
            + case.stream,
            copies=rotary_bytes(case) + block_copies(case),
        )


def embedding_moment(case: Case) -> Moment:
    """The gradient of the table, [V, D], beside what waits for it; in place there is only the stream's."""
    table = case.config.num_tokens * case.config.hidden_size * case.number.weight
    return Moment(
        name="embedding",
        gradient_buffers=tied_buffer(case) + (0 if case.plan.grads_in_place else table),
        activations=case.stream,
        copies=rotary_bytes(case),
    )
