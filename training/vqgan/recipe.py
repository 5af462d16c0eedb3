"""How a VQGAN is built and trained. Imports no torch: --help is fast."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from dalle_lean.errors import UserError
from dalle_lean.fields import NonNegativeInt, PositiveInt, Range
from training.run.loop_settings import PictureRecipe

if TYPE_CHECKING:
    from dalle_lean.images.vqgan import VQGANConfig

EMOJI: dict[str, Any] = {
    "quantizer": "vq",
    "codebook_size": 1024,
    "code_width": 16,
    "z_channels": 64,
    "channels": 32,
    "channel_multipliers": (1, 1, 2, 4),
    "num_res_blocks": 1,
    "attention_resolutions": (),
    "picture_side": 64,
    "norm_groups": 8,
}
"""2.9 million weights, for drawings of 64x64 pixels as 8x8 codes."""
CROPS_TRIED = 4


@dataclass(frozen=True, kw_only=True)
class VQGANRecipe(PictureRecipe):
    """How a VQGAN is built and trained. After its warm-up, the learning rate falls linearly to 0."""

    config: "VQGANConfig"
    steps: int = 10_000
    batch_size: int = 16
    lr: float = 1e-3
    warmup_steps: NonNegativeInt = 200
    squared_weight: Annotated[float, Range(0)] = 1.0
    """Weight of the mean squared error, added to the mean absolute error; pixels in -1..1."""
    discriminator_start: Annotated[float, Range(0, 1)] = 0.6
    """Share of the steps before the discriminator starts; 1 disables it."""
    discriminator_weight: float = 0.1
    """Norm of the adversarial gradient on the pixels, relative to the reconstruction gradient's."""
    discriminator_channels: PositiveInt = 32
    discriminator_layers: PositiveInt = 2
    crop_from: int | None = None
    """Side in pixels at which pictures are read, to train on crops of config.picture_side; of CROPS_TRIED random crops,
    the one with the largest variance is taken. None trains on whole pictures."""
    decoder_only: bool = False
    """Freeze encoder and codebook, so that the codes in shards stay valid."""
    flip: bool = False
    """Mirror half of the pictures; not for captions that mention left and right."""
    log_every: int = 50
    heldout_every: int = 500
    checkpoint_every: int = 250

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "config": self.config.to_dict()}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop_from is not None and self.crop_from < self.config.picture_side:
            raise UserError(f"crop_from={self.crop_from}: must be at least picture_side={self.config.picture_side}")
        if self.crop_from is not None and self.crop_from % self.config.downscale:
            raise UserError(f"crop_from={self.crop_from}: must be a multiple of {self.config.downscale}")
