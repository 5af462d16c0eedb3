"""How a small CLIP is built and trained. Imports no torch: --help is fast."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from dalle_lean.errors import UserError
from dalle_lean.fields import NonNegativeInt, PositiveInt, Range, Share
from training.run.loop_settings import PictureRecipe

if TYPE_CHECKING:
    from dalle_lean.tokenizer import Tokenizer

HEAD_SIZE = 32
PATCH_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class ClipRecipe(PictureRecipe):
    """How a CLIP is built and trained. After its warm-up, the learning rate falls along half a cosine to 0."""

    picture_side: PositiveInt = 128
    """Pixels; a multiple of 32."""
    image_width: PositiveInt = 48
    """Channels of the image tower at its first resolution, a quarter of the side; each of the next three halves the
    side and doubles the channels."""
    image_layers: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] = (1, 1, 1, 1)
    """Blocks at each of the four resolutions."""
    width: PositiveInt = 192
    """Of the text tower and the features; a multiple of 32."""
    text_layers: PositiveInt = 2
    context_length: Annotated[int, Range(2)] = 24
    """Token ids per caption, including the final padding id."""
    vocab_size: PositiveInt = 2048
    """Largest vocabulary of the tokenizer trained on the captions."""
    steps: int = 2500
    batch_size: Annotated[int, Range(2)] = 128
    """Pictures; no caption twice."""
    alike: tuple[tuple[str, ...], ...] = (("kind", "ground", "paint", "size", "place"), ("things",))
    """Fields of the listing that define similar pictures: a group of hard negatives agrees in the fields of one tuple
    and differs in others."""
    hard_negative_share: Share = 0.5
    """Largest share of a batch in such groups; no effect if the listing lacks the fields."""
    hard_group_size: Annotated[int, Range(2)] = 8
    """Pictures in a group; at most half a batch."""
    extra_captions: NonNegativeInt = 0
    """Captions per step beside those of its pictures, as negatives: hard ones if possible. A caption costs little next
    to a picture."""
    lr: float = 1e-3
    warmup_share: Share = 0.05
    """Of the steps."""
    weight_decay: float = 0.1
    """Not applied to biases, norms and the temperature."""
    decoded_share: Share = 0.5
    """Share of the training pictures to encode and decode, if a VQGAN is given."""
    heldout_share: Share = 0.05
    """Share of the captions to hold out, if no held-out folder is given."""
    log_every: int = 20
    heldout_every: int = 200
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heldout_share == 0:
            raise UserError("heldout_share=0: must be above 0, to leave captions to measure on")
        for name in ("width", "picture_side"):
            if getattr(self, name) % 32:
                raise UserError(f"{name}={getattr(self, name)}: must be a multiple of 32")
        if not all(self.alike):
            raise UserError(f"alike={self.alike}: every list must name at least one field")

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of the listing to read."""
        return tuple(dict.fromkeys(name for fields in self.alike for name in fields))

    def architecture(self, tokenizer: "Tokenizer") -> dict[str, Any]:
        """A model config with this package's residual network as image tower; the text tower is causal, and its feature
        is taken at the first padding id."""
        return {
            "embed_dim": self.width,
            "vision_cfg": {
                "image_size": self.picture_side,
                "patch_size": PATCH_SIZE,
                "widths": [self.image_width << level for level in range(len(self.image_layers))],
                "blocks": list(self.image_layers),
            },
            "text_cfg": {
                "context_length": self.context_length,
                "vocab_size": tokenizer.vocab_size,
                "width": self.width,
                "heads": self.width // HEAD_SIZE,
                "layers": self.text_layers,
                "pool_type": "eos",
                "eos_id": tokenizer.padding_id,
            },
        }
