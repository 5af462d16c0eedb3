"""Dalle: a decoder over a caption and the codes of its picture.

B batch, T text length, I codes in a picture, n codes given, L = T + I, D hidden size. The vocabulary has V rows: V' for
text, then C for image codes. Positions 0..T hold `<bos>` and the caption, position T + 1 + m holds code m.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dalle_lean.model.attention import Layout
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.decoder import Decoder
from dalle_lean.model.loss import Section, embed
from dalle_lean.model.memory_plan import MemoryPlan
from dalle_lean.model.rope import rotary_angles, rotary_table

BOS = 0


class Crop(NamedTuple):
    """The part of each sample over which the loss is taken: the first `text_len` caption ids, and the square of
    `side` x `side` codes whose upper left one is at (`row`, `column`)."""

    text_len: int
    side: int
    row: int = 0
    column: int = 0


class Dalle(Decoder):
    """The paper's decoder (Borzunov et al. 2022, section 3) for a DalleConfig; its MemoryPlan can be set later."""

    def __init__(
        self,
        config: DalleConfig,
        plan: MemoryPlan | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(config, plan, **factory)
        if not config.rotary:

            def positions(count: int) -> nn.Parameter:
                return nn.Parameter(torch.randn(count, config.hidden_size, **factory) * 0.02)

            self.text_positions = positions(config.num_text_positions)
            self.row_positions, self.column_positions = positions(config.image_side), positions(config.image_side)

    def forward(self, text_ids: Tensor, image_codes: Tensor | None = None) -> Tensor:
        """Logits of the next id at every position.

        Args:
            text_ids: [B, T] integers in [0, text_vocab_size); 0 stands for the padding id of its position.
            image_codes: [B, n] integers in [0, image_vocab_size), n <= I; None is n = 0.

        Returns:
            [B, S, V] with S = min(T + 1 + n, L). Positions before T allow text rows only, the others image rows only;
            forbidden logits are the most negative finite number.

        Raises:
            ValueError: names the argument, its value and the allowed range.
        """
        if image_codes is None:
            image_codes = text_ids.new_zeros(len(text_ids), 0)
        self.check_inputs(text_ids, image_codes)
        hidden = self._hidden(self._text_rows(text_ids), image_codes.long(), self._whole)
        logits: Tensor = self.output(hidden.to(self.output.weight.dtype))
        num_text_tokens, text_len = self.config.num_text_tokens, self.config.text_len
        forbidden = torch.finfo(logits.dtype).min
        is_text_row = torch.arange(self.config.num_tokens, device=logits.device) < num_text_tokens
        predicts_text = torch.arange(logits.shape[1], device=logits.device) < text_len
        return logits.masked_fill(is_text_row[None, :] != predicts_text[:, None], forbidden)

    def loss(self, text_ids: Tensor, image_codes: Tensor, crop: Crop | None = None) -> Tensor:
        """The training loss in nats: `losses`, weighted."""
        return self.weigh(*self.losses(text_ids, image_codes, crop))

    def weigh(self, text_nats: Any, image_nats: Any) -> Any:
        """The weighted mean of the two losses: image_loss_weight for the image's, 1 for the text's."""
        weight = self.config.image_loss_weight
        return (text_nats + weight * image_nats) / (1 + weight)

    def losses(self, text_ids: Tensor, image_codes: Tensor, crop: Crop | None = None) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats of a caption id and of an image code; each softmax runs over its own rows only.

        Args:
            text_ids: [B, T]; image_codes: [B, I].
            crop: take the loss over this part, whose ids and codes keep their positions.
        """
        self.check_inputs(text_ids, image_codes)
        config = self.config
        if image_codes.shape[1] != config.image_len:
            raise ValueError(
                f"image_codes has {image_codes.shape[1]} codes a picture; the loss needs {config.image_len}"
            )
        text_rows, codes = self._text_rows(text_ids), image_codes.long()
        if crop is None:
            crop = self._whole
        else:
            self._check_crop(crop)
            square = codes.unflatten(1, (config.image_side, config.image_side))
            square = square[:, crop.row : crop.row + crop.side, crop.column : crop.column + crop.side]
            text_rows, codes = text_rows[:, : crop.text_len], square.flatten(1)
        hidden = self._hidden(text_rows, codes, crop)
        text = Section(slice(0, crop.text_len), slice(0, config.num_text_tokens), text_rows)
        image = Section(slice(crop.text_len, None), slice(config.num_text_tokens, None), codes)
        return self.section_losses(hidden, text, image).unbind()  # type: ignore[return-value]

    def _hidden(self, text_rows: Tensor, codes: Tensor, crop: Crop) -> Tensor:
        """The layers' normalised output, [B, S, D]."""
        x = self._embed(text_rows, codes, crop)
        x = x.to(self.plan.residual_dtype_for(x.dtype))
        return self.run(x, self.layout(x.shape[1], x.dtype, x.device, crop))

    def embed(self, text_ids: Tensor, image_codes: Tensor) -> Tensor:
        """Embeddings of `<bos>`, caption and codes, [B, S, D] with S <= L; of a whole picture the last code is left
        out."""
        return self._embed(self._text_rows(text_ids), image_codes.long(), self._whole)

    def _embed(self, text_rows: Tensor, codes: Tensor, crop: Crop) -> Tensor:
        config = self.config
        ids = torch.cat([text_rows, codes + config.num_text_tokens], dim=1)
        ids = nn.functional.pad(ids, (1, 0), value=BOS)[:, : crop.text_len + crop.side**2]
        x = embed(ids, self.table, self.plan)
        if not config.rotary:
            picture = self.row_positions[:, None] + self.column_positions[None, :]
            positions = torch.cat([self.text_positions, picture.flatten(0, 1)])
            x = x + positions[self._places(crop, x.device)][: x.shape[1]]
        return x

    def layout(self, length: int, dtype: torch.dtype, device: torch.device, crop: Crop | None = None) -> Layout:
        """The layout of the first `length` positions, of a crop if given, for residual streams of `dtype`."""
        config, crop = self.config, crop or self._whole
        table = None
        if config.rotary:
            angles = rotary_angles(config.num_text_positions, config.image_side, config.head_size, device)
            table = rotary_table(angles[self._places(crop, device)][:length], dtype)
        fused = self.plan.fuses_attention(config, device.type, self._compute_dtype().itemsize)
        return Layout(config, crop.text_len + 1, crop.side, device, table, fused)

    @property
    def _whole(self) -> Crop:
        return Crop(self.config.text_len, self.config.image_side)

    def _check_crop(self, crop: Crop) -> None:
        config = self.config
        inside = crop.side >= 1 and 0 <= crop.row <= config.image_side - crop.side
        if not (inside and 0 <= crop.column <= config.image_side - crop.side and 1 <= crop.text_len <= config.text_len):
            raise ValueError(
                f"{crop}: must lie in {config.text_len} caption ids and {config.image_side} x {config.image_side} codes"
            )

    def _places(self, crop: Crop, device: torch.device) -> Tensor:
        """The positions, in the whole sequence, of a crop's text and codes."""
        side, start = self.config.image_side, self.config.num_text_positions
        text = torch.arange(crop.text_len + 1, device=device)
        square = torch.arange(side * side, device=device).view(side, side)
        square = square[crop.row : crop.row + crop.side, crop.column : crop.column + crop.side]
        return torch.cat([text, start + square.flatten()])

    def _text_rows(self, text_ids: Tensor) -> Tensor:
        """Vocabulary rows of the caption: every id 0 becomes the padding id of its position."""
        padding = torch.arange(self.config.text_len, device=text_ids.device) + self.config.text_vocab_size
        return torch.where(text_ids == 0, padding, text_ids.long())

    def check_inputs(self, text_ids: Tensor, image_codes: Tensor) -> None:
        """ValueError unless text_ids is [B, text_len] and image_codes [B, m <= image_len], of known ids, B >= 1."""
        config = self.config
        check_ids("text_ids", text_ids, config.text_vocab_size)
        check_ids("image_codes", image_codes, config.image_vocab_size)
        if text_ids.shape[1] != config.text_len:
            raise ValueError(f"text_ids has {text_ids.shape[1]} ids a caption; this model takes {config.text_len}")
        if image_codes.shape[1] > config.image_len:
            raise ValueError(
                f"image_codes has {image_codes.shape[1]} codes; the model takes at most {config.image_len}"
            )
        if len(text_ids) == 0:
            raise ValueError("text_ids has 0 rows; a batch has at least one sample")
        if len(text_ids) != len(image_codes):
            raise ValueError(f"text_ids has {len(text_ids)} rows and image_codes {len(image_codes)}; they must agree")


def check_ids(name: str, ids: Tensor, size: int) -> None:
    """ValueError unless `ids` is [B, n] of integers in [0, size).

    Values on a GPU are not checked, as that would wait for it: check them before the copy.
    """
    if ids.dtype not in (torch.int64, torch.int32, torch.int16):
        raise ValueError(f"{name} has dtype {ids.dtype}; it must be int64, int32 or int16")
    if ids.dim() != 2:
        raise ValueError(f"{name} has shape {list(ids.shape)}; it must be [batch, positions]")
    if torch.compiler.is_compiling() or ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(ids)).tolist()
    if low < 0 or high >= size:
        raise ValueError(f"{name} has the value {low if low < 0 else high}; it must be in 0..{size - 1}")
