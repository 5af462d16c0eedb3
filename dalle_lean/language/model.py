"""LanguageModel, a decoder over the tokens of a text, and its LanguageConfig, a DalleConfig without a picture.

B batch, S tokens, T their maximum, D hidden size, d head size, V vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dalle_lean.errors import UserError
from dalle_lean.memory import MemoryPlan
from dalle_lean.model.attention import Layout
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.dalle import check_ids
from dalle_lean.model.decoder import Decoder
from dalle_lean.model.loss import Section, embed
from dalle_lean.model.rope import rotary_table

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

    The other fields are fixed: attention is full, and there are no image codes. ValueError names a wrong field.
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
            if (value := getattr(self, name)) != (only := getattr(LanguageConfig, name)):
                raise UserError(f"{name}={value!r}: a language model has no picture; leave it at {only!r}")

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


class LanguageModel(Decoder):
    """A text decoder for a LanguageConfig; its MemoryPlan can be set later."""

    config: LanguageConfig

    def __init__(
        self,
        config: LanguageConfig,
        plan: MemoryPlan | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(config, plan, device=device, dtype=dtype)
        if not config.rotary:
            table = torch.randn(config.text_len, config.hidden_size, device=device, dtype=dtype)
            self.positions = nn.Parameter(table * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position: ids [B, S], integers in [0, V), S <= T -> [B, S, V]. ValueError
        names what is wrong with the ids."""
        return self.output(self.hidden(ids).to(self.output.weight.dtype))

    def loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy in nats of all tokens but the first; ids [B, S + 1] without padding, S in 1..T."""
        check_ids("ids", ids, self.config.text_vocab_size)
        if ids.shape[1] < 2:
            raise UserError(f"ids has {ids.shape[1]} tokens a sample; the loss needs at least 2")
        everything = slice(None)
        hidden = self.hidden(ids[:, :-1])
        return self.section_losses(hidden, Section(everything, everything, ids[:, 1:].long())).squeeze(0)

    def hidden(self, ids: Tensor) -> Tensor:
        """The layers' normalised output, [B, S, D]."""
        check_ids("ids", ids, self.config.text_vocab_size)
        length = ids.shape[1]
        if not (len(ids) and 1 <= length <= self.config.text_len):
            raise UserError(f"ids has the shape {list(ids.shape)}; it must be [at least 1, 1..{self.config.text_len}]")
        x = embed(ids.long(), self.table, self.plan)
        if not self.config.rotary:
            x = x + self.positions[:length]
        x = x.to(self.plan.residual_dtype_for(x.dtype))
        table = None
        if self.config.rotary:
            table = rotary_table(text_angles(length, self.config.head_size, x.device), x.dtype)
        return self.run(x, Layout(self.config, 0, 1, x.device, table))


def text_angles(length: int, head_size: int, device: torch.device) -> Tensor:
    """Angles of queries, keys and values, [3, 1, 1, S, d / 2]; values are not rotated."""
    frequencies = 10000 ** (-torch.arange(0, head_size, 2, device=device) / head_size)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.stack([angles, angles, torch.zeros_like(angles)])[:, None, None]
