"""Decoding one code at a time with keys and values kept, the prompt's once for all its pictures.

B pictures at once, P text positions (`<bos>` and the caption), I codes in a picture, f side of the grid of codes,
D hidden size, H heads, d head size, C codebook.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention

from dalle_lean.blocks import Branch, Layer
from dalle_lean.config import DalleConfig
from dalle_lean.masks import attention_mask
from dalle_lean.model import Dalle
from dalle_lean.rotary import rotary_angles, rotary_table
from dalle_lean.stack import Run, run_reversible_keeping, run_sequential

InnerModule = Callable[[int, Tensor], Tensor]
"""(layer, normalised input [B, S, D]) -> output [B, S, D] of the layer's attention or feed-forward."""


@dataclass(frozen=True)
class Prompt:
    """A caption as every layer's attention sees it, and the logits of the first code."""

    keys: list[Tensor]
    """For each layer, [H, P, d]."""
    values: list[Tensor]
    """For each layer, [H, P, d]."""
    logits: Tensor
    """[C]."""


@torch.inference_mode()
def read_prompt(model: Dalle, text_ids: Tensor) -> Prompt:
    """Run the model over the ids of one caption, [1, T]."""
    keys, values = [], []
    x = model.embed(text_ids, text_ids.new_zeros(1, 0))
    surroundings = model.surroundings(x.shape[1], x.dtype, x.device)

    def attend(layer: int, x: Tensor) -> Tensor:
        attention = model.block(layer).attention
        query, key, value = attention.project(surroundings.shift(x), surroundings.table)
        keys.append(key[0])
        values.append(value[0])
        # All kinds of attention are the same over text.
        return attention.merge(scaled_dot_product_attention(query, key, value, is_causal=True))

    def feed(layer: int, x: Tensor) -> Tensor:
        return model.block(layer).feed_forward(surroundings.shift(x))

    hidden = run_layers(model, x, attend, feed)
    return Prompt(keys, values, code_logits(model, hidden[:, -1])[0])


class PictureCache:
    """What decoding remembers of the codes it has read, for B pictures of one prompt.

    Numbers held: 2 * layers * B * I * H * d for keys and values, layers * B * f * D for token shift.
    """

    def __init__(self, model: Dalle, prompt: Prompt, batch: int):
        config, weight = model.config, model.output.weight
        self.model = model
        self.prompt = prompt
        self.visible = visible_codes(config, weight.device)
        self.codes_read = 0
        layers, side = config.num_layers, config.image_side
        grid = (layers, batch, config.num_heads, config.image_len, config.head_size)
        self.keys, self.values = weight.new_zeros(grid), weight.new_zeros(grid)
        # Of each column the code last read, as the attention (0) and feed-forward (1) branches of a layer saw it.
        self.columns = weight.new_zeros(2, layers, batch, side, config.hidden_size // 2) if config.token_shift else None
        self.table: Tensor | None = None
        if config.rotary:
            angles = rotary_angles(config.num_text_positions, side, config.head_size, weight.device)
            self.table = rotary_table(angles[config.num_text_positions :], weight.dtype)

    @torch.inference_mode()
    def read(self, codes: Tensor) -> Tensor:
        """Read the next code [B] of each picture -> logits [B, C] of the code after it."""
        config, model, place = self.model.config, self.model, self.codes_read
        assert place < config.image_len - 1, "nothing follows the last code"
        x = embed_code(model, codes, place)
        table = None if self.table is None else self.table[:, place : place + 1]

        def attend(layer: int, x: Tensor) -> Tensor:
            attention = model.block(layer).attention
            query, key, value = attention.project(self._shift(0, layer, x), table)
            self.keys[layer, :, :, place] = key[:, :, 0]
            self.values[layer, :, :, place] = value[:, :, 0]
            seen = self.visible[config.layer_kinds[layer]][place]
            return attention.merge(
                attend_prompt_and_codes(
                    query,
                    (self.prompt.keys[layer], self.prompt.values[layer]),
                    (self.keys[layer].index_select(2, seen), self.values[layer].index_select(2, seen)),
                )
            )

        def feed(layer: int, x: Tensor) -> Tensor:
            return model.block(layer).feed_forward(self._shift(1, layer, x))

        hidden = run_layers(model, x, attend, feed)
        self.codes_read += 1
        return code_logits(model, hidden[:, 0])

    def _shift(self, branch: int, layer: int, x: Tensor) -> Tensor:
        """Token shift of the code being read, x [B, 1, D]; remembers it for its right and lower neighbours."""
        if self.columns is None:
            return x
        columns = self.columns[branch, layer]
        column = self.codes_read % self.model.config.image_side
        half, quarter = x.shape[-1] // 2, x.shape[-1] // 4
        above = columns[:, column, :quarter].clone()
        left = columns[:, column - 1, quarter:] if column > 0 else torch.zeros_like(above)
        columns[:, column] = x[:, 0, :half]
        return torch.cat([above, left, x[:, 0, half:]], dim=-1)[:, None]


def attend_prompt_and_codes(query: Tensor, prompt: tuple[Tensor, Tensor], codes: tuple[Tensor, Tensor]) -> Tensor:
    """One softmax over the prompt's keys and values [H, P, d], shared by the batch, and the codes' [B, H, n, d].

    query [B, H, 1, d] -> [B, H, 1, d]. The softmax is at least float32.
    """
    query = query * query.shape[-1] ** -0.5
    to_prompt = torch.einsum("bhd,hpd->bhp", query[:, :, 0], prompt[0])[:, :, None]
    scores = torch.cat([to_prompt, query @ codes[0].transpose(-1, -2)], dim=-1)
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1).to(scores.dtype)
    on_prompt, on_codes = weights.split([prompt[0].shape[1], codes[0].shape[2]], dim=-1)
    return torch.einsum("bhp,hpd->bhd", on_prompt[:, :, 0], prompt[1])[:, :, None] + on_codes @ codes[1]


def run_layers(model: Dalle, x: Tensor, attend: InnerModule, feed: InnerModule) -> Tensor:
    """x [B, S, D] through all layers and the last norm, with `attend` and `feed` as their inner modules."""

    def branch(own: Branch, inner: Run) -> Run:
        return lambda x: own.leave(inner(own.enter(x)), x.dtype)

    stack = []
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        attention = branch(layer.attention, partial(attend, index))
        feed_forward = branch(layer.feed_forward, partial(feed, index))
        stack.append((attention, feed_forward))
    run = run_reversible_keeping if model.config.reversible else run_sequential
    normalised: Tensor = model.norm(run(x, stack))
    return normalised


def embed_code(model: Dalle, codes: Tensor, place: int) -> Tensor:
    """Codes [B] at `place` in the picture -> [B, 1, D]."""
    config = model.config
    table = model.output.weight if config.tie_embeddings else model.embedding.weight
    x = embedding(codes + config.num_text_tokens, table)
    if not config.rotary:
        row, column = divmod(place, config.image_side)
        x = x + (model.row_positions[row] + model.column_positions[column])
    return x[:, None]


def code_logits(model: Dalle, hidden: Tensor) -> Tensor:
    """Hidden states [B, D] -> float32 (or wider) logits of the image codes alone, [B, C]."""
    start = model.config.num_text_tokens
    logits = linear(hidden, model.output.weight[start:], model.output.bias[start:])
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def visible_codes(config: DalleConfig, device: torch.device) -> dict[str, list[Tensor]]:
    """For each kind of attention and each place in the picture, the places [n] it sees, itself included."""
    start = config.num_text_positions
    return {
        kind: [row.nonzero().flatten() for row in attention_mask(config, kind, device)[start:, start:]]
        for kind in dict.fromkeys(config.layer_kinds)
    }
