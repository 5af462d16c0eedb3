"""The cost of training a transformer that is known by its shape, as one writes it in plain PyTorch.

That is: torch's fused attention, no dropout, autograd; of a MemoryPlan its activations "keep" or "checkpoint" (one
checkpoint a layer), master weights and offload count. B batch, S tokens of a sample, D hidden size, A = heads x head
size, F inner width, V vocabulary.
"""

from dalle_lean.memory.cost import Cost, cost_at_worst
from dalle_lean.memory.flops import Flop
from dalle_lean.memory.moments import Moment
from dalle_lean.memory.operations import STATISTIC_BYTES, Op, backward_peak, kept
from dalle_lean.memory.plan import MemoryPlan
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.memory.shapes import TransformerShape, attention_sizes, feed_forward_sizes, shape_parameter_sizes

SHAPE_ACTIVATIONS = ("keep", "checkpoint")


def shape_cost(shape: TransformerShape, plan: MemoryPlan, setup: TrainingSetup) -> Cost:
    """The cost of one forward and backward; see `dalle_lean.memory.cost.cost_of`."""
    activations = plan.activations or "keep"
    if activations not in SHAPE_ACTIVATIONS:
        raise ValueError(f"activations={activations!r}: this model takes {' or '.join(SHAPE_ACTIVATIONS)}")
    forward = shape_forward_flop(shape, setup.batch)
    again = 3 + (activations == "checkpoint")
    step = Flop(again * forward.projections, again * forward.attention, 3 * forward.output)
    at = shape_moments(shape, setup, activations)
    return cost_at_worst(shape_parameter_sizes(shape), forward, step, at, plan, setup)


def shape_forward_flop(shape: TransformerShape, batch: int) -> Flop:
    """2 B S (matrix weights of the layers); 4 B S^2 A an attention, masked pairs counted; 2 B S D V."""
    tokens = batch * shape.tokens
    matrices = 4 * shape.hidden * shape.heads * shape.head_size * shape.attentions
    matrices += 2 * shape.hidden * shape.ffn * shape.layers * shape.stacks
    return Flop(
        projections=2.0 * tokens * matrices,
        attention=4.0 * tokens * shape.tokens * shape.heads * shape.head_size * shape.attentions,
        output=2.0 * tokens * shape.hidden * shape.vocabulary,
    )


def shape_moments(shape: TransformerShape, setup: TrainingSetup, activations: str) -> list[Moment]:
    """The loss, the last layer's backward, the embedding's."""
    tokens = setup.batch * shape.tokens
    stream = tokens * shape.hidden * setup.weight_bytes
    chains = [layer_chain(shape, setup, crossing=stack > 0) for stack in range(shape.stacks)]
    if activations == "checkpoint":
        stack, last = shape.layers * shape.stacks * stream, 0
    else:
        stack, last = shape.layers * sum(kept(chain) for chain in chains), kept(chains[-1])
    # Autocast converts what projections and the output layer read: all but tables that are only looked up.
    looked_up = (shape.learnt_positions + shape.segments + (0 if shape.tied else shape.vocabulary)) * shape.hidden
    read = sum(shape_parameter_sizes(shape)) - looked_up
    copies = setup.compute_bytes * read if setup.compute_bytes != setup.weight_bytes else 0
    table = shape.vocabulary * shape.hidden * setup.weight_bytes
    tied = table if shape.tied else 0
    # What layers share waits until the first of them is done.
    block = (
        sum(attention_sizes(shape)) * (1 + shape.stacks) * shape.stacks // 2
        + sum(feed_forward_sizes(shape)) * shape.stacks
    )
    shared = block * min(shape.shared_blocks or 0, shape.layers) * setup.compute_bytes
    norm = tokens * STATISTIC_BYTES + stream * shape.final_norm
    hidden = tokens * shape.hidden * setup.compute_bytes
    end = stack + norm + hidden
    return [
        Moment(name="loss", activations=end, logits=logits_bytes(shape, setup), copies=copies),
        Moment(
            name="layer",
            gradient_buffers=tied + shared,
            activations=stack - last + stream,
            layer=backward_peak(chains[-1], stream),
            copies=copies,
        ),
        Moment(name="embedding", gradient_buffers=tied + table, activations=stream),
    ]


def layer_chain(shape: TransformerShape, setup: TrainingSetup, crossing: bool) -> list[Op]:
    """A layer from stream to stream. In float32 with two norms, GELU and F = 4 D it keeps 16 D a token; ReLU 12 D."""
    tokens, number = setup.batch * shape.tokens, setup.compute_bytes
    stream, hidden = tokens * shape.hidden * setup.weight_bytes, tokens * shape.hidden * number
    heads, inner = tokens * shape.heads * shape.head_size * number, tokens * shape.ffn * number
    attention, feed_forward = attention_sizes(shape)[0] * number, feed_forward_sizes(shape)[0] * number
    enter = [
        Op(stream, keeps=stream + tokens * STATISTIC_BYTES),
        *([Op(hidden)] if number != setup.weight_bytes else []),
    ]
    attend = [
        Op(3 * heads, keeps=hidden, back=3 * attention),
        Op(heads, keeps=4 * heads + 4 * tokens * shape.heads),
        Op(hidden, back=attention),
    ]
    parallel = shape.norms == 1
    feed = [
        Op(inner, keeps=0 if parallel else hidden, back=feed_forward),
        Op(inner, keeps=0 if shape.activation == "relu" else inner),
        Op(hidden, keeps=inner, back=feed_forward),
    ]
    leave = [Op(stream)]
    if parallel:
        return [*enter, *attend, *feed, *leave]
    across = [*enter, *attend, *leave] if crossing else []
    return [*enter, *attend, *leave, *across, *enter, *feed, *leave]


def logits_bytes(shape: TransformerShape, setup: TrainingSetup) -> int:
    """Logits in the type of the computation; their log-probabilities and two gradients in at least float32."""
    wide = max(4, setup.compute_bytes)
    logits = setup.batch * shape.tokens * shape.vocabulary
    return logits * (3 * wide + (setup.compute_bytes if setup.compute_bytes < wide else 0))
