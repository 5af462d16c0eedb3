"""DalleConfig: all settings that change what the model predicts."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from dalle_lean.errors import UserError
from dalle_lean.fields import PositiveInt, Range, check

ATTENTION_KINDS = ("row", "column", "conv", "full")
ALONG_COLUMNS = ("column",)
"""Kinds whose windows of codes are columns of the grid, not rows."""
CONV_WINDOWS = ("centred", "corner")
FFN_ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "relu_squared")
Kind = Annotated[str, ATTENTION_KINDS]


@dataclass(frozen=True, kw_only=True)
class DalleConfig:
    """The function that the model computes; saved with its weights. The defaults are the paper's model.

    Source: Borzunov et al. 2022, "Training Transformers Together", section 3; layer details as in the run's code.

    Args:
        text_vocab_size: ids of the tokenizer, V; text ids are in [0, V).
        text_len: text positions T; captions are padded to it.
        image_vocab_size: size C of the VQGAN's codebook.
        image_side: side f of the square grid of codes; a picture is f * f codes in raster order.
        hidden_size: width D of the residual streams; a multiple of 4 with token_shift.
        num_layers, num_heads, head_size: num_heads * head_size need not be hidden_size.
        ffn_multiplier: inner width of the feed-forward, as a multiple of hidden_size.
        ffn_activation: one of FFN_ACTIVATIONS.
        ffn_gated: the activation gates a second set of values (GEGLU, Shazeer 2020), as in the paper's model.
        attention_pattern: kinds of attention (ATTENTION_KINDS), repeated over the layers.
        last_attention: kind of the last layer; None continues the pattern.
        conv_kernel: side of the convolution window, odd.
        conv_window: "centred" (the training run) or "corner" (dalle-pytorch 1.5.0 and later).
        shared_blocks: how layers share weights. An int n: layer i uses block i % n, and a last layer with its own
            kind has its own block. None: no layers share. A tuple names the block of each layer.
        tie_embeddings: the input table is the output layer's weight.
        token_shift: part of the channels comes from the neighbours above and to the left.
        rotary: rotary positions on queries, keys and values; False is learnt position tables.
        reversible: two residual streams instead of one (another function, not only another backward).
        sandwich_norm: a LayerNorm after each branch too.
        pixelfly_rank: rank of the low-rank part of block-sparse projections (PixelFly, Chen et al. 2021) in place of
            all dense ones of attention and feed-forward; None is dense.
        pixelfly_block_size, pixelfly_butterfly_size: side of their blocks, and number of blocks that a butterfly mixes
            (a power of two).
        image_loss_weight: weight of the image part of the loss; the text part weighs 1.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """

    # The upper limits are far beyond any known model, yet no damaged file can ask for all memory.
    text_vocab_size: Annotated[int, Range(1, 2**24)] = 32100
    text_len: Annotated[int, Range(1, 2**16)] = 256
    image_vocab_size: Annotated[int, Range(1, 2**24)] = 8192
    image_side: Annotated[int, Range(1, 1024)] = 32
    hidden_size: Annotated[int, Range(1, 2**16)] = 1024
    num_layers: Annotated[int, Range(1, 4096)] = 64
    num_heads: Annotated[int, Range(1, 4096)] = 16
    head_size: Annotated[int, Range(1, 2**16)] = 64
    ffn_multiplier: Annotated[int, Range(1, 256)] = 4
    ffn_activation: Annotated[str, FFN_ACTIVATIONS] = "gelu"
    ffn_gated: bool = True
    attention_pattern: tuple[Kind, ...] = ("row", "column", "row", "row")
    last_attention: Kind | None = "conv"
    conv_kernel: Annotated[int, Range(1, 255)] = 5
    conv_window: Annotated[str, CONV_WINDOWS] = "centred"
    shared_blocks: PositiveInt | tuple[Annotated[int, Range(0)], ...] | None = 4
    tie_embeddings: bool = True
    token_shift: bool = True
    rotary: bool = True
    reversible: bool = True
    sandwich_norm: bool = False
    pixelfly_rank: Annotated[int, Range(0, 2**16)] | None = None
    pixelfly_block_size: Annotated[int, Range(1, 4096)] = 32
    pixelfly_butterfly_size: Annotated[int, Range(1, 4096)] = 8
    image_loss_weight: Annotated[float, Range(0)] = 7

    attention_bias: ClassVar[bool] = False
    """Whether the projection to queries, keys and values has a bias."""

    def __post_init__(self) -> None:
        check(self)
        if not self.attention_pattern:
            raise UserError("attention_pattern=(): must name at least one kind of attention")
        if self.conv_kernel % 2 == 0:
            raise UserError(f"conv_kernel={self.conv_kernel}: must be odd, so that the window has a centre")
        if self.token_shift and self.hidden_size % 4:
            raise UserError(f"hidden_size={self.hidden_size}: token_shift needs a multiple of 4")
        if self.rotary and self.head_size < 6:
            raise UserError(f"head_size={self.head_size}: rotary needs at least 6, two channels for each of three axes")
        if self.rotary and self.head_size % 2:
            raise UserError(f"head_size={self.head_size}: must be even, as rotary rotates pairs of channels")
        self._check_sharing()

    def _check_sharing(self) -> None:
        shared = self.shared_blocks
        if isinstance(shared, tuple):
            most = self.num_layers - 1
            if len(shared) != self.num_layers or max(shared) > most:
                raise UserError(f"shared_blocks={shared}: a tuple names a block in 0..{most} for each layer")
            if set(shared) != set(range(max(shared) + 1)):
                raise UserError(f"shared_blocks={shared}: blocks must be numbered from 0 without gaps")
        kind_of_block: dict[int, str] = {}
        for layer, (block, kind) in enumerate(zip(self.layer_blocks, self.layer_kinds, strict=True)):
            if kind_of_block.setdefault(block, kind) != kind:
                raise UserError(
                    f"shared_blocks={shared}: layer {layer} has {kind} attention but shares block {block} with a "
                    f"{kind_of_block[block]} layer; layers that share a block need the same kind"
                )

    @classmethod
    def paper(cls) -> "DalleConfig":
        """The paper's model: 64 layers, 125,894,244 parameters."""
        return cls()

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The attention kind of each layer."""
        pattern = self.attention_pattern
        kinds = [pattern[layer % len(pattern)] for layer in range(self.num_layers)]
        if self.last_attention is not None:
            kinds[-1] = self.last_attention
        return tuple(kinds)

    @property
    def layer_blocks(self) -> tuple[int, ...]:
        """The block (attention and feed-forward weights) of each layer, numbered from 0 in order of first use."""
        if isinstance(self.shared_blocks, tuple):
            return self.shared_blocks
        count = self.shared_blocks or self.num_layers
        blocks = [layer % count for layer in range(self.num_layers)]
        if self.last_attention is not None:
            blocks[-1] = min(count, self.num_layers - 1)
        return tuple(blocks)

    @property
    def conv_reach(self) -> tuple[int, int]:
        """(rows up and columns to the left, columns to the right) that a query's convolution window reaches."""
        half = self.conv_kernel // 2
        return (half, half) if self.conv_window == "centred" else (self.conv_kernel - 1, 0)

    @property
    def image_len(self) -> int:
        """Codes in a picture, I."""
        return self.image_side**2

    @property
    def num_text_positions(self) -> int:
        """Positions 0..T: `<bos>` and the caption."""
        return self.text_len + 1

    @property
    def sequence_len(self) -> int:
        """Input positions in training, L = T + I: `<bos>`, the caption and all codes but the last."""
        return self.text_len + self.image_len

    @property
    def num_text_tokens(self) -> int:
        """Text rows of the vocabulary, V' = V + T: the tokenizer's ids and one padding id per text position."""
        return self.text_vocab_size + self.text_len

    @property
    def num_tokens(self) -> int:
        """Rows of the vocabulary, N = V' + C."""
        return self.num_text_tokens + self.image_vocab_size

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "DalleConfig":
        """Inverse of `to_dict`, but missing fields take their defaults; ValueError names unknown fields."""
        unknown = set(fields) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise UserError(f"unknown DalleConfig field: {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**values)
