"""How a small CLIP is built and trained. Free of torch, for --help."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dalle_lean.errors import UserError
from training.run.loop_settings import PictureRecipe

if TYPE_CHECKING:
    from dalle_lean.tokenizer import Tokenizer

HEAD_SIZE = 32
PATCH_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class ClipRecipe(PictureRecipe):
    """How a CLIP is built and trained. The learning rate falls along half a cosine to 0 after its warm-up."""

    MINIMUM: ClassVar[dict[str, int]] = {
        "context_length": 2,
        "batch_size": 2,
        "hard_group_size": 2,
        "extra_captions": 0,
    }

    picture_side: int = 128
    """Pixels; a multiple of 32."""
    image_width: int = 48
    """Channels of the image tower at its first resolution, a quarter of the side; each of the next three halves the
    side and has twice as many."""
    image_layers: tuple[int, int, int, int] = (1, 1, 1, 1)
    """Blocks at each of the four resolutions."""
    width: int = 192
    """Of the text tower and of the features; a multiple of 32."""
    text_layers: int = 2
    context_length: int = 24
    """Token ids of a caption, the closing padding id included."""
    vocab_size: int = 2048
    """Of the tokenizer made from the captions, at most."""
    steps: int = 2500
    batch_size: int = 128
    """Pictures; no caption twice."""
    alike: tuple[tuple[str, ...], ...] = (("kind", "ground", "paint", "size", "place"), ("things",))
    """Fields of the listing by which pictures are similar: a group of hard negatives agrees in the fields of one of
    these tuples and differs in the others."""
    hard_negative_share: float = 0.5
    """Of a batch, that such groups make up; 0: none. Without effect where the listing lacks the fields."""
    hard_group_size: int = 8
    """Pictures; half a batch where that is less."""
    extra_captions: int = 0
    """In a step, as further wrong answers for its pictures: hard negatives where there are any. A caption costs little
    beside a picture."""
    lr: float = 1e-3
    warmup_share: float = 0.05
    """Of the steps."""
    weight_decay: float = 0.1
    """Not for biases, norms and the temperature."""
    decoded_share: float = 0.5
    """Of the training pictures that are shown as a VQGAN decodes them, when one is given."""
    heldout_share: float = 0.05
    """Of the captions, when no held-out folder is given."""
    log_every: int = 20
    heldout_every: int = 200
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("hard_negative_share", "warmup_share", "decoded_share", "heldout_share"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 0 and below 1")
        if self.heldout_share == 0:
            raise UserError("heldout_share=0: must be above 0, or there would be no caption to measure on")
        if len(self.image_layers) != 4 or min(self.image_layers) < 1:
            raise UserError(f"image_layers={self.image_layers}: must be four positive numbers")
        for name in ("width", "picture_side"):
            if getattr(self, name) % 32:
                raise UserError(f"{name}={getattr(self, name)}: must be a multiple of 32")
        if not all(self.alike):
            raise UserError(f"alike={self.alike}: a list of fields must name one at least")

    def identity(self) -> dict[str, Any]:
        """As the base class says; without `extra_captions` where there are none, as before there were any."""
        identity = super().identity()
        if not self.extra_captions:
            del identity["extra_captions"]
        return identity

    @property
    def fields(self) -> tuple[str, ...]:
        """Of the listing, that are read."""
        return tuple(dict.fromkeys(name for fields in self.alike for name in fields))

    def architecture(self, tokenizer: "Tokenizer") -> dict[str, Any]:
        """A model config with this package's residual network for pictures; captions end at the first padding id, where
        the causal text tower is read."""
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
