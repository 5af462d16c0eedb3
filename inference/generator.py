"""Generator: a prompt in, the best few pictures out.

N pictures, I codes in a picture, T text length.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dalle_lean.devices import pick_device
from dalle_lean.errors import UserError
from dalle_lean.images.files import square_pixels
from dalle_lean.images.vqgan import VQGAN, read_description
from dalle_lean.io.model_folder import check_parts, find_model, read_model
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.dalle import Dalle, check_ids
from dalle_lean.tokenizer import Tokenizer
from dalle_lean.vocabulary import Vocabulary
from inference.batching import Batch, Kind, default_batch_size, halve, is_out_of_memory, plan_batches
from inference.ranking import collect, decode_and_score
from inference.sampling.decoder import Decoder
from inference.sampling.packed_linear import Precision
from inference.sampling.prefill import Prompts, read_prompts
from inference.sampling.sampler import Row, Sampling, sample_codes
from inference.scorer import Scorer, make_scorer

DEFAULT_BEST = 4


@dataclass(frozen=True, kw_only=True)
class Settings(Sampling):
    """What to draw for a prompt; the defaults are the paper's. ValueError outside the ranges."""

    num_images: int = 128
    best: int | None = None
    """How many to keep; None is 4, or all where fewer are drawn."""

    def __post_init__(self) -> None:
        for name in ("num_images", "best", "top_k", "seed"):
            optional = name == "best" and self.best is None
            if not (optional or isinstance(getattr(self, name), int)):
                raise UserError(f"{name}={getattr(self, name)}: it must be a whole number")
        for name in ("top_p", "temperature", "guidance"):
            if not isinstance(getattr(self, name), int | float):
                raise UserError(f"{name}={getattr(self, name)}: it must be a number")
        for name, value in (("num_images", self.num_images), ("best", self.num_best)):
            if value < 1:
                raise UserError(f"{name}={value}: it must be at least 1")
        if self.num_best > self.num_images:
            raise UserError(f"best={self.best} is more than num_images={self.num_images}; draw more or show fewer")
        super().__post_init__()

    @property
    def num_best(self) -> int:
        """How many pictures are kept."""
        return min(DEFAULT_BEST, self.num_images) if self.best is None else self.best


@dataclass(frozen=True)
class Request:
    """A prompt and what to draw for it."""

    prompt: str
    settings: Settings
    start: Tensor | None = None
    """The first codes [m] of every picture, m < I, as `Generator.read_picture` gives them; the rest is drawn."""


@dataclass(frozen=True)
class Picture:
    """One picture of a prompt."""

    image: Image.Image
    score: float | None
    """The scorer's; None where nothing ranked the pictures."""
    index: int
    """Its number among the pictures drawn: with prompt, settings and seed it names the picture."""
    codes: Tensor
    """[I] int64, raster order."""


@dataclass(frozen=True)
class Progress:
    """How far the drawing is, in codes of all requests."""

    done: int
    total: int
    note: str = ""
    pictures: list[Picture] | None = None
    """The best of one request, once they are all drawn and ranked."""
    codes: Tensor | None = None
    """[n, m], the first m codes of the n pictures being drawn, where they are all of one request."""
    request: int = 0
    """Number of the request that `pictures` or `codes` belong to."""


class Generator:
    """A model folder made ready to draw: transformer, tokenizer, VQGAN and what ranks its pictures."""

    def __init__(
        self,
        model: Dalle,
        tokenizer: Tokenizer,
        vqgan: VQGAN,
        scorer: Scorer | None = None,
        precision: Precision = "fp32",
    ):
        """Put the parts together; ValueError where they do not fit."""
        check_fit(model.config, tokenizer, vqgan)
        self.decoder = Decoder(model, precision)
        self.model, self.tokenizer, self.vqgan, self.scorer = model, tokenizer, vqgan, scorer
        self.device = model.output.weight.device
        self.model_sha256: str | None = None
        self.caption_dropout: float | None = None
        """Share of the captions in whose place it learnt the empty one, which guidance needs; None is not known."""
        self.guidance = 1.0
        """What it draws with unless told otherwise; 1 is off."""
        self.vocabulary: Vocabulary | None = None
        """The words of its training captions; None is not known."""

    @classmethod
    def from_folder(
        cls,
        folder: str | Path | None = None,
        device: str | torch.device = "auto",
        precision: Precision | None = None,
        scorer: str = "clip",
    ) -> Self:
        """Load a model folder or hub id; None means $DALLE_LEAN_MODEL, else the bundled model.

        Args:
            device: "auto" takes CUDA where there is one.
            precision: of the transformer's products; None is fp32 on a CPU and bf16 on a GPU.
            scorer: what ranks the pictures, as in `make_scorer`; "none" ranks nothing.

        Raises:
            ValueError: a part is missing or altered, or is not the one the transformer was trained with; a precision
                or scorer that cannot be had.
        """
        path, where = find_model(None if folder is None else str(folder)), pick_device(device)
        content = check_parts(path)
        if "tokenizer.json" not in content["parts"]:
            raise UserError(f"{path}: tokenizer.json is missing; without it no prompt can be read")
        if "vqgan/config.json" not in content["parts"]:
            raise UserError(
                f"{path}: vqgan/config.json is missing; add the VQGAN whose codes the model was trained on: "
                f"dalle-lean pack {path} OUT --vqgan FOLDER"
            )
        vqgan = VQGAN.load(path / "vqgan", checked=True)
        trained_on = content.get("vqgan_fingerprint")
        if trained_on is not None and trained_on != read_description(path / "vqgan")["fingerprint"]:
            raise UserError(f"{path}: vqgan/ is not the VQGAN on whose codes this model was trained")
        clip = path / "clip" if "clip/config.json" in content["parts"] else None
        generator = cls(
            read_model(path, content, device=where),
            Tokenizer.from_file(path / "tokenizer.json"),
            vqgan.to(where),
            make_scorer(scorer, clip, where, checked=True),
            precision or ("fp32" if where.type == "cpu" else "bf16"),
        )
        generator.model_sha256 = content["parts"]["model.safetensors"]
        generator.caption_dropout = content.get("caption_dropout")
        generator.guidance = float(content.get("guidance", 1.0))
        if "vocabulary.json" in content["parts"]:
            generator.vocabulary = Vocabulary.load(path / "vocabulary.json")
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
        guidance: float | None = None,
        batch_size: int | None = None,
        on_progress: Callable[[int, int, str], None] | None = None,
    ) -> list[Picture]:
        """Draw `num_images` pictures and return the `best` of them, best first.

        Without a scorer the pictures cannot be told apart: then the first `best` are drawn and returned by index.

        Args:
            prompt: cut to the model's text length, with a warning; an empty one is a ValueError.
            best: at most `num_images`; None is 4, or all where fewer are drawn.
            top_k, top_p: codes that may be drawn; 0 and 1 are off.
            temperature: 0 takes the most likely code each time.
            seed: 0..2^64-1; picture i of a seed is the same for any batch size and number of pictures.
            guidance: above 1 keeps closer to the prompt, for a model trained with caption dropout; 1 is off, None the
                model's own.
            batch_size: pictures drawn at once; None chooses by the free memory.
            on_progress: called with (codes drawn, codes in all, note).
        """
        settings = Settings(
            num_images=num_images,
            best=best,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
            seed=seed,
            guidance=self.guidance if guidance is None else guidance,
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

    def draw(
        self, prompt: str, settings: Settings, batch_size: int | None = None, *, start: Tensor | None = None
    ) -> Iterator[Progress]:
        """`draw_all` for one request."""
        return self.draw_all([Request(prompt, settings, start)], batch_size)

    @torch.inference_mode()
    def draw_all(self, requests: Sequence[Request], batch_size: int | None = None) -> Iterator[Progress]:
        """Draw step by step: a Progress for each row of codes, and one with the pictures of each finished request.

        Pictures of several requests are drawn together where they are as many of each. A picture does not depend on
        what is drawn beside it; on a CPU in fp32 or bf16 exactly so, unless heads have fewer than 8 channels.
        Close the iterator to cancel: nothing is kept.

        Args:
            batch_size: pictures at once; None chooses by the free memory. Where memory runs out, half as many.
        """
        for asked in requests:
            check_prompt(asked.prompt)
            if asked.start is not None:
                check_start(asked.start, self.model.config)
        config, decoder = self.model.config, self.decoder
        if batch_size is None:
            batch_size = default_batch_size(config, decoder.dtype, decoder.device)
        elif batch_size < 1:
            raise UserError(f"batch_size={batch_size}: it must be at least 1")
        counts = [r.settings.num_best if self.scorer is None else r.settings.num_images for r in requests]
        kinds = [Kind(r.settings.guidance != 1, 0 if r.start is None else len(r.start)) for r in requests]
        waiting = plan_batches(counts, kinds, batch_size)
        # Of each request, the codes of its parts by their first picture; parts need not come in order.
        drawn: list[dict[int, Tensor]] = [{} for _ in requests]
        done, total = 0, sum(n * (config.image_len - kind.num_given) for n, kind in zip(counts, kinds, strict=True))
        while waiting:
            batch = waiting.pop(0)
            given = kinds[batch[0].request].num_given
            codes = torch.empty(0)
            try:
                for codes in self._draw_batch(requests, batch):
                    if codes.shape[1] % config.image_side == 0:
                        request, shown = batch[0].request, codes if len(batch) == 1 else None
                        drawn_now = len(codes) * (codes.shape[1] - given)
                        yield Progress(done + drawn_now, total, "drawing", codes=shown, request=request)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                waiting = halve(batch) + waiting
                continue
            done += len(codes) * (codes.shape[1] - given)
            for part, part_codes in zip(batch, codes.chunk(len(batch)), strict=True):
                parts = drawn[part.request]
                parts[part.pictures.start] = part_codes
                if sum(map(len, parts.values())) == counts[part.request]:
                    all_codes, note = torch.cat([parts[first] for first in sorted(parts)]), self._finishing
                    ranked = []
                    for decoded in decode_and_score(all_codes, requests[part.request].prompt, self.vqgan, self.scorer):
                        yield Progress(done, total, note, request=part.request)
                        ranked.append(decoded)
                    pictures = best_pictures(all_codes, *collect(ranked), requests[part.request].settings.num_best)
                    yield Progress(done, total, "done", pictures, request=part.request)

    def _draw_batch(self, requests: Sequence[Request], batch: Batch) -> Iterator[Tensor]:
        """The codes so far of all pictures of a batch, [R, n]."""
        asked = [requests[part.request] for part in batch]
        rows = [
            Row(picture, request.settings)
            for part, request in zip(batch, asked, strict=True)
            for picture in part.pictures
        ]
        return sample_codes(self.decoder, self._read(asked), rows)

    def _read(self, asked: Sequence[Request]) -> Prompts:
        text_ids = self.tokenizer.encode([request.prompt for request in asked], self.model.config.text_len)
        starts = [request.start.to(self.device) for request in asked if request.start is not None]
        codes = torch.stack(starts) if len(starts) == len(asked) else None
        return read_prompts(self.decoder, text_ids, codes, guided=asked[0].settings.guidance != 1)

    @property
    def _finishing(self) -> str:
        return "painting" if self.scorer is None else "ranking"

    def read_picture(self, image: Image.Image) -> Tensor:
        """The codes [I] of the centre square of a picture; ValueError for broken data."""
        return self.read_pixels(square_pixels(image, self.picture_side))

    def read_pixels(self, pixels: NDArray[np.uint8]) -> Tensor:
        """The codes [I] of the pixels [side, side, 3] of a picture, whose side is `picture_side`."""
        images = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].to(self.device) / 255
        codes: Tensor = self.vqgan.encode(images)[0]
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
        for image in self._decode(whole) if rows else []:
            drawn = Image.new("RGBA", image.size)
            drawn.paste(image.crop((0, 0, image.width, rows * scale)))
            pictures.append(drawn)
        return pictures

    def _decode(self, codes: Tensor) -> list[Image.Image]:
        return collect(decode_and_score(codes, "", self.vqgan))[0]

    def excess_tokens(self, prompt: str) -> int:
        """How many of the prompt's tokens this model has no room for; they are cut off."""
        return max(0, self.tokenizer.count(prompt) - self.model.config.text_len)

    def unknown_words(self, prompt: str) -> list[str] | None:
        """The words of a prompt that training never showed, in its order, each once.

        None where the model folder has no vocabulary.json, and so does not tell.
        """
        return None if self.vocabulary is None else self.vocabulary.unknown(prompt)

    @property
    def picture_side(self) -> int:
        """Width and height of a picture in pixels."""
        return self.model.config.image_side * self.vqgan.config.downscale


def check_prompt(prompt: str) -> None:
    """ValueError for a prompt with nothing in it."""
    if not prompt.strip():
        raise UserError("the prompt is empty; say in a few words what to draw")


def check_start(start: Tensor, config: DalleConfig) -> None:
    """ValueError unless `start` is [m] codes of the model, fewer than a picture has."""
    if start.dim() != 1 or len(start) >= config.image_len:
        raise ValueError(f"start has shape {list(start.shape)}; it must be [m] with m < {config.image_len} codes")
    check_ids("start", start[None], config.image_vocab_size)


def check_fit(config: DalleConfig, tokenizer: Tokenizer, vqgan: VQGAN) -> None:
    """ValueError unless the tokenizer's ids and the VQGAN's codes are those of the transformer's vocabulary."""
    if tokenizer.vocab_size > config.text_vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the transformer only {config.text_vocab_size}: "
            "it is not the one the transformer was trained with"
        )
    if vqgan.config.codebook_size != config.image_vocab_size:
        raise UserError(
            f"the VQGAN has {vqgan.config.codebook_size} codes, the transformer {config.image_vocab_size}: "
            "it is not the one the transformer was trained with"
        )


def best_pictures(
    codes_NI: Tensor, images: Sequence[Image.Image], scores: Sequence[float] | None, count: int
) -> list[Picture]:
    """The `count` pictures with the highest scores, best first; without scores the first ones."""
    order = sorted(range(len(images)), key=lambda index: (-scores[index] if scores else 0.0, index))
    return [
        Picture(images[index], scores[index] if scores else None, index, codes_NI[index].cpu())
        for index in order[:count]
    ]


def describe(generator: Generator, settings: Settings, start: Tensor | None = None) -> dict[str, Any]:
    """What fixes the pictures besides the prompt, ready for JSON."""
    given = {} if start is None else {"start": start.tolist()}
    return {
        **asdict(settings),
        **given,
        "best": settings.num_best,
        "precision": generator.decoder.precision,
        "scorer": None if generator.scorer is None else generator.scorer.name,
        "model_sha256": generator.model_sha256,
    }
