"""Generator: a prompt in, the best few pictures out.

N pictures, I codes in a picture, T text length.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from dalle_lean.config import DalleConfig
from dalle_lean.devices import pick_device
from dalle_lean.folder import check_parts, find_model, read_model
from dalle_lean.model import Dalle
from dalle_lean.pictures import square_pixels
from dalle_lean.tokenizer import Tokenizer
from dalle_lean.vqgan import VQGAN
from inference.cache import read_prompt
from inference.filtering import check_guidance, check_sampling
from inference.noise import check_seed
from inference.sampler import ROW_GROUP, sample_codes

if TYPE_CHECKING:
    from dalle_lean.clip import ClipScorer

DEFAULT_BEST = 4
LARGEST_BATCH = 64
CACHE_BUDGET_BYTES = 2**31
# Convolutions round differently for other numbers of pictures; always this many, so that picture i is always the same.
DECODE_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to draw for a prompt; the defaults are the paper's. ValueError outside the ranges."""

    num_images: int = 128
    best: int | None = None
    """How many to keep; None is 4, or all where fewer are drawn."""
    top_k: int = 256
    top_p: float = 0.75
    temperature: float = 1.0
    seed: int = 0
    guidance: float = 1.0
    """Classifier-free guidance (Ho & Salimans 2022): how far to go from the empty caption's logits past the prompt's.

    1 is off; it needs a model that was trained with caption dropout.
    """

    def __post_init__(self) -> None:
        for name in ("num_images", "best", "top_k", "seed"):
            optional = name == "best" and self.best is None
            if not (optional or isinstance(getattr(self, name), int)):
                raise ValueError(f"{name}={getattr(self, name)}: it must be a whole number")
        for name in ("top_p", "temperature", "guidance"):
            if not isinstance(getattr(self, name), int | float):
                raise ValueError(f"{name}={getattr(self, name)}: it must be a number")
        for name, value in (("num_images", self.num_images), ("best", self.num_best)):
            if value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")
        if self.num_best > self.num_images:
            raise ValueError(f"best={self.best} is more than num_images={self.num_images}; draw more or show fewer")
        check_sampling(self.top_k, self.top_p, self.temperature)
        check_guidance(self.guidance)
        check_seed(self.seed)

    @property
    def num_best(self) -> int:
        """How many pictures are kept."""
        return min(DEFAULT_BEST, self.num_images) if self.best is None else self.best


@dataclass(frozen=True)
class Picture:
    """One picture of a prompt."""

    image: Image.Image
    score: float | None
    """CLIP's cosine similarity with the prompt; None where the model has no CLIP."""
    index: int
    """Its number among the pictures drawn: with prompt, settings and seed it names the picture."""
    codes: Tensor
    """[I] int64, raster order."""


@dataclass(frozen=True)
class Progress:
    """How far the drawing is, in codes; the last one carries the pictures."""

    done: int
    total: int
    note: str = ""
    pictures: list[Picture] | None = None
    codes: Tensor | None = None
    """[n, m], the first m codes of the n pictures being drawn."""


class Generator:
    """A model folder made ready to draw: transformer, tokenizer, VQGAN and, where the folder has one, CLIP."""

    def __init__(self, model: Dalle, tokenizer: Tokenizer, vqgan: VQGAN, scorer: "ClipScorer | None" = None):
        """Put the parts together; ValueError where they do not fit."""
        config = model.config
        check_fit(config, tokenizer, vqgan)
        self.model, self.tokenizer, self.vqgan, self.scorer = model, tokenizer, vqgan, scorer
        self.device = model.output.weight.device
        self.model_sha256: str | None = None

    @classmethod
    def from_folder(
        cls, folder: str | Path | None = None, device: str | torch.device = "auto", dtype: torch.dtype = torch.float32
    ) -> Self:
        """Load a model folder or hub id; None means $DALLE_LEAN_MODEL, else the bundled model.

        Args:
            device: "auto" takes CUDA where there is one.
            dtype: of the transformer's weights; the sampling itself is in float32.

        Raises:
            ValueError: a part is missing or altered, or is not the one the transformer was trained with.
        """
        path, where = find_model(None if folder is None else str(folder)), pick_device(device)
        content = check_parts(path)
        if "tokenizer.json" not in content["parts"]:
            raise ValueError(f"{path}: tokenizer.json is missing; without it no prompt can be read")
        if "vqgan/config.json" not in content["parts"]:
            raise ValueError(
                f"{path}: vqgan/config.json is missing; add the VQGAN whose codes the model was trained on: "
                f"dalle-lean pack {path} OUT --vqgan FOLDER"
            )
        vqgan = VQGAN.load(path / "vqgan")
        trained_on = content.get("vqgan_fingerprint")
        if trained_on is not None and trained_on != vqgan.fingerprint():
            raise ValueError(f"{path}: vqgan/ is not the VQGAN on whose codes this model was trained")
        clip = None
        if "clip/config.json" in content["parts"]:
            from dalle_lean.clip import ClipScorer

            clip = ClipScorer.load(path / "clip", device=where)
        generator = cls(
            read_model(path, content, device=where, dtype=dtype),
            Tokenizer.from_file(path / "tokenizer.json"),
            vqgan.to(where),
            clip,
        )
        generator.model_sha256 = content["parts"]["model.safetensors"]
        return generator

    def __call__(
        self,
        prompt: str,
        num_images: int = 128,
        best: int | None = None,
        top_k: int = 256,
        top_p: float = 0.75,
        temperature: float = 1.0,
        seed: int = 0,
        batch_size: int | None = None,
        on_progress: Callable[[int, int, str], None] | None = None,
    ) -> list[Picture]:
        """Draw `num_images` pictures and return the `best` of them, best first.

        Without a CLIP the pictures cannot be told apart: then the first `best` are drawn and returned by index.

        Args:
            prompt: cut to the model's text length, with a warning; an empty one is a ValueError.
            best: at most `num_images`; None is 4, or all where fewer are drawn.
            top_k, top_p: codes that may be drawn; 0 and 1 are off.
            temperature: 0 takes the most likely code each time.
            seed: 0..2^64-1; picture i of a seed is the same for any batch size and number of pictures.
            batch_size: pictures drawn at once; None chooses by the size of the model.
            on_progress: called with (codes drawn, codes in all, note).
        """
        settings = Settings(
            num_images=num_images, best=best, top_k=top_k, top_p=top_p, temperature=temperature, seed=seed
        )
        if excess := self.excess_tokens(prompt):
            warnings.warn(f"the last {excess} tokens of the prompt are cut off", stacklevel=2)
        return self.run(prompt, settings, batch_size, on_progress)

    def run(
        self,
        prompt: str,
        settings: Settings,
        batch_size: int | None = None,
        on_progress: Callable[[int, int, str], None] | None = None,
    ) -> list[Picture]:
        """As a call, with the settings in one object; telling of a cut prompt is up to the caller (`excess_tokens`)."""
        pictures = None
        for progress in self.draw(prompt, settings, batch_size):
            if on_progress is not None:
                on_progress(progress.done, progress.total, progress.note)
            pictures = progress.pictures
        assert pictures is not None
        return pictures

    @torch.inference_mode()
    def draw(
        self, prompt: str, settings: Settings, batch_size: int | None = None, *, start: Tensor | None = None
    ) -> Iterator[Progress]:
        """Draw step by step: one Progress for each row of codes, the last one with the pictures.

        Close the iterator to cancel: nothing is kept.

        Args:
            start: the first codes [m] of every picture, m < I, as `read_picture` gives them; the rest is drawn.
        """
        check_prompt(prompt)
        if batch_size is None:
            batch_size = default_batch_size(self.model.config, self.model.output.weight.element_size())
        elif batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: it must be at least 1")
        wanted = settings.num_best
        drawn = wanted if self.scorer is None else settings.num_images
        config = self.model.config
        total = drawn * config.image_len
        text_ids = self.tokenizer.encode([prompt], config.text_len).to(self.device)
        prepared = read_prompt(self.model, text_ids)
        null = None if settings.guidance == 1 else read_prompt(self.model, torch.zeros_like(text_ids))
        finished: list[Tensor] = []
        for first in range(0, drawn, batch_size):
            indices = range(first, min(first + batch_size, drawn))
            codes = torch.empty(0)
            for codes in sample_codes(
                self.model,
                prepared,
                indices,
                top_k=settings.top_k,
                top_p=settings.top_p,
                temperature=settings.temperature,
                seed=settings.seed,
                guidance=settings.guidance,
                null=null,
                start=start,
            ):
                if codes.shape[1] % config.image_side == 0:
                    yield Progress(first * config.image_len + codes.numel(), total, "drawing", codes=codes)
            finished.append(codes)
        codes_NI = torch.cat(finished)
        images, scores = [], []
        for chunk in codes_NI.split(DECODE_BATCH):
            yield Progress(total, total, "ranking" if self.scorer else "painting")
            pixels = self.vqgan.decode(pad(chunk, (0, 0, 0, DECODE_BATCH - len(chunk))))
            images += to_pil(pixels[: len(chunk)])
            if self.scorer is not None:
                scores += self.scorer.score(pixels, prompt).tolist()[: len(chunk)]
        order = sorted(range(drawn), key=lambda index: (-scores[index] if scores else 0.0, index))
        pictures = [
            Picture(images[index], scores[index] if scores else None, index, codes_NI[index].cpu())
            for index in order[:wanted]
        ]
        yield Progress(total, total, "done", pictures)

    def read_picture(self, image: Image.Image) -> Tensor:
        """The codes [I] of the centre square of a picture; ValueError for broken data."""
        pixels = torch.from_numpy(square_pixels(image, self.picture_side).copy())
        codes: Tensor = self.vqgan.encode(pixels.permute(2, 0, 1)[None].to(self.device) / 255)[0]
        return codes

    def preview(self, codes: Tensor) -> list[Image.Image]:
        """Unfinished pictures from their first codes [n, m]: whole rows that are drawn, transparent below."""
        side, scale = self.model.config.image_side, self.vqgan.config.downscale
        rows = codes.shape[1] // side
        # The decoder looks past the edge of what is drawn; repeating the last row disturbs it least.
        whole = torch.cat(
            [codes[:, : rows * side], *[codes[:, (rows - 1) * side : rows * side]] * (side - rows)], dim=1
        )
        pictures = []
        for image in to_pil(self.vqgan.decode(whole)) if rows else []:
            drawn = Image.new("RGBA", image.size)
            drawn.paste(image.crop((0, 0, image.width, rows * scale)))
            pictures.append(drawn)
        return pictures

    def excess_tokens(self, prompt: str) -> int:
        """How many of the prompt's tokens this model has no room for; they are cut off."""
        return max(0, self.tokenizer.count(prompt) - self.model.config.text_len)

    @property
    def picture_side(self) -> int:
        """Width and height of a picture in pixels."""
        return self.model.config.image_side * self.vqgan.config.downscale


def check_prompt(prompt: str) -> None:
    """ValueError for a prompt with nothing in it."""
    if not prompt.strip():
        raise ValueError("the prompt is empty; say in a few words what to draw")


def check_fit(config: DalleConfig, tokenizer: Tokenizer, vqgan: VQGAN) -> None:
    """ValueError unless the tokenizer's ids and the VQGAN's codes are those of the transformer's vocabulary."""
    if tokenizer.vocab_size > config.text_vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the transformer only {config.text_vocab_size}: "
            "it is not the one the transformer was trained with"
        )
    if vqgan.config.codebook_size != config.image_vocab_size:
        raise ValueError(
            f"the VQGAN has {vqgan.config.codebook_size} codes, the transformer {config.image_vocab_size}: "
            "it is not the one the transformer was trained with"
        )


def default_batch_size(config: DalleConfig, bytes_per_number: int) -> int:
    """As many pictures as keep the cache of keys and values within 2 GiB, at most 64, in whole groups of rows."""
    per_picture = 2 * config.num_layers * config.image_len * config.num_heads * config.head_size * bytes_per_number
    fitting = CACHE_BUDGET_BYTES // per_picture // ROW_GROUP * ROW_GROUP
    return max(ROW_GROUP, min(LARGEST_BATCH, fitting))


def to_pil(pixels: Tensor) -> list[Image.Image]:
    """[N, 3, H, W] in 0..1 -> RGB pictures."""
    values = (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(value) for value in values]


def describe(generator: Generator, settings: Settings) -> dict[str, Any]:
    """What fixes the pictures besides the prompt, ready for JSON."""
    return {**asdict(settings), "best": settings.num_best, "model_sha256": generator.model_sha256}
