"""CLIP scores how well a picture fits a caption (Radford et al. 2021, arXiv 2103.00020); the models are open_clip's.

A CLIP is loaded from a weights file, for any architecture that open_clip contains in full, or from a CLIP folder:
config.json, model.safetensors and, if it has its own vocabulary, tokenizer.json. Nothing here uses the network.

Shapes: N pictures, B captions, T text positions, E features.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dalle_lean.clip.architecture import Architecture, build_clip, caption_encoder, load_clip_weights, model_config
from dalle_lean.errors import UserError
from dalle_lean.io.files import sha256_file, write_json
from dalle_lean.io.folder_config import read_folder_config
from dalle_lean.io.safetensors_io import read_shapes, save_weights
from dalle_lean.require import require
from dalle_lean.tokenizer import Tokenizer

FORMAT = "dalle_lean_clip/1"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
# Red, green and blue, as in the training of the published CLIPs.
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)

INTERPOLATIONS = ("bicubic", "bilinear")

Images = Tensor | Sequence[Image.Image]  # [N, 3, H, W] floating point in 0..1, or N PIL images


class ClipScorer:
    """Features and scores of pictures and captions, by a float32 model in eval mode."""

    def __init__(
        self,
        architecture: Architecture,
        weights: str | Path | dict[str, Tensor],
        *,
        tokenizer: Tokenizer | None = None,
        image_mean: Sequence[float] = IMAGE_MEAN,
        image_std: Sequence[float] = IMAGE_STD,
        interpolation: str = "bicubic",
        name: str = "CLIP",
        device: torch.device | str = "cpu",
    ):
        """ValueError if the architecture is unknown or partly on the hub, or the weights do not fit it.

        Args:
            weights: a .safetensors file, a published .pt or .bin (loaded weights-only), or a state dict.
            tokenizer: the CLIP's own vocabulary; None is open_clip's for the architecture.
            image_mean, image_std: red, green and blue in 0..1.
            interpolation: how pictures are resized, "bicubic" or "bilinear", both antialiased.
            name: shown beside a score.
        """
        self.architecture = architecture
        self.tokenizer = tokenizer
        self.image_mean = rgb("image_mean", image_mean, smallest=0.0)
        self.image_std = rgb("image_std", image_std, smallest=1e-3)
        if interpolation not in INTERPOLATIONS:
            raise UserError(f"interpolation={interpolation!r}: must be one of {', '.join(INTERPOLATIONS)}")
        self.interpolation = interpolation
        self.name = name
        self.device = torch.device(device)
        self._mean, self._std = (
            torch.tensor(numbers, device=self.device)[:, None, None] for numbers in (self.image_mean, self.image_std)
        )
        self._latest: tuple[str, Tensor] | None = None
        config = model_config(architecture)
        self._caption_ids = caption_encoder(config, tokenizer)
        self.model = build_clip(config)
        load_clip_weights(self.model, weights)
        self.model.to(self.device).eval()
        size = self.model.visual.image_size
        height, width = (size, size) if isinstance(size, int) else size
        if height != width:
            raise UserError(f"architecture: image_size={size}: only square pictures are supported")
        self.image_side: int = height

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str = "cpu", *, checked: bool = False) -> Self:
        """Read a CLIP folder; ValueError names the file that is missing, altered or wrong.

        checked: the files' hashes were already verified (`dalle_lean.io.model_folder.check_parts`).
        """
        folder = Path(folder)
        config = read_clip_config(folder)
        own_vocabulary = config["tokenizer"] == TOKENIZER
        for name in (WEIGHTS, TOKENIZER) if own_vocabulary else (WEIGHTS,):
            if not (folder / name).is_file():
                raise UserError(f"{folder}: {name} is missing")
            if name == WEIGHTS:
                read_shapes(folder / name)
            if not checked and sha256_file(folder / name) != config["sha256"].get(name):
                raise UserError(f"{folder}: {name} is not the file this CLIP was saved with; get a complete copy")
        try:
            return cls(
                config["architecture"],
                folder / WEIGHTS,
                tokenizer=Tokenizer.from_file(folder / TOKENIZER) if own_vocabulary else None,
                image_mean=config["image_mean"],
                image_std=config["image_std"],
                interpolation=config["interpolation"],
                device=device,
            )
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None

    def save(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write a CLIP folder, floating-point weights in `dtype`; config.json holds the hashes and is written last."""
        folder = Path(folder)
        save_weights(self.model.state_dict(), folder / WEIGHTS, dtype)
        names = [WEIGHTS]
        if self.tokenizer is not None:
            self.tokenizer.save(folder / TOKENIZER)
            names.append(TOKENIZER)
        content = {
            "format": FORMAT,
            "architecture": self.architecture,
            "image_mean": self.image_mean,
            "image_std": self.image_std,
            "interpolation": self.interpolation,
            "tokenizer": "open_clip" if self.tokenizer is None else TOKENIZER,
            "sha256": {name: sha256_file(folder / name) for name in names},
        }
        write_json(folder / "config.json", content)

    def score(self, images: Images, prompt: str) -> Tensor:
        """Cosine similarity in -1..1 of each picture and the prompt: [N] float32, without waiting for the device. The
        features of the latest prompt are cached for its next batches."""
        latest = self._latest
        if latest is None or latest[0] != prompt:
            self._latest = latest = (prompt, self.text_features([prompt])[0])
        return self.image_features(images) @ latest[1]

    @torch.no_grad()
    def image_features(self, images: Images, batch_size: int = 64) -> Tensor:
        """Pictures -> [N, E] float32, each of length 1."""
        if len(images) == 0:
            raise ValueError("images: none was given")
        batches = (images[start : start + batch_size] for start in range(0, len(images), batch_size))
        return torch.cat([F.normalize(self.model.encode_image(self.prepare(batch)), dim=-1) for batch in batches])

    @torch.no_grad()
    def text_features(self, captions: Sequence[str], batch_size: int = 256) -> Tensor:
        """Captions -> [B, E] float32, each of length 1; longer captions than the text tower takes are cut."""
        batches = self.caption_ids(captions).to(self.device).split(batch_size)
        return torch.cat([F.normalize(self.model.encode_text(batch), dim=-1) for batch in batches])

    def caption_ids(self, captions: Sequence[str]) -> Tensor:
        """Token ids [B, T] for the text tower."""
        if isinstance(captions, str) or not captions or not all(isinstance(caption, str) for caption in captions):
            raise ValueError("captions must be a sequence of one or more strings")
        return self._caption_ids(captions)

    def prepare(self, images: Images) -> Tensor:
        """open_clip's preprocessing: antialiased resize, centre crop, normalise -> [N, 3, side, side]."""
        if not isinstance(images, Tensor):
            to_input = require("open_clip", extra="demo").image_transform(
                self.image_side,
                is_train=False,
                mean=self.image_mean,
                std=self.image_std,
                interpolation=self.interpolation,
            )
            return torch.stack([to_input(image) for image in images]).to(self.device)
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise ValueError(f"images: {images.dtype} {list(images.shape)}: must be floating point [N, 3, H, W]")
        vision = require("torchvision.transforms.functional", extra="demo")
        pixels = images.to(self.device, torch.float32)
        pixels = vision.resize(pixels, self.image_side, vision.InterpolationMode(self.interpolation), antialias=True)
        # Bicubic overshoots at sharp edges; the clamp does what rounding to 8 bits does to PIL images.
        pixels = vision.center_crop(pixels.clamp(0, 1), self.image_side)
        # torchvision's normalize checks its numbers and so would wait for the device.
        return (pixels - self._mean) / self._std


def right_caption_first(image_features: Tensor, text_features: Tensor, captions: Sequence[str], of: int = 50) -> float:
    """Share in 0..1 of pictures whose own caption scores higher than `of - 1` other captions drawn at random.

    Args:
        image_features, text_features: [N, E]; row i of both belongs to captions[i].
        of: number of candidate captions; fewer if there are fewer different ones.
    """
    row_of = {caption: row for row, caption in enumerate(captions)}
    rows = torch.tensor(list(row_of.values()))
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for picture, caption in zip(image_features, captions, strict=True):
        others = rows[rows != row_of[caption]]
        drawn = others[torch.randperm(len(others), generator=generator)[: of - 1]]
        hits += bool((text_features[drawn] @ picture < text_features[row_of[caption]] @ picture).all())
    return hits / len(captions)


def read_clip_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    config = read_folder_config(folder, FORMAT)
    config.setdefault("interpolation", "bicubic")  # older folders lack it
    fields = {"format", "architecture", "image_mean", "image_std", "interpolation", "tokenizer", "sha256"}
    if wrong := fields ^ set(config):
        raise UserError(f"{path}: unknown or missing fields {sorted(wrong)}")
    if config["tokenizer"] not in ("open_clip", TOKENIZER):
        raise UserError(f"{path}: tokenizer={config['tokenizer']!r}: must be 'open_clip' or '{TOKENIZER}'")
    if not isinstance(config["sha256"], dict):
        raise UserError(f"{path}: sha256 must map file names to hashes")
    return config


def rgb(name: str, values: Any, smallest: float) -> tuple[float, ...]:
    """`values` as a tuple of three; ValueError unless they are numbers in `smallest`..1."""
    numbers = tuple(values) if isinstance(values, list | tuple) else ()
    if len(numbers) != 3 or not all(isinstance(number, int | float) and smallest <= number <= 1 for number in numbers):
        raise UserError(f"{name}={values!r}: must be three numbers in {smallest:g}..1")
    return numbers
