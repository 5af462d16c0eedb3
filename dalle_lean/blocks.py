"""The modules that layers share: attention and the GEGLU feed-forward.

B batch, S sequence, D hidden size, H heads, d head size.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from dalle_lean.config import DalleConfig
from dalle_lean.rotary import rotate


class Attention(nn.Module):
    """Multi-head attention whose queries, keys and values are all rotated (model of the training run)."""

    def __init__(self, config: DalleConfig):
        super().__init__()
        inner = config.num_heads * config.head_size
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * inner, bias=False)
        self.out = nn.Linear(inner, config.hidden_size)

    def project(self, x: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, D] -> rotated queries, keys and values, [B, H, S, d] each; table [2, S, 3 n] or None."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = (qkv if table is None else rotate(qkv, table)).unbind(0)
        return query, key, value

    def merge(self, heads: Tensor) -> Tensor:
        """Heads' outputs [B, H, S, d] -> [B, S, D]."""
        merged: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return merged

    def forward(self, x: Tensor, mask: Tensor, table: Tensor | None) -> Tensor:
        """x [B, S, D], mask [S, S] with True = may attend -> [B, S, D]."""
        query, key, value = self.project(x, table)
        return self.merge(scaled_dot_product_attention(query, key, value, attn_mask=mask))


class FeedForward(nn.Module):
    """GEGLU feed-forward (Shazeer 2020): the gate is the second half of the first layer's output."""

    def __init__(self, config: DalleConfig):
        super().__init__()
        inner = config.ffn_multiplier * config.hidden_size
        self.up = nn.Linear(config.hidden_size, 2 * inner)
        self.down = nn.Linear(inner, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        value, gate = self.up(x).chunk(2, dim=-1)
        out: Tensor = self.down(value * gelu(gate))
        return out


class Block(nn.Module):
    """One set of attention and feed-forward weights, used by every layer that shares it."""

    def __init__(self, config: DalleConfig):
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)


class Branch(nn.Module):
    """What a branch of a layer has to itself: LayerNorm in front, LayerScale (Touvron et al. 2021) behind."""

    def __init__(self, config: DalleConfig, layer: int):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.norm_out = nn.LayerNorm(config.hidden_size) if config.sandwich_norm else None
        self.scale = nn.Parameter(torch.full((config.hidden_size,), initial_scale(layer)))

    def leave(self, x: Tensor) -> Tensor:
        """What the branch adds to its stream, from the inner module's output; [B, S, D]."""
        return self.scale * (x if self.norm_out is None else self.norm_out(x))


class Layer(nn.Module):
    """The two branches of one layer; the weights between norm and scale belong to a Block."""

    def __init__(self, config: DalleConfig, layer: int):
        super().__init__()
        self.attention = Branch(config, layer)
        self.feed_forward = Branch(config, layer)


def initial_scale(layer: int) -> float:
    """LayerScale's start for layer `layer`, counted from 0: 0.1 up to the 18th, 1e-5 up to the 24th, then 1e-6."""
    if layer < 18:
        return 0.1
    return 1e-5 if layer < 24 else 1e-6
