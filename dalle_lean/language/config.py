"""LanguageConfig: a text decoder as a DalleConfig without a picture."""

from dataclasses import dataclass
from typing import ClassVar

from dalle_lean.errors import UserError
from dalle_lean.model.config import DalleConfig

NO_PICTURE = ("image_vocab_size", "image_side", "attention_pattern", "last_attention", "token_shift")
"""Fields that keep their defaults."""


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(DalleConfig):
    """What a text decoder computes; the defaults are the smallest GPT-2's (Radford et al. 2019).

    Args:
        text_vocab_size: ids of the tokenizer, V.
        text_len: maximum length of a sample in tokens, T.
        hidden_size, num_layers, num_heads, head_size, ffn_multiplier, ffn_activation, ffn_gated, shared_blocks,
            tie_embeddings, reversible, sandwich_norm, pixelfly_rank: as in DalleConfig.
        rotary: rotated queries and keys (Su et al. 2021); False is a learnt table of positions.

    The other fields are fixed: attention is full, and there are no image codes.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """

    text_vocab_size: int = 50257
    text_len: int = 1024
    image_vocab_size: int = 1
    image_side: int = 1
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    ffn_activation: str = "gelu_tanh"
    ffn_gated: bool = False
    attention_pattern: tuple[str, ...] = ("full",)
    last_attention: str | None = None
    shared_blocks: int | tuple[int, ...] | None = None
    token_shift: bool = False
    rotary: bool = False
    reversible: bool = False

    attention_bias: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in NO_PICTURE:
            if getattr(self, name) != (value := getattr(LanguageConfig, name)):
                raise UserError(
                    f"{name}={getattr(self, name)!r}: a language model has no picture; leave it at {value!r}"
                )

    @property
    def image_len(self) -> int:
        """0: there are no image codes."""
        return 0

    @property
    def num_text_positions(self) -> int:
        """Positions 0..T - 1."""
        return self.text_len

    @property
    def num_text_tokens(self) -> int:
        """V: samples are not padded."""
        return self.text_vocab_size

    @property
    def num_tokens(self) -> int:
        """Rows of the vocabulary, V."""
        return self.text_vocab_size
