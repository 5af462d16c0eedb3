"""Shapes of transformers that this package does not implement, and their parameters, for the calculator.

B batch, S tokens of a sample, D hidden size, A = heads x head size, F inner width of the feed-forward, V vocabulary.
A stack is the layers of an encoder or of a decoder. Decoders of encoder-decoder models have a second attention, over
the encoder's S outputs, in every layer.
"""

from dataclasses import dataclass

from dalle_lean.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The structure of a published transformer; the defaults are GPT-2's.

    Args:
        layers: of each stack.
        hidden, ffn, heads, head_size: D, F and the factors of A.
        vocabulary: rows V of the token table.
        tokens: of a sample, S; at most learnt_positions if there are any.
        learnt_positions: rows of a table of positions; 0 for rotary and relative positions.
        segments: rows of a table of segments (BERT).
        position_buckets: rows of a table of relative positions [buckets, heads] in the first layer of a stack (T5).
        encoder_decoder: an encoder of `layers` layers in front of the decoder.
        tied: the token table is the output layer's weight.
        attention_biases, ffn_biases, norm_biases, output_bias: whether there are such biases.
        activation: "gelu" or "relu".
        norms: LayerNorms of a layer; with 1, attention and feed-forward run in parallel. The encoder-decoder's second
            attention has one more.
        embedding_norm, final_norm: a LayerNorm after the tables; one after the last layer.
        pooler: a projection [D, D] + D over the first token (BERT).
        shared_blocks: sets of weights, norms included, that the layers of a stack use in turn; None is one per layer.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    head_size: int
    vocabulary: int
    tokens: int
    learnt_positions: int = 0
    segments: int = 0
    position_buckets: int = 0
    encoder_decoder: bool = False
    tied: bool = True
    attention_biases: bool = True
    ffn_biases: bool = True
    norm_biases: bool = True
    output_bias: bool = False
    activation: str = "gelu"
    norms: int = 2
    embedding_norm: bool = False
    final_norm: bool = True
    pooler: bool = False
    shared_blocks: int | None = None

    def __post_init__(self) -> None:
        if self.shared_blocks is not None and self.shared_blocks < 1:
            raise UserError(f"shared_blocks={self.shared_blocks}: must be at least 1")
        if self.tokens < 1 or (self.learnt_positions and self.tokens > self.learnt_positions):
            raise UserError(f"tokens={self.tokens}: must be in 1..{self.learnt_positions or 'any number'}")

    @property
    def stacks(self) -> int:
        """1, or 2 with an encoder."""
        return 1 + self.encoder_decoder

    @property
    def attentions(self) -> int:
        """Attentions in all layers of all stacks."""
        return (3 if self.encoder_decoder else 1) * self.layers


def shape_parameter_sizes(shape: TransformerShape) -> list[int]:
    """Elements of each parameter tensor."""
    blocks = min(shape.shared_blocks or shape.layers, shape.layers)
    width, norm = shape.hidden, [shape.hidden] * (1 + shape.norm_biases)
    layer = [*attention_sizes(shape), *feed_forward_sizes(shape), *norm * shape.norms]
    crossing = [*attention_sizes(shape), *norm] if shape.encoder_decoder else []
    stack_ends = [*(norm if shape.final_norm else []), *_table(shape.position_buckets, shape.heads)]
    return [
        *_table(shape.vocabulary, width),
        *_table(shape.learnt_positions, width),
        *_table(shape.segments, width),
        *(norm if shape.embedding_norm else []),
        *(layer * shape.stacks + crossing) * blocks,
        *stack_ends * shape.stacks,
        *([] if shape.tied else [shape.vocabulary * width]),
        *([shape.vocabulary] if shape.output_bias else []),
        *([width * width, width] if shape.pooler else []),
    ]


def attention_sizes(shape: TransformerShape) -> list[int]:
    """Queries, keys and values [A, D] each, output [D, A]; biases."""
    inner = shape.heads * shape.head_size
    return [shape.hidden * inner] * 4 + ([inner] * 3 + [shape.hidden] if shape.attention_biases else [])


def feed_forward_sizes(shape: TransformerShape) -> list[int]:
    """[F, D] and [D, F]; biases."""
    return [shape.hidden * shape.ffn] * 2 + ([shape.ffn, shape.hidden] if shape.ffn_biases else [])


def _table(rows: int, columns: int) -> list[int]:
    return [rows * columns] if rows else []
