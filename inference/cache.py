"""Decoding one code at a time for many pictures at once, with as few keys kept as each kind of attention needs.

R pictures (rows), N prompts with R / N pictures each, in the prompts' order; r rows of a prompt, rounded up to whole
groups for attention; H heads, d head size, P text positions, n cells read, f side of the picture, I codes in it,
D hidden size, C codebook.
"""

import torch
from torch import Tensor

from dalle_lean.config import DalleConfig
from dalle_lean.rotary import rotary_angles
from inference.decoder import BranchWeights, Decoder, LayerWeights, normalise
from inference.linear import ROW_GROUP
from inference.prompts import Prompts
from inference.windows import Window, window_mask, window_of

# A single row takes other kernels (matrix times vector), which round differently.
FEWEST_ROWS = 2


class PictureCache:
    """What decoding remembers of the codes it has read. All buffers are made once, whatever is read."""

    def __init__(self, decoder: Decoder, prompts: Prompts, batch: int):
        """`batch` pictures, an equal number for each prompt."""
        config, device = decoder.config, decoder.device
        assert batch % prompts.count == 0, "every prompt has as many pictures"
        self.decoder, self.prompts, self.config = decoder, prompts, config
        self.codes_read = 0
        self.pictures, batch = batch, max(batch, FEWEST_ROWS)
        self.batch = batch
        self.grid = (config.num_heads, prompts.count, -(-batch // prompts.count // ROW_GROUP) * ROW_GROUP)
        kinds = dict.fromkeys(config.layer_kinds)
        self.windows = {kind: window_of(config, kind) for kind in kinds}
        self.masks = {kind: window_mask(config, kind, device, decoder.dtype) for kind in kinds}
        self.turns = rotary_turns(config, device)
        # Queries, keys and values of the code that is read.
        self.qkv = torch.zeros(3, *self.grid, config.head_size, device=device)
        windows = [self.windows[kind] for kind in config.layer_kinds]
        self.cells = [
            torch.zeros(
                (2, *self.grid, window.columns, window.rows, config.head_size), dtype=decoder.dtype, device=device
            )
            for window in windows
        ]
        # Of each column the code last read, as both branches of every layer saw it.
        channels = config.hidden_size // 2 if config.token_shift else 0
        self.inputs = torch.zeros(2 * config.num_layers, config.image_side, batch, channels, device=device)
        self.no_left = torch.zeros(batch, channels // 2, device=device)
        self._load(prompts)

    @property
    def num_bytes(self) -> int:
        """What is held for the codes read and for the prompts."""
        held = [*self.cells, self.inputs, *self.prompts.keys, *self.prompts.values]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @torch.inference_mode()
    def read(self, codes: Tensor) -> Tensor:
        """Read the next code [R] of each picture -> float32 logits [R, C] of the code after it."""
        assert self.codes_read < self.config.image_len - 1, "nothing follows the last code"
        place = torch.tensor([self.codes_read], device=self.decoder.device)
        logits = self.step(codes.expand(self.batch), self.codes_read % self.config.image_side, place)
        self.codes_read += 1
        return logits[: self.pictures]

    def step(self, codes: Tensor, column: int, place: Tensor) -> Tensor:
        """`read` at a given place [1], whose column is known: what depends on the row is done by tensors alone."""
        decoder = self.decoder
        a, b = decoder.streams(decoder.embed(codes, place))
        row = place // self.config.image_side
        turn = self.turns.index_select(0, place)
        masks = {kind: mask.index_select(0, place) for kind, mask in self.masks.items()}
        for index, layer in enumerate(decoder.layers):
            window = self.windows[layer.kind]
            self._project(layer, self._enter(2 * index, b, layer.attention, column), turn)
            cells = self.cells[index]
            here = cells[:, :, :, :, window.margin + column]
            here.index_copy_(4, row % window.rows, self.qkv[1:].unsqueeze(4).to(cells.dtype))
            seen = self._attend(index, window, masks[layer.kind], window.first(column))
            layer.attention.add(a, layer.out(seen))
            layer.feed_forward.add(b, layer.feed(self._enter(2 * index + 1, a, layer.feed_forward, column)))
        return decoder.logits(a, b)

    def _enter(self, branch: int, stream: Tensor, weights: BranchWeights, column: int) -> Tensor:
        """The normalised stream [R, D], part of its channels from the neighbours above and to the left."""
        h = normalise(stream, weights.norm)
        if self.config.token_shift:
            inputs, half = self.inputs[branch], h.shape[1] // 2
            left = inputs[column - 1, :, half // 2 :] if column > 0 else self.no_left
            shifted = torch.cat([inputs[column, :, : half // 2], left, h[:, half:]], dim=1)
            inputs[column] = h[:, :half]
            h = shifted
        return h.to(self.decoder.dtype)

    def _project(self, layer: LayerWeights, x: Tensor, turn: Tensor) -> None:
        """Fill `qkv` from the input [R, D] of attention: turned, queries scaled."""
        heads, count, _ = self.grid
        projected = layer.qkv(x).float().view(count, -1, 3, heads, self.config.head_size).permute(2, 3, 0, 1, 4)
        target = self.qkv[:, :, :, : projected.shape[3]]
        if self.config.rotary:
            projected, target = as_pairs(projected), as_pairs(target)
        torch.mul(projected, turn.view(3, 1, 1, 1, -1), out=target)

    def _attend(self, layer: int, window: Window, mask: Tensor, first: int) -> Tensor:
        """One softmax over the prompt's keys, shared by its pictures, and the cells of each picture -> [R, H * d]."""
        heads, count, rows = self.grid
        keys, values = (cells[:, :, :, first : first + window.span] for cells in self.cells[layer])
        keys, values = (x.reshape(heads * count * rows, window.span * window.rows, -1) for x in (keys, values))
        text_keys, text_values = self.prompts.keys[layer].flatten(0, 1), self.prompts.values[layer].flatten(0, 1)
        query = self.qkv[0].to(keys.dtype)
        on_text = query.flatten(0, 1) @ text_keys.transpose(1, 2)  # [H * N, r, P]
        on_codes = torch.baddbmm(mask, query.view(len(keys), 1, -1), keys.transpose(1, 2))  # [H * N * r, 1, n]
        scores = torch.cat([on_text.view(len(keys), 1, -1), on_codes], dim=2)
        weights = scores.softmax(dim=2, dtype=torch.float32).to(keys.dtype)
        num_text = text_keys.shape[1]
        out = weights.view(heads * count, rows, -1)[:, :, :num_text] @ text_values
        out = torch.baddbmm(out.view(len(keys), 1, -1), weights[:, :, num_text:], values)
        used = out.view(heads, count, rows, -1)[:, :, : self.batch // count]
        return used.permute(1, 2, 0, 3).reshape(self.batch, -1)

    def _load(self, prompts: Prompts) -> None:
        """Go on from the codes that came with the prompts."""
        side, num_codes = self.config.image_side, prompts.num_codes
        per_prompt = self.batch // prompts.count
        for index, code_keys in enumerate(prompts.code_keys):
            window = self.windows[self.config.layer_kinds[index]]
            for first in range(0, num_codes, side):
                line = code_keys[:, :, :, first : first + side].unsqueeze(3)  # [2, H, N, 1, columns, d]
                columns = slice(window.margin, window.margin + line.shape[4])
                self.cells[index][:, :, :, :, columns, first // side % window.rows] = line
        if self.config.token_shift:
            for inputs, code_inputs in zip(self.inputs, prompts.code_inputs, strict=True):
                for first in range(0, num_codes, side):
                    line = code_inputs[:, first : first + side].repeat_interleave(per_prompt, dim=0)
                    inputs[: line.shape[1]] = line.transpose(0, 1)
        self.codes_read = num_codes


def as_pairs(x: Tensor) -> Tensor:
    """Adjacent channels [..., d] as complex numbers [..., d / 2]."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def rotary_turns(config: DalleConfig, device: torch.device) -> Tensor:
    """What queries, keys and values are multiplied with at each place: [I, 3, d / 2] complex, or [I, 3, 1].

    The queries' factor holds the scaling of the scores.
    """
    scale = torch.tensor([config.head_size**-0.5, 1, 1], device=device)[:, None]
    if not config.rotary:
        return scale.expand(config.image_len, 3, 1)
    angles = rotary_angles(config.num_text_positions, config.image_side, config.head_size, device)
    angles = angles[config.num_text_positions :]
    still = torch.zeros(len(angles), config.head_size // 2 - angles.shape[1], device=device)
    angles = torch.cat([angles, still], dim=1)
    return scale * torch.complex(angles.cos(), angles.sin())[:, None]
