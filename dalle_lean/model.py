"""Dalle: a decoder over a caption and the codes of its picture.

B batch, T text length, I codes in a picture, n codes given, L = T + I, D hidden size. The vocabulary has V rows: V' for
text, then C for image codes. Positions 0..T hold `<bos>` and the caption, position T + 1 + m holds code m.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear

from dalle_lean.blocks import Block, Layer
from dalle_lean.config import DalleConfig
from dalle_lean.masks import attention_mask
from dalle_lean.memory import MemoryPlan
from dalle_lean.rotary import rotary_angles, rotary_table
from dalle_lean.shift import token_shift
from dalle_lean.stack import BranchCall, Stack, run_reversible, run_reversible_keeping, run_sequential

BOS = 0


class Surroundings(NamedTuple):
    """What attention needs to know of the positions it runs over."""

    masks: dict[str, Tensor]
    """By kind of attention, [S, S]."""
    table: Tensor | None
    """Rotary cosines and sines, [2, S, 3 n]."""


class Dalle(nn.Module):
    """The paper's decoder (Borzunov et al. 2022, section 3) for a DalleConfig; its MemoryPlan can be set later."""

    def __init__(self, config: DalleConfig, plan: MemoryPlan | None = None):
        super().__init__()
        self.config = config
        self.plan = plan or MemoryPlan()
        self.blocks = nn.ModuleList(Block(config) for _ in range(max(config.layer_blocks) + 1))
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.num_tokens)
        if not config.tie_embeddings:
            self.embedding = nn.Embedding(config.num_tokens, config.hidden_size)
        if not config.rotary:
            self.text_positions = nn.Parameter(torch.randn(config.num_text_positions, config.hidden_size) * 0.02)
            self.row_positions = nn.Parameter(torch.randn(config.image_side, config.hidden_size) * 0.02)
            self.column_positions = nn.Parameter(torch.randn(config.image_side, config.hidden_size) * 0.02)

    @property
    def plan(self) -> MemoryPlan:
        """How backward gets its activations."""
        return self._plan

    @plan.setter
    def plan(self, plan: MemoryPlan) -> None:
        plan.activations_for(self.config)
        self._plan = plan

    def block(self, layer: int) -> Block:
        """The block of a layer; layers that are tied return the same object."""
        block = self.blocks[self.config.layer_blocks[layer]]
        assert isinstance(block, Block)
        return block

    def forward(self, text_ids: Tensor, image_codes: Tensor | None = None) -> Tensor:
        """Logits of the next id at every position.

        Args:
            text_ids: [B, T] integers in [0, text_vocab_size); 0 stands for the padding id of its position.
            image_codes: [B, n] integers in [0, image_vocab_size), n <= I; None is n = 0.

        Returns:
            [B, S, V] with S = min(T + 1 + n, L). Positions before T allow text rows only, the others image rows only;
            what is forbidden is the most negative finite number.

        Raises:
            ValueError: names the argument, its value and the allowed range.
        """
        if image_codes is None:
            image_codes = text_ids.new_zeros(len(text_ids), 0)
        self._check_inputs(text_ids, image_codes)
        logits: Tensor = self.output(self.hidden(text_ids, image_codes))
        num_text_tokens, text_len = self.config.num_text_tokens, self.config.text_len
        forbidden = torch.finfo(logits.dtype).min
        is_text_row = torch.arange(self.config.num_tokens, device=logits.device) < num_text_tokens
        predicts_text = torch.arange(logits.shape[1], device=logits.device) < text_len
        return logits.masked_fill(is_text_row[None, :] != predicts_text[:, None], forbidden)

    def loss(self, text_ids: Tensor, image_codes: Tensor) -> Tensor:
        """Weighted mean of the text's and the image's cross-entropy in nats; text_ids [B, T], image_codes [B, I]."""
        text_nats, image_nats = self.losses(text_ids, image_codes)
        weight = self.config.image_loss_weight
        return (text_nats + weight * image_nats) / (1 + weight)

    def losses(self, text_ids: Tensor, image_codes: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats of a caption id and of an image code; each softmax runs over its own rows only."""
        self._check_inputs(text_ids, image_codes)
        config = self.config
        if image_codes.shape[1] != config.image_len:
            raise ValueError(
                f"image_codes has {image_codes.shape[1]} codes a picture; the loss needs {config.image_len}"
            )
        hidden = self.hidden(text_ids, image_codes)
        split = config.num_text_tokens
        text_logits = linear(hidden[:, : config.text_len], self.output.weight[:split], self.output.bias[:split])
        image_logits = linear(hidden[:, config.text_len :], self.output.weight[split:], self.output.bias[split:])
        text_nats = cross_entropy(text_logits.flatten(0, 1).to(hidden.dtype), self._text_rows(text_ids).flatten())
        image_nats = cross_entropy(image_logits.flatten(0, 1).to(hidden.dtype), image_codes.long().flatten())
        return text_nats, image_nats

    def hidden(self, text_ids: Tensor, image_codes: Tensor) -> Tensor:
        """Normalised outputs of the stack before the output layer, [B, S, D]."""
        x = self.embed(text_ids, image_codes)
        stack = self.stack(self.surroundings(x.shape[1], x.dtype, x.device))
        if not self.config.reversible:
            x = run_sequential(x, stack)
        elif self.plan.activations_for(self.config) == "reversible" and torch.is_grad_enabled():
            x = run_reversible(x, stack)
        else:
            x = run_reversible_keeping(x, stack)
        hidden: Tensor = self.norm(x)
        return hidden

    def embed(self, text_ids: Tensor, image_codes: Tensor) -> Tensor:
        """`<bos>`, caption and codes, the last code dropped where all are given: [B, S, D] with S <= L."""
        config = self.config
        ids = torch.cat([self._text_rows(text_ids), image_codes.long() + config.num_text_tokens], dim=1)
        ids = nn.functional.pad(ids, (1, 0), value=BOS)[:, : config.sequence_len]
        x = embedding(ids, self.output.weight if config.tie_embeddings else self.embedding.weight)
        if not config.rotary:
            x = x + self._position_table()[: x.shape[1]]
        return x

    def surroundings(self, length: int, dtype: torch.dtype, device: torch.device) -> Surroundings:
        """Masks and rotary table of the first `length` positions, for activations of `dtype`."""
        config = self.config
        kinds = dict.fromkeys(config.layer_kinds)
        masks = {kind: attention_mask(config, kind, device)[:length, :length] for kind in kinds}
        if not config.rotary:
            return Surroundings(masks, None)
        angles = rotary_angles(config.num_text_positions, config.image_side, config.head_size, device)
        return Surroundings(masks, rotary_table(angles[:length], dtype))

    def stack(self, surroundings: Surroundings) -> Stack:
        """The branches of all layers over the given positions."""
        return [self._branches(layer, surroundings) for layer in range(self.config.num_layers)]

    def _branches(self, index: int, surroundings: Surroundings) -> tuple[BranchCall, BranchCall]:
        layer, block = self.layers[index], self.block(index)
        assert isinstance(layer, Layer)
        mask = surroundings.masks[self.config.layer_kinds[index]]

        def attend(x: Tensor) -> Tensor:
            return layer.attention.leave(block.attention(self.shift(layer.attention.norm(x)), mask, surroundings.table))

        def feed(x: Tensor) -> Tensor:
            return layer.feed_forward.leave(block.feed_forward(self.shift(layer.feed_forward.norm(x))))

        return (
            BranchCall(attend, [*layer.attention.parameters(), *block.attention.parameters()]),
            BranchCall(feed, [*layer.feed_forward.parameters(), *block.feed_forward.parameters()]),
        )

    def shift(self, x: Tensor) -> Tensor:
        """Token shift where the config has it; x [B, S, D] from position 0."""
        if not self.config.token_shift:
            return x
        return token_shift(x, self.config.num_text_positions, self.config.image_side)

    def _text_rows(self, text_ids: Tensor) -> Tensor:
        """Vocabulary rows of the caption: every id 0 becomes the padding id of its position."""
        padding = torch.arange(self.config.text_len, device=text_ids.device) + self.config.text_vocab_size
        return torch.where(text_ids == 0, padding, text_ids.long())

    def _position_table(self) -> Tensor:
        picture = self.row_positions[:, None] + self.column_positions[None, :]
        return torch.cat([self.text_positions, picture.flatten(0, 1)])

    def _check_inputs(self, text_ids: Tensor, image_codes: Tensor) -> None:
        config = self.config
        check_ids("text_ids", text_ids, config.text_vocab_size)
        check_ids("image_codes", image_codes, config.image_vocab_size)
        if text_ids.shape[1] != config.text_len:
            raise ValueError(f"text_ids has {text_ids.shape[1]} ids a caption; this model takes {config.text_len}")
        if image_codes.shape[1] > config.image_len:
            raise ValueError(
                f"image_codes has {image_codes.shape[1]} codes; this model takes at most {config.image_len}"
            )
        if len(text_ids) != len(image_codes):
            raise ValueError(f"text_ids has {len(text_ids)} rows and image_codes {len(image_codes)}; they must agree")


def check_ids(name: str, ids: Tensor, size: int) -> None:
    """ValueError unless `ids` is [B, n] of integers in [0, size)."""
    if ids.dtype not in (torch.int64, torch.int32, torch.int16):
        raise ValueError(f"{name} has dtype {ids.dtype}; it must be int64, int32 or int16")
    if ids.dim() != 2:
        raise ValueError(f"{name} has shape {list(ids.shape)}; it must be [batch, positions]")
    if torch.compiler.is_compiling() or ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= size:
        raise ValueError(f"{name} has the value {low if low < 0 else high}; it must be in 0..{size - 1}")
