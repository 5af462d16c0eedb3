"""A replica: one generator, which draws the pictures of several prompts together.

Prompts come in units of eight pictures, so that each picture has the same place in its decoding batch as on one
machine. On a CPU in fp32 or bf16, with as many threads, it is then the same, bit for bit.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from ray import serve

from dalle_lean.errors import UserError, is_out_of_memory
from dalle_lean.io.files import read_text
from dalle_lean.io.model_folder import check_parts
from demo.serve.wire import latency_to_json, picture_to_json, png
from demo.service.drawing_service import LACK_OF_MEMORY, PREVIEW_INTERVAL_S, PREVIEWS
from demo.service.latency_model import LatencyModel, measure, timed
from inference.generator import Generator
from inference.ranking import DECODE_BATCH
from inference.request import Progress, Request

UNIT = DECODE_BATCH  # pictures
GATHER_S = 0.01  # how long the first unit of a batch waits for others
FILES = ("tokenizer.json", "vocabulary.json", "README.md")  # of a model folder, for clients


@dataclass
class Unit:
    """Some pictures of a prompt while they are drawn here."""

    request: Request
    previews: bool  # whether to send previews
    wanted: bool = True  # whether its caller still waits for it
    told_s: float = 0.0  # when its caller was last told of its progress


@dataclass(frozen=True)
class Step:
    share: float = 0.0  # of the codes, 0..1
    note: str = ""
    previews: Sequence[str] = ()
    pictures: Sequence[dict[str, Any]] | None = None  # the best of the unit, at the end
    mistake: str | None = None  # why it cannot be drawn, in a sentence for its user
    learned: tuple[int, float, float] | None = None
    """At the end: pictures drawn together, seconds for a row of their codes, seconds for decoding and ranking."""


class Drawer:
    """A Ray Serve deployment.

    Args:
        folder: the model folder, at the same path on every machine.
        sha256: of the weights that the engine loaded.
        threads: for torch on a CPU.
        batch_size: pictures drawn at once.
    """

    def __init__(
        self, folder: str, sha256: str, device: str, precision: Any, scorer: str, threads: int, batch_size: int
    ):
        torch.set_num_threads(threads)
        # Cached tensors and OpenMP's threads belong to the thread that computes.
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="drawing")
        device = own_gpu() if device == "cuda" else device
        self.generator = self.worker.submit(Generator.from_folder, folder, device, precision, scorer).result()
        if self.generator.model_sha256 != sha256:
            raise UserError(f"{folder} has changed since the engine loaded it; send the engine SIGHUP to reload it")
        self.folder, self.batch_size = Path(folder), batch_size
        self.draw_together.set_max_batch_size(max(1, batch_size // UNIT))

    async def run(self, job: Any, *arguments: Any) -> Any:
        """Run a job on the drawing thread, between two rows."""
        return await asyncio.get_running_loop().run_in_executor(self.worker, job, *arguments)

    async def describe(self) -> dict[str, Any]:
        """What a client needs to know about the model, and how long drawing takes here."""
        generator = self.generator
        latency: LatencyModel = await self.run(measure, generator)
        latency.largest_batch = min(latency.largest_batch, self.batch_size)
        return {
            "files": {name: read_text(self.folder / name) for name in FILES if (self.folder / name).is_file()},
            "content": check_parts(self.folder),
            "downscale": generator.vqgan.config.downscale,
            "scorer": None if generator.scorer is None else generator.scorer.name,
            "device": generator.device.type,
            "precision": generator.decoder.precision,
            "latency": latency_to_json(latency),
        }

    async def read(self, pixels: bytes) -> list[int]:
        """The codes of a picture's pixels, RGB, rows from the top."""
        side = self.generator.picture_side
        values = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(side, side, 3).numpy()
        return list((await self.run(self.generator.read_pixels, values)).tolist())

    async def preview(self, codes: torch.Tensor) -> str:
        """A picture as far as its first codes [m] go, as a PNG in base64."""
        return png((await self.run(self.generator.preview, codes[None]))[0])

    async def draw(self, request: Request, previews: bool) -> AsyncIterator[Step]:
        """Draw one unit, in a batch with others if there are any. Closing the iterator cancels it."""
        unit = Unit(request, previews)
        try:
            async for step in self.draw_together(unit):
                if isinstance(step, Exception):
                    raise step
                if step is not None:
                    yield step
                    if step.pictures is not None:
                        return
        except UserError as mistake:
            yield Step(mistake=str(mistake))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            yield Step(mistake=LACK_OF_MEMORY)
        finally:
            unit.wanted = False

    @cast(Any, serve.batch(batch_wait_timeout_s=GATHER_S))  # its types do not cover methods
    async def draw_together(self, units: list[Unit]) -> AsyncIterator[list[Step | Exception | None]]:
        """Yield a list for each step of a unit, with that step in the unit's place. If a batch fails, its units are
        tried one by one, so that one prompt cannot spoil another's."""

        def only(unit: Unit, step: Step | Exception) -> list[Step | Exception | None]:
            return [step if one is unit else None for one in units]

        groups = [units]
        while groups:
            group = groups.pop(0)
            try:
                async for unit, step in self.steps(group):
                    yield only(unit, step)
            except Exception as error:
                if len(group) > 1:
                    groups += [[unit] for unit in group if unit.wanted]
                else:
                    yield only(group[0], error)

    async def steps(self, units: list[Unit]) -> AsyncIterator[tuple[Unit, Step]]:
        """Draw units until all are done or none is wanted any more."""
        drawing = timed(self.generator.draw([unit.request for unit in units], self.batch_size))
        timer = Timer(sum(unit.request.settings.num_images for unit in units))
        try:
            while any(unit.wanted for unit in units):
                found = await self.run(self.step, drawing, units, timer)
                if found is None:
                    return
                if found[1] is not None:
                    yield found
        finally:
            await self.run(cast(Any, drawing).close)

    def step(
        self, drawing: Iterator[tuple[Progress, float]], units: list[Unit], timer: "Timer"
    ) -> tuple[Unit, Step | None] | None:
        """Draw on; a step of one of the units, or None in its place if its caller was told only just now. None at the
        end."""
        found = next(drawing, None)
        if found is None:
            return None
        progress, seconds = found
        unit, config = units[progress.request], self.generator.model.config
        learned = timer.add(progress, seconds)
        if progress.pictures is not None:
            pictures = [picture_to_json(picture) for picture in progress.pictures]
            return unit, Step(1.0, progress.note, pictures=pictures, learned=learned)
        # A message between processes takes milliseconds, and the front passes nothing on sooner.
        if time.monotonic() - unit.told_s < PREVIEW_INTERVAL_S:
            return unit, None
        unit.told_s = time.monotonic()
        if progress.codes is None:
            return unit, Step(1.0, progress.note)
        given = 0 if unit.request.start is None else len(unit.request.start)
        share = (progress.codes.shape[1] - given) / (config.image_len - given)
        previews = self.generator.preview(progress.codes[:PREVIEWS]) if unit.previews else []
        return unit, Step(share, progress.note, [png(image) for image in previews])

    def __del__(self) -> None:
        if hasattr(self, "worker"):
            self.worker.shutdown(wait=False, cancel_futures=True)


def own_gpu() -> str:
    """This replica's GPU: the replicas on a machine take its GPUs in turn. Ray would fill one GPU before the next."""
    return f"cuda:{serve.get_replica_context().rank.local_rank % torch.cuda.device_count()}"


class Timer:
    """Times the drawing of a batch of `num_images` pictures."""

    def __init__(self, num_images: int):
        self.num_images, self.codes_s, self.decoding_s = num_images, 0.0, 0.0
        self.rows: set[int] = set()

    def add(self, progress: Progress, seconds: float) -> tuple[int, float, float] | None:
        """Add a step; returns `Step.learned` at the end of a unit."""
        if progress.codes is not None:
            self.codes_s += seconds
            self.rows.add(progress.codes.shape[1])
            return None
        self.decoding_s += seconds
        if progress.pictures is None:
            return None
        decoding_s, self.decoding_s = self.decoding_s, 0.0
        return self.num_images, self.codes_s / max(1, len(self.rows)), decoding_s
