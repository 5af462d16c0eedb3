"""Prefill: reads captions, and the first codes of pictures if given, in one pass.

N prompts, T text length, P = T + 1 text positions, m codes given, S = P + m, H heads, d head size, D hidden size,
C codebook, R rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dalle_lean.model.attention import attend
from dalle_lean.model.rope import rotate
from dalle_lean.model.token_shift import token_shift
from inference.sampling.packed_decoder import Norm, PackedDecoder, normalise


@dataclass(frozen=True)
class Prompts:
    """Keys and values of captions and given codes in every layer, and the logits of the next code."""

    text_kv: list[Tensor]  # keys and values of the captions, for each layer [2, H, N, P, d]
    code_kv: list[Tensor]  # keys and values of the given codes, for each layer [2, H, N, m, d]
    code_inputs: list[Tensor]
    """The given codes' channels for their neighbours, for each branch [N, m, D / 2]; empty without token shift."""
    codes: Tensor  # the given codes [N, m]
    logits: Tensor  # of the next code, [N, C]
    guided: bool  # the second half of the prompts are empty captions, for classifier-free guidance of the first half

    @property
    def count(self) -> int:
        """N."""
        return len(self.logits)

    @property
    def num_codes(self) -> int:
        """m."""
        return self.codes.shape[1]


@torch.inference_mode()
def read_prompts(
    decoder: PackedDecoder, text_ids: Tensor, codes: Tensor | None = None, *, guided: bool = False
) -> Prompts:
    """Run the decoder over captions [N, T] and, for completion, the first codes of their pictures [N, m], m < I.

    guided: also read as many empty captions (all ids 0).
    """
    config = decoder.config
    text_ids = text_ids.to(decoder.device)
    codes = text_ids.new_zeros(len(text_ids), 0) if codes is None else codes.to(decoder.device)
    if guided:
        text_ids, codes = torch.cat([text_ids, torch.zeros_like(text_ids)]), codes.repeat(2, 1)
    if codes.shape[1] >= config.image_len:
        raise ValueError(f"{codes.shape[1]} codes are given of {config.image_len}; nothing is left to draw")
    # Products of other sizes round differently: read one by one, a prompt does not depend on the others.
    together = 1 if decoder.device.type == "cpu" else len(text_ids)
    parts = [_read(decoder, *part) for part in zip(text_ids.split(together), codes.split(together), strict=True)]
    text_kv, code_kv, code_inputs, logits = zip(*parts, strict=True)
    joined_kv = joined(text_kv, dim=2), joined(code_kv, dim=2)
    return Prompts(*joined_kv, joined(code_inputs, dim=0), codes, torch.cat(logits), guided)


def joined(parts: Sequence[list[Tensor]], dim: int) -> list[Tensor]:
    """Concatenate lists of tensors, one for each layer or branch, along the prompts' dimension."""
    return [torch.cat(tensors, dim) for tensors in zip(*parts, strict=True)]


def _read(
    decoder: PackedDecoder, text_ids: Tensor, codes: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """The first three fields of Prompts and the logits."""
    config = decoder.config
    a, b = decoder.streams(decoder.model.embed(text_ids, codes).float())
    layout = decoder.model.layout(a.shape[1], a.dtype, a.device)
    layout.fused = False  # compiling the kernel takes longer than reading prompts without it
    text_kv, code_kv = [], []
    code_inputs: list[Tensor] = []
    num_text = config.num_text_positions

    def prepare(stream: Tensor, norm: Norm) -> Tensor:
        h = normalise(norm, stream)
        if config.token_shift:
            code_inputs.append(h[:, num_text:, : config.hidden_size // 2].clone())
            h = token_shift(h, num_text, config.image_side)
        return h.to(decoder.dtype).flatten(0, 1)

    for index, layer in enumerate(decoder.layers):
        qkv = layer.qkv(prepare(b, layer.attention.norm))
        qkv = qkv.view(len(a), -1, 3, config.num_heads, config.head_size).permute(2, 0, 3, 1, 4)
        query, key, value = (qkv if layout.table is None else rotate(qkv, layout.table)).unbind(0)  # [N, H, S, d]
        kv = torch.stack([key, value]).transpose(1, 2)  # [2, H, N, S, d]
        text_kv.append(kv[:, :, :, :num_text].contiguous())
        code_kv.append(kv[:, :, :, num_text:].contiguous())
        seen = attend(query, key, value, config.layer_kinds[index], layout)
        layer.attention.add(a, layer.out(seen.transpose(1, 2).flatten(0, 1).flatten(1)).view(a.shape))
        layer.feed_forward.add(b, layer.feed(prepare(a, layer.feed_forward.norm)).view(b.shape))
    return text_kv, code_kv, code_inputs, decoder.logits(a[:, -1], b[:, -1])
