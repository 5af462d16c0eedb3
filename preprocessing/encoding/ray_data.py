"""Several GPUs or machines through Ray Data: its rows are runs of parts, which actors with the VQGAN encode.

Whatever dies, the records in the output folder tell what is left to do. The source and the output folder must have the
same paths on every machine.
"""

import logging
import os
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import torch

from dalle_lean.images.vqgan import VQGAN
from dalle_lean.require import require
from preprocessing.encoding.part_records import finished_names, read_record
from preprocessing.encoding.pipeline import EncodingJob, Report, make_parts, no_report

MAX_DEATHS = 3
MAX_RUN = 16  # parts in a run, which an actor makes without a pause and which are made again if it dies
POLL_S = 0.5
ROOT = Path(__file__).parents[2]


def connect(**options: Any) -> ModuleType:
    """Join the cluster named by RAY_ADDRESS or running on this machine; if there is none, start one here."""
    ray = require("ray", extra="ray")
    require("ray.data", extra="ray")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it also raises what it logs
    if not ray.is_initialized():
        with chdir(ROOT):  # Ray's processes import from the current folder first, which may hold a `preprocessing`
            ray.init(log_to_driver=False, logging_level="error", **options)
    return ray


def num_gpus() -> int:
    """Number of GPUs in the cluster."""
    return int(connect().cluster_resources().get("GPU", 0))


def make_on_devices(
    job: EncodingJob, vqgan: VQGAN, parts: Sequence[int], report: Report, *, devices: Sequence[torch.device]
) -> None:
    """Like `make_on_ray`, with an actor for each of `devices` of this machine: all of them GPUs, or all the CPU. Ray
    starts and ends with the call, unless the caller already uses it."""
    starts = not require("ray", extra="ray").is_initialized()
    gpus = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with only_gpus(gpus):
        ray = connect(address="local", num_gpus=len(gpus), include_dashboard=False)
    try:
        make_on_ray(job, vqgan, parts, report, workers=len(devices))
    finally:
        if starts:
            ray.shutdown()


@contextmanager
def only_gpus(gpus: Sequence[int]) -> Iterator[None]:
    """Show only these GPUs, numbered as in this process, to processes started in the block."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    if gpus:
        names = before.split(",") if before else [str(gpu) for gpu in range(gpus[-1] + 1)]
        os.environ[name] = ",".join(names[gpu] for gpu in gpus)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def make_on_ray(
    job: EncodingJob, vqgan: VQGAN, parts: Sequence[int], report: Report, *, workers: int | None = None
) -> None:
    """Like `make_parts`, with `workers` actors: by default one for each GPU, or without GPUs one for each machine.

    An actor that dies is replaced, and what it left undone follows when the rest is made. Raises OSError for a part
    at which three have died.
    """
    ray = connect()
    gpus = num_gpus()
    cpus = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]  # those that left are listed too
    workers = min(len(parts), workers or gpus or len(cpus))
    # Fixed for the whole call, even if machines leave: codes can depend on the number of threads.
    share = {"num_gpus": min(1, gpus / workers)} if gpus else {"num_cpus": cpus_of_actor(cpus, workers)}
    arguments = [ray.put((job, vqgan.cpu()))], os.getcwd()
    deaths: Counter[int] = Counter()
    failure: OSError | None = None
    with progress(job, parts, report):
        while parts:
            rows = [{"parts": run} for run in runs(parts, workers)]
            made = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
                EncodingActor,
                fn_constructor_args=arguments,
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
                max_task_retries=0,  # on a machine that left, they would wait for its return
                **share,
            )
            made.context.max_errored_blocks = -1  # runs whose actor died
            made.context.enable_progress_bars = False
            ended: set[int] = set()
            cause: Exception | None = None
            try:
                for row in made.iter_rows():
                    ended.update(row["parts"])
                    match row["error"]:
                        case OSError() as error:
                            failure = failure or error  # the others can still finish their parts
                        case Exception() as error:
                            raise error
            except ray.exceptions.RayError as error:
                cause = error
            parts = job.missing(part for part in parts if part not in ended)
            deaths.update(parts)
            if deadly := [part for part in parts if deaths[part] >= MAX_DEATHS]:
                where = f"at parts {deadly[0]} to {deadly[-1]} of the source"
                raise OSError(
                    f"{MAX_DEATHS} processes that encode have died {where}; is there enough memory?"
                ) from cause
    if failure:
        raise failure


def cpus_of_actor(cpus: Sequence[float], workers: int) -> int:
    """CPUs for each of `workers` equal actors on machines with so many. Ray waits forever for a machine with more than
    any has."""
    return max(1, int(min(sum(cpus) / workers, min((count for count in cpus if count), default=1))))


def runs(parts: Sequence[int], workers: int) -> Iterator[list[int]]:
    """Cut into runs of at most MAX_RUN parts, ever shorter ones, so that all workers end at about the same time."""
    start = 0
    while start < len(parts):
        length = min(MAX_RUN, max(1, (len(parts) - start) // (2 * workers)))
        yield list(parts[start : start + length])
        start += length


@contextmanager
def progress(job: EncodingJob, parts: Sequence[int], report: Report) -> Iterator[None]:
    """Report each part as soon as its record appears, while the block runs."""
    missing = {job.parts[part]: part for part in parts}
    ended = Event()

    def look() -> None:
        with suppress(FileNotFoundError):  # another run has finished the whole and removed the records
            for name in missing.keys() & finished_names(job.out):
                record = read_record(job.out, name)
                report(missing.pop(name), record["kept"] + sum(record["rejected"].values()), True)

    def watch() -> None:
        while not ended.wait(POLL_S):
            look()

    with ThreadPoolExecutor(1, thread_name_prefix="progress") as thread:
        watching = thread.submit(watch)
        try:
            yield
        finally:
            ended.set()
    watching.result()
    look()


class EncodingActor:
    """Holds the VQGAN on the GPU that Ray assigns, or on the CPU.

    `arguments` refers to the job and the VQGAN; relative paths start at `folder`. The call does all the work: Ray would
    wrap failures of the constructor in an error of its own.
    """

    def __init__(self, arguments: list[Any], folder: str):
        self.arguments = arguments
        self.folder = folder

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Encode the parts of one row that are not finished; returns the row with what went wrong, or None."""
        error = None
        try:
            job, vqgan = self.loaded
            make_parts(job, vqgan, job.missing(map(int, rows["parts"][0])), no_report)
        except Exception as raised:
            raised.add_note(traceback.format_exc())
            error = raised
        return {"parts": rows["parts"], "error": [error]}

    @cached_property
    def loaded(self) -> tuple[EncodingJob, VQGAN]:
        import ray

        os.chdir(self.folder)
        job, vqgan = ray.get(self.arguments[0])
        device = "cuda" if ray.get_gpu_ids() else "cpu"
        if device == "cpu":
            torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", 1))))
        return job, vqgan.to(device)
