"""A model's weights, prepared for sampling.

R rows, D hidden size, C codebook. Residual streams, norms, rotations, softmax and logits are float32 in every
precision; attention scores have the precision's dtype in `PlainStep`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from dalle_lean.errors import UserError
from dalle_lean.free_memory import free_ram_bytes
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.dalle import Dalle
from dalle_lean.model.layers import Block, BranchParameters, Layer
from dalle_lean.model.rope import rotary_angles, rotary_table
from dalle_lean.words import human_bytes
from inference.sampling.kv_layout import biases_bytes, score_bias
from inference.sampling.packed_linear import Precision, Projection, check_precision, compute_dtype, pack, pack_dense

Norm = tuple[Tensor, Tensor, float]  # weight and bias [D] of a LayerNorm, and its epsilon


class BranchWeights:
    """The parameters that a branch owns."""

    def __init__(self, branch: BranchParameters):
        self.norm = float_norm(branch.norm)
        self.norm_out = None if branch.norm_out is None else float_norm(branch.norm_out)
        self.scale = branch.scale.detach().float()

    def add(self, stream: Tensor, out: Tensor) -> None:
        """Add the inner module's output, [.., D] in any dtype, to the float32 stream."""
        out = out.float()
        stream.addcmul_(out if self.norm_out is None else normalise(self.norm_out, out), self.scale)


@dataclass(frozen=True)
class LayerWeights:
    """The two branches of a layer and its block's projections."""

    kind: str
    attention: BranchWeights
    qkv: Projection
    out: Projection
    feed_forward: BranchWeights
    up: Projection
    down: Projection
    activate: Callable[[Tensor], Tensor]  # between up and down

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward's inner module, [R, D] -> [R, D]."""
        return self.down(self.activate(self.up(x)))


class PackedDecoder:
    """The transformer's weights for sampling, converted and packed for one precision, on the model's device.

    `KVCache` runs it code by code. Weights that need no conversion are shared with the model: make a new PackedDecoder
    after further training.
    """

    def __init__(self, model: Dalle, precision: Precision = "fp32", compiled: bool = True):
        """ValueError if the model's device does not support the precision, or the RAM is too small for the pictures.

        compiled: decode with numba's kernels where they can be used.
        """
        self.config, self.model, self.compiled = model.config, model, compiled
        self.device = model.output.weight.device
        check_precision(precision, self.device)
        self.precision, self.dtype = precision, compute_dtype(precision)
        check_free_memory(self.config, self.dtype)
        # Packed once for all layers that share a block.
        blocks = []
        for block in model.blocks:
            assert isinstance(block, Block)
            attention, feed_forward = block.attention, block.feed_forward
            linears = (attention.qkv, attention.out, feed_forward.up, feed_forward.down)
            blocks.append([pack(linear, precision, compiled) for linear in linears])
        self.layers = []
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            qkv, out, up, down = blocks[model.config.layer_blocks[index]]
            kind, activate = model.config.layer_kinds[index], model.block(index).feed_forward.activate
            branches = BranchWeights(layer.attention), BranchWeights(layer.feed_forward)
            self.layers.append(LayerWeights(kind, branches[0], qkv, out, branches[1], up, down, activate))
        self.norm = float_norm(model.norm)
        kinds = dict.fromkeys(self.config.layer_kinds)
        self.score_biases = {kind: score_bias(self.config, kind, self.device, self.dtype) for kind in kinds}
        self.rotations = rotations(self.config, self.device)
        codes = slice(self.config.num_text_tokens, None)
        self.output = pack_dense(
            model.output.weight.detach()[codes], model.output.bias.detach()[codes], precision, compiled
        )
        self.idle_cache: Any = None  # on CUDA, the KVCache of the last batch with its recorded graphs

    def embed(self, codes: Tensor, place: Tensor) -> Tensor:
        """Codes [R] at `place` [1] in the picture -> float32 [R, D]."""
        config, model = self.config, self.model
        x = embedding(codes + config.num_text_tokens, model.table).float()
        if not config.rotary:
            x += model.row_positions[place // config.image_side] + model.column_positions[place % config.image_side]
        return x

    def logits(self, a: Tensor, b: Tensor) -> Tensor:
        """The streams [R, D] of one position -> float32 logits of the next code [R, C]."""
        return self.output(normalise(self.norm, (a + b) / 2).to(self.dtype)).float()

    def streams(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The embedding as the two streams of a reversible stack, or twice as the only stream."""
        return x, x.clone() if self.config.reversible else x


def check_free_memory(config: DalleConfig, dtype: torch.dtype) -> None:
    """ValueError, with both figures, if the score biases for pictures of this size need more RAM than is free."""
    need, free = biases_bytes(config, dtype), free_ram_bytes()
    if need > free:
        raise UserError(
            f"image_side={config.image_side}: drawing pictures of {config.image_len:,} codes needs {human_bytes(need)} "
            f"of memory before the first one, and only {human_bytes(free)} are free"
        )


def float_norm(norm: torch.nn.LayerNorm) -> Norm:
    return norm.weight.detach().float(), norm.bias.detach().float(), norm.eps


def normalise(norm: Norm, x: Tensor) -> Tensor:
    """LayerNorm over the last dimension, in float32."""
    return torch.layer_norm(x, [x.shape[-1]], *norm)


def rotations(config: DalleConfig, device: torch.device) -> Tensor:
    """Factors of queries, keys and values at each place: complex [I, 3, d / 2], or [I, 3, 1] without rotary positions.
    The queries' factor includes the scale of the scores."""
    scale = torch.tensor([config.head_size**-0.5, 1, 1], device=device)[:, None]
    if not config.rotary:
        return scale.expand(config.image_len, 3, 1)
    angles = rotary_angles(config.num_text_positions, config.image_side, config.head_size, device)
    table = rotary_table(angles[config.num_text_positions :], torch.float32)
    return scale * pad(table, (0, config.head_size // 2 - table.shape[1]), value=1.0)[:, None]
