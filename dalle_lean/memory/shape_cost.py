"""The cost of training a transformer known by its shape and written in plain PyTorch.

It uses torch's fused attention and autograd, without dropout. Of a MemoryPlan, only activations, master weights and
offload count: "checkpoint" is one checkpoint a layer; "reversible" is this package's stack with gradients in place.

B batch, S tokens of a sample, D hidden size, A = heads x head size, F inner width, V vocabulary.
"""

from dalle_lean.errors import UserError
from dalle_lean.memory.cost import Cost, cost_at_peak
from dalle_lean.memory.flops import Flop
from dalle_lean.memory.operations import STATISTIC_BYTES, Op, backward_peak, saved_bytes
from dalle_lean.memory.peak_memory import Bytes, PeakPoint
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.memory.shapes import TransformerShape, attention_sizes, feed_forward_sizes, shape_parameter_sizes
from dalle_lean.model.memory_plan import MemoryPlan

SHAPE_ACTIVATIONS = ("reversible", "keep", "checkpoint")


def shape_cost(shape: TransformerShape, plan: MemoryPlan, setup: TrainingSetup) -> Cost:
    """The cost of one forward and backward; see `dalle_lean.memory.cost.cost_of`."""
    activations = plan.activations or "keep"
    if activations not in SHAPE_ACTIVATIONS:
        raise UserError(f"activations={activations!r}: this model takes {' or '.join(SHAPE_ACTIVATIONS)}")
    if setup.optimizer == "muon":
        raise UserError("optimizer='muon': the calculator supports it only for this package's own models")
    forward = shape_forward_flop(shape, setup.batch)
    passes = 3 + (activations != "keep")
    # A checkpoint's second forward ends with the last tensor that backward needs, the input of the last projection.
    last = 2.0 * setup.batch * shape.tokens * shape.hidden * shape.ffn * shape.layers * shape.stacks
    left_out = last if activations == "checkpoint" else 0
    step = Flop(passes * forward.projections - left_out, passes * forward.attention, 3 * forward.output)
    at = shape_peak_points(shape, setup, activations)
    return cost_at_peak(shape_parameter_sizes(shape), forward, step, at, plan, setup)


def shape_forward_flop(shape: TransformerShape, batch: int) -> Flop:
    """2 B S (matrix weights of the layers); 4 B S^2 A per attention, masked pairs included; 2 B S D V."""
    tokens = batch * shape.tokens
    matrices = 4 * shape.hidden * shape.heads * shape.head_size * shape.attentions
    matrices += 2 * shape.hidden * shape.ffn * shape.layers * shape.stacks
    return Flop(
        projections=2.0 * tokens * matrices,
        attention=4.0 * tokens * shape.tokens * shape.heads * shape.head_size * shape.attentions,
        output=2.0 * tokens * shape.hidden * shape.vocabulary,
    )


def shape_peak_points(shape: TransformerShape, setup: TrainingSetup, activations: str) -> list[PeakPoint]:
    """End of forward; backward of the loss, of the last layer and of the embedding."""
    tokens = setup.batch * shape.tokens
    stream = tokens * shape.hidden * setup.weight_bytes
    layers = [layer_branches(shape, setup, crossing=stack > 0) for stack in range(shape.stacks)]
    chains = [[op for branch in layer for op in branch] for layer in layers]
    last = layers[-1] if activations == "reversible" else [chains[-1]]  # what backward runs as a whole
    at_once = max(backward_peak(chain, stream) for chain in last)
    if activations == "reversible":  # two streams, their two gradients and the incoming one, in at least float32
        held = tokens * shape.hidden * max(4, setup.weight_bytes)
        layers_kept, around = 2 * held * shape.stacks, (3 + 2 * shape.stacks) * held
    elif activations == "checkpoint":
        layers_kept = shape.layers * shape.stacks * stream
        around = layers_kept + stream
    else:
        layers_kept = shape.layers * sum(saved_bytes(chain) for chain in chains)
        around = layers_kept - saved_bytes(chains[-1]) + stream
    final_norm = 0 if shape.family == "bert" else stream
    end = tokens * STATISTIC_BYTES + final_norm + tokens * shape.hidden * setup.compute_bytes

    table = shape.vocabulary * shape.hidden
    block = sum(attention_sizes(shape)) * shape.attentions // shape.layers
    block += sum(feed_forward_sizes(shape)) * shape.stacks
    blocks = block * shape.blocks
    # Autocast converts what products read and keeps the copies through forward; in backward, checkpoints hold those of
    # one layer, reversible stacks all.
    converted = setup.compute_bytes if setup.compute_bytes != setup.weight_bytes else 0
    all_copies = converted * (blocks + table)
    copies = 0 if activations == "checkpoint" else converted * blocks
    layer_copies = copies or converted * block // shape.stacks
    logits = setup.batch * shape.tokens * shape.vocabulary
    wide = max(4, setup.compute_bytes)
    narrow = setup.compute_bytes if setup.compute_bytes < wide else 0
    # Gradients of shared blocks and tied tables stay until backward has passed their first use.
    shared = setup.compute_bytes * blocks if shape.shared_blocks and activations != "reversible" else 0
    tied = setup.weight_bytes * table if shape.family != "gpt-j" else 0
    return [
        # Logits, again in at least float32, and log-probabilities; then the latter and two gradients.
        ("forward", Bytes(activations=layers_kept + end, logits=logits * (2 * wide + narrow), copies=all_copies)),
        ("loss", Bytes(activations=layers_kept + end, logits=3 * logits * wide, copies=copies + converted * table)),
        (
            "backward of a layer",
            Bytes(gradient_buffers=tied + shared, activations=around, layer=at_once, copies=layer_copies),
        ),
        ("gradient of the embedding", Bytes(gradient_buffers=tied + setup.weight_bytes * table, activations=stream)),
    ]


def layer_branches(shape: TransformerShape, setup: TrainingSetup, crossing: bool) -> list[list[Op]]:
    """The branches of a layer, from stream to stream: attention and feed-forward, or one of both if they run in
    parallel.

    In float32 with two norms, GELU and F = 4 D it keeps 16 D a token; with ReLU 12 D.
    """
    tokens, number = setup.batch * shape.tokens, setup.compute_bytes
    stream, hidden = tokens * shape.hidden * setup.weight_bytes, tokens * shape.hidden * number
    heads, inner = tokens * shape.heads * shape.head_size * number, tokens * shape.ffn * number
    attention, feed_forward = attention_sizes(shape)[0] * number, feed_forward_sizes(shape)[0] * number
    enter = [
        Op(stream, saved_bytes=stream + tokens * STATISTIC_BYTES),
        *([Op(hidden)] if number != setup.weight_bytes else []),
    ]
    attend = [
        Op(3 * heads, saved_bytes=hidden, backward_temp_bytes=3 * attention),
        Op(heads, saved_bytes=4 * heads + 4 * tokens * shape.heads),
        Op(hidden, backward_temp_bytes=attention),
    ]
    parallel = shape.family == "gpt-j"
    feed = [
        Op(inner, saved_bytes=0 if parallel else hidden, backward_temp_bytes=feed_forward),
        Op(inner, saved_bytes=0 if shape.family == "t5" else inner),
        Op(hidden, saved_bytes=inner, backward_temp_bytes=feed_forward),
    ]
    leave = [Op(stream)]
    if parallel:
        return [[*enter, *attend, *feed, *leave]]
    attends = [*enter, *attend, *leave]
    return [*[attends] * (1 + crossing), [*enter, *feed, *leave]]
