"""Generator: draws the best few pictures for a prompt.

n pictures, m codes given, I codes in a picture, R rows.
"""

import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dalle_lean.devices import pick_device
from dalle_lean.errors import UserError, is_out_of_memory
from dalle_lean.images.files import square_pixels
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.model_folder import check_parts, find_model, read_model
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.dalle import Dalle
from dalle_lean.progress import OnProgress, unwatched
from dalle_lean.tokenizer import Tokenizer
from dalle_lean.vocabulary import Vocabulary
from inference.batching import Batch, Kind, default_batch_size, halve_large, plan_batches
from inference.ranking import best_pictures, collect, decode_and_score
from inference.request import Picture, Progress, Request, Settings, tidy
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.packed_linear import Precision, check_precision, fastest_precision
from inference.sampling.prefill import read_prompts
from inference.sampling.sampler import Row, sample_codes
from inference.scorer import Scorer, check_scorer_spec, make_scorer


class Generator:
    """A model folder ready to draw: transformer, tokenizer, VQGAN and the scorer that ranks its pictures."""

    def __init__(
        self,
        model: Dalle,
        tokenizer: Tokenizer,
        vqgan: VQGAN,
        scorer: Scorer | None = None,
        precision: Precision = "fp32",
    ):
        """Put the parts together; ValueError if they do not fit."""
        check_fit(model.config, tokenizer, vqgan)
        self.decoder = PackedDecoder(model, precision)
        self.model, self.tokenizer, self.vqgan, self.scorer = model, tokenizer, vqgan, scorer
        self.device = model.output.weight.device
        self.bf16 = precision == "bf16"
        self.model_sha256: str | None = None
        self.caption_dropout: float | None = None
        """Share of captions left empty in training, which guidance needs; None is unknown."""
        self.guidance = 1.0  # the default guidance; 1 is off
        self.vocabulary: Vocabulary | None = None  # the words of the training captions; None is unknown

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
            device: "auto" is CUDA if there is a GPU, else the CPU.
            precision: of the transformer's products; bf16 also applies to the VQGAN's decoder. None is the faster of
                fp32 and bf16.
            scorer: what ranks the pictures, as in `make_scorer`; "none" ranks nothing.

        ValueError if a part is missing, altered, or not the one the transformer was trained with, or the precision or
        scorer does not work here.
        """
        where = pick_device(device)
        precision = precision or fastest_precision(where)
        check_precision(precision, where)
        check_scorer_spec(scorer)
        path = find_model(None if folder is None else str(folder))
        content = check_parts(path)
        if "tokenizer.json" not in content["parts"]:
            raise UserError(f"{path}: tokenizer.json is missing; without it no prompt can be read")
        if "vqgan/config.json" not in content["parts"]:
            raise UserError(
                f"{path}: vqgan/config.json is missing; add the VQGAN whose codes the model was trained on: "
                f"dalle-lean pack {shlex.quote(str(path))} OUT --vqgan FOLDER"
            )
        clip = path / "clip" if "clip/config.json" in content["parts"] else None
        ranker = make_scorer(scorer, clip, where, checked=True)  # before the weights: its name may be wrong
        vqgan = VQGAN.load(path / "vqgan", checked=True)
        trained_on = content.get("vqgan_fingerprint")
        if trained_on is not None:
            sentence = f"{path}: vqgan/ is not the VQGAN on whose codes this model was trained: they are"
            vqgan.check_reads(trained_on, sentence)
        generator = cls(
            read_model(path, content, device=where),
            Tokenizer.from_file(path / "tokenizer.json"),
            vqgan.to(where),
            ranker,
            precision,
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
        *,
        batch_size: int | None = None,
        on_progress: OnProgress = unwatched,
        **settings: Any,
    ) -> list[Picture]:
        """Draw `num_images` pictures and return the `best` of them, best first; None is 4, or all if fewer are drawn.

        Without a scorer nothing ranks the pictures: only the first `best` are drawn, and returned by index.

        Args:
            prompt: cut to the model's text length, with a warning; ValueError for an empty one.
            batch_size: pictures drawn at once; None chooses by the free memory.
            on_progress: called with (codes drawn, codes in all, note).
            settings: `top_k`, `top_p`, `temperature`, `seed` and `guidance`, as in `Settings`; without `guidance` the
                model's default.
        """
        if settings.get("guidance") is None:
            settings["guidance"] = self.guidance
        if unread := self.unread(prompt):
            warnings.warn(f"the prompt is too long: {unread!r} is not read", stacklevel=2)
        return self.run(prompt, Settings(num_images=num_images, best=best, **settings), batch_size, on_progress)

    def run(
        self, prompt: str, settings: Settings, batch_size: int | None = None, on_progress: OnProgress = unwatched
    ) -> list[Picture]:
        """Like a call, with the settings in one object and no warning about a cut prompt (see `unread`)."""
        pictures = None
        for progress in self.draw([Request(prompt, settings)], batch_size):
            on_progress(progress.done, progress.total, progress.note)
            pictures = progress.pictures
        assert pictures is not None
        return pictures

    @torch.inference_mode()
    def draw(self, requests: Sequence[Request], batch_size: int | None = None) -> Iterator[Progress]:
        """Draw step by step: yields a Progress for each row of codes of each request in a batch, and one with the
        pictures of each finished request.

        Requests with equally many pictures share a batch. A picture does not depend on the others in its batch; on a
        CPU in fp32 or bf16 it is bit for bit the same, unless heads have fewer than 8 channels. Close the iterator to
        cancel, which keeps nothing. `batch_size` is halved when memory runs out; None chooses it by the free memory.
        """
        config, decoder = self.model.config, self.decoder
        for request in requests:
            request.check(config)
        requests = [replace(request, prompt=self.plain(request.prompt)) for request in requests]
        if batch_size is None:
            idle_bytes = 0 if decoder.idle_cache is None else decoder.idle_cache.num_bytes
            batch_size = default_batch_size(config, decoder.dtype, decoder.device, idle_bytes=idle_bytes)
        elif batch_size < 1:
            raise UserError(f"batch_size={batch_size}: it must be at least 1")
        counts = [self.num_drawn(request.settings) for request in requests]
        kinds = [Kind(r.settings.guidance != 1, 0 if r.start is None else len(r.start)) for r in requests]
        waiting = plan_batches(counts, kinds, batch_size)
        # For each request, first picture of a part -> the part's codes; parts need not come in order.
        drawn: list[dict[int, Tensor]] = [{} for _ in requests]
        done, total = 0, sum(n * (config.image_len - kind.num_given) for n, kind in zip(counts, kinds, strict=True))
        while waiting:
            batch = waiting.pop(0)
            given = kinds[batch[0].request].num_given
            codes = torch.empty(0)
            try:
                for codes in self._draw_batch(requests, batch):
                    if codes.shape[1] % config.image_side == 0:
                        drawn_now = done + len(codes) * (codes.shape[1] - given)
                        for part, shown in zip(batch, codes.chunk(len(batch)), strict=True):
                            yield Progress(drawn_now, total, "drawing", codes=shown, request=part.request)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                waiting = halve_large(batch, waiting, kinds)
                continue
            done += len(codes) * (codes.shape[1] - given)
            for (number, pictures), part_codes in zip(batch, codes.chunk(len(batch)), strict=True):
                parts = drawn[number]
                parts[pictures.start] = part_codes
                if sum(map(len, parts.values())) == counts[number]:
                    all_codes = torch.cat([parts[first] for first in sorted(parts)])
                    note = "painting" if self.scorer is None else "ranking"
                    for best in self._rank(requests[number], all_codes):
                        yield Progress(done, total, note if best is None else "done", best, request=number)

    def _draw_batch(self, requests: Sequence[Request], batch: Batch) -> Iterator[Tensor]:
        """Yields the codes so far, [R, n], of all pictures in a batch."""
        asked = [requests[part.request] for part in batch]
        text_ids = self.tokenizer.encode([request.prompt for request in asked], self.model.config.text_len)
        starts = [request.start.to(self.device) for request in asked if request.start is not None]
        codes = torch.stack(starts) if len(starts) == len(asked) else None
        prompts = read_prompts(self.decoder, text_ids, codes, guided=asked[0].settings.guidance != 1)
        rows = [
            Row(request.first + picture, request.settings)
            for request, part in zip(asked, batch, strict=True)
            for picture in part.pictures
        ]
        return sample_codes(self.decoder, prompts, rows)

    def _rank(self, request: Request, codes: Tensor) -> Iterator[list[Picture] | None]:
        """Decode and score all pictures of a request, codes [n, I]: yields None for each batch, then the best few."""
        batches = []
        for batch in decode_and_score(codes, request.prompt, self.vqgan, self.scorer, bf16=self.bf16):
            yield None
            batches.append(batch)
        yield best_pictures(codes, *collect(batches), request.settings.num_best, request.first)

    def num_drawn(self, settings: Settings) -> int:
        return settings.num_drawn(ranked=self.scorer is not None)

    def read_picture(self, image: Image.Image) -> Tensor:
        """The codes [I] of the centre square of a picture; ValueError for broken data."""
        return self.read_pixels(square_pixels(image, self.picture_side))

    def read_pixels(self, pixels: NDArray[np.uint8]) -> Tensor:
        """The codes [I] of a picture's pixels, uint8 [picture_side, picture_side, 3]."""
        return self.vqgan.encode(torch.tensor(pixels).permute(2, 0, 1)[None].to(self.device) / 255)[0]

    def preview(self, codes: Tensor) -> list[Image.Image]:
        """Unfinished pictures from their first codes [n, m]: the complete rows, transparent below them."""
        side, scale = self.model.config.image_side, self.vqgan.config.downscale
        rows = codes.shape[1] // side
        if rows == 0:
            return []
        # The decoder sees beyond the last complete row; repeating that row disturbs it least.
        drawn = codes[:, : rows * side].unflatten(1, (rows, side))
        whole = drawn[:, torch.arange(side).clamp(max=rows - 1)].flatten(1)
        pictures = []
        for image in collect(decode_and_score(whole, "", self.vqgan, bf16=self.bf16))[0]:
            preview = Image.new("RGBA", image.size)
            preview.paste(image.crop((0, 0, image.width, rows * scale)))
            pictures.append(preview)
        return pictures

    def unread(self, prompt: str) -> str:
        """The end of a prompt that exceeds the model's text length and is not read; "" if it reads all."""
        return self.tokenizer.unread(self.plain(prompt), self.model.config.text_len)

    def unknown_words(self, prompt: str) -> list[str] | None:
        """The words of a prompt that training never showed, in order, each once; None without a vocabulary.json."""
        return None if self.vocabulary is None else self.vocabulary.unknown(self.plain(prompt))

    def plain(self, prompt: str) -> str:
        """A prompt as the model reads it: tidy, with emoji spelled out that it has not learnt."""
        return tidy(prompt if self.vocabulary is None else self.vocabulary.spelled_out(prompt))

    def suggestions(self, prompt: str) -> dict[str, str]:
        """The learnt words that unknown ones of a prompt may mean if they are misspelt, by unknown word."""
        return {} if self.vocabulary is None else self.vocabulary.suggestions(self.plain(prompt))

    def describe(self, settings: Settings, start: Tensor | None = None) -> dict[str, Any]:
        """All that determines the pictures besides the prompt, ready for JSON."""
        return {
            **asdict(settings),
            **({} if start is None else {"start": start.tolist()}),
            "best": settings.num_best,
            "precision": self.decoder.precision,
            "scorer": None if self.scorer is None else self.scorer.name,
            "model_sha256": self.model_sha256,
        }

    @property
    def picture_side(self) -> int:
        """Width and height of a picture in pixels."""
        return self.model.config.image_side * self.vqgan.config.downscale


def check_fit(config: DalleConfig, tokenizer: Tokenizer, vqgan: VQGAN) -> None:
    """ValueError unless the tokenizer's ids and the VQGAN's codes match the transformer's vocabulary."""
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
