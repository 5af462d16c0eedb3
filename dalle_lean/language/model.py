"""LanguageModel: a decoder over the tokens of a text.

B batch, S tokens, T their maximum, D hidden size, d head size, V vocabulary.
"""

import torch
from torch import Tensor, nn

from dalle_lean.errors import UserError
from dalle_lean.language.config import LanguageConfig
from dalle_lean.memory import MemoryPlan
from dalle_lean.model.attention import Layout
from dalle_lean.model.branches import SequenceContext
from dalle_lean.model.dalle import check_ids
from dalle_lean.model.decoder import Decoder
from dalle_lean.model.loss import Section, embed
from dalle_lean.model.rope import rotary_table


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
        """Logits of the next token at every position: ids [B, S], integers in [0, V), S <= T -> [B, S, V].

        Raises:
            ValueError: names what is wrong with the ids.
        """
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
        """Normalised outputs of the stack before the output layer, [B, S, D]."""
        check_ids("ids", ids, self.config.text_vocab_size)
        length = ids.shape[1]
        if not (len(ids) and 1 <= length <= self.config.text_len):
            raise UserError(f"ids has the shape {list(ids.shape)}; it must be [at least 1, 1..{self.config.text_len}]")
        x = embed(ids.long(), self.table, self.plan)
        if not self.config.rotary:
            x = x + self.positions[:length]
        x = x.to(self.plan.residual_dtype_for(x.dtype))
        return self.run(x, self.context(length, x.dtype, x.device))

    def context(self, length: int, dtype: torch.dtype, device: torch.device) -> SequenceContext:
        """Layout and rotary table of the first `length` positions, for residual streams of `dtype`."""
        table = rotary_table(text_angles(length, self.config.head_size, device), dtype) if self.config.rotary else None
        return SequenceContext(self.config, Layout(self.config, 0, 1, device), table, dtype)


def text_angles(length: int, head_size: int, device: torch.device) -> Tensor:
    """Angles of queries, keys and values, [3, 1, 1, S, d / 2]; values are not rotated."""
    frequencies = 10000 ** (-torch.arange(0, head_size, 2, device=device) / head_size)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.stack([angles, angles, torch.zeros_like(angles)])[:, None, None]
