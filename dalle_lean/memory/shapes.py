"""Shapes of transformers that this package does not implement, and their parameters, for the calculator.

B batch, S tokens of a sample, D hidden size, A = heads x head size, F inner width of the feed-forward, V vocabulary.
A stack is the layers of an encoder or of a decoder. Decoders of encoder-decoder models have a second attention, over
the encoder's S outputs, in every layer.
"""

from dataclasses import dataclass
from typing import Literal

from dalle_lean.errors import UserError
from dalle_lean.fields import PositiveInt, check

SEGMENTS, POSITION_BUCKETS = 2, 32
"""Rows of BERT's table of segments and of T5's tables of relative positions."""


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The structure of a published transformer.

    Args:
        family: what there is besides a LayerNorm, an attention and a LayerNorm, a feed-forward in each layer.
            "bert": an encoder; a table of segments, a LayerNorm after the tables, a pooler [D, D] + D.
            "t5": encoder and decoder without biases, with ReLU; a table of relative positions [buckets, heads] in the
            first layer of each stack; a LayerNorm after the last.
            "gpt": a decoder; a LayerNorm after the last layer.
            "gpt-j": a decoder whose attention, without biases, and feed-forward run in parallel after one LayerNorm; a
            LayerNorm after the last layer; an output layer with biases that is not the token table.
        layers: of each stack.
        hidden, ffn, heads, head_size: D, F and the factors of A.
        vocabulary: rows V of the token table.
        tokens: of a sample, S; at most learnt_positions if there are any.
        learnt_positions: rows of a table of positions; 0 for rotary and relative positions.
        shared_blocks: sets of weights, norms included, that the layers of a stack use in turn; None is one per layer.
    """

    family: Literal["bert", "t5", "gpt", "gpt-j"]
    layers: int
    hidden: int
    ffn: int
    heads: int
    head_size: int
    vocabulary: int
    tokens: int
    learnt_positions: int = 0
    shared_blocks: PositiveInt | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.tokens < 1 or (self.learnt_positions and self.tokens > self.learnt_positions):
            raise UserError(f"tokens={self.tokens}: must be in 1..{self.learnt_positions or 'any number'}")

    @property
    def stacks(self) -> int:
        """1, or 2 with an encoder in front of the decoder."""
        return 2 if self.family == "t5" else 1

    @property
    def attentions(self) -> int:
        """Attentions in all layers of all stacks."""
        return (3 if self.family == "t5" else 1) * self.layers

    @property
    def blocks(self) -> int:
        """Sets of weights in a stack."""
        return min(self.shared_blocks or self.layers, self.layers)


def shape_parameter_sizes(shape: TransformerShape) -> list[int]:
    """Elements of each parameter tensor."""
    width, table, positions = shape.hidden, shape.vocabulary * shape.hidden, shape.learnt_positions * shape.hidden
    norm = [width] if shape.family == "t5" else [width, width]
    layer = [*attention_sizes(shape), *feed_forward_sizes(shape), *norm]
    if shape.family == "bert":
        return [table, positions, SEGMENTS * width, *norm, *(layer + norm) * shape.blocks, width * width, width]
    if shape.family == "t5":
        crossing = [*attention_sizes(shape), *norm]
        layers = [*(layer + norm) * 2, *crossing] * shape.blocks
        return [table, *layers, *[*norm, POSITION_BUCKETS * shape.heads] * 2]
    if shape.family == "gpt":
        return [table, positions, *(layer + norm) * shape.blocks, *norm]
    return [table, *layer * shape.blocks, *norm, table, shape.vocabulary]


def attention_sizes(shape: TransformerShape) -> list[int]:
    """Queries, keys and values [A, D] each, output [D, A]; biases."""
    inner = shape.heads * shape.head_size
    return [shape.hidden * inner] * 4 + ([inner] * 3 + [shape.hidden] if shape.family in ("bert", "gpt") else [])


def feed_forward_sizes(shape: TransformerShape) -> list[int]:
    """[F, D] and [D, F]; biases."""
    return [shape.hidden * shape.ffn] * 2 + ([shape.ffn, shape.hidden] if shape.family != "t5" else [])
