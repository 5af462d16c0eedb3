"""Many machines through Ray Data: its rows are runs of parts, and an actor for each GPU makes them.

The source and the output folder must be the same paths on every machine.
"""

import logging
import os
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from threading import Event
from types import ModuleType
from typing import Any

import torch

from dalle_lean.images.vqgan import VQGAN
from dalle_lean.require import require
from preprocessing.encoding.part_records import is_finished
from preprocessing.encoding.pipeline import Job, Report, make_parts
from preprocessing.encoding.work_queue import MAX_DEATHS, WorkersDie, deadly, runs

POLL_S = 0.5


def connect() -> ModuleType:
    """Join the cluster that RAY_ADDRESS or this machine names, else start one on this machine."""
    ray = require("ray", extra="ray")
    require("ray.data", extra="ray")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what it logs, it raises too
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="error")
    return ray


def num_gpus() -> int:
    """GPUs of the cluster."""
    return int(connect().cluster_resources().get("GPU", 0))


def make_on_ray(job: Job, vqgan: VQGAN, parts: Sequence[int], report: Report, *, workers: int | None = None) -> None:
    """As `make_parts`, by `workers` actors, one for each GPU by default, else one for each machine.

    Ray Data replaces an actor that dies, and has its run made again. Raises WorkersDie where a run ends three of them.
    """
    ray = connect()
    gpus = num_gpus()
    cpus = ray.cluster_resources().get("CPU", 1)
    machines = sum(node["Alive"] for node in ray.nodes())  # those that left are named too
    workers = min(len(parts), workers or gpus or machines)
    share = {"num_gpus": min(1, gpus / workers)} if gpus else {"num_cpus": max(1, cpus // workers)}
    board = ray.remote(num_cpus=0)(Board).remote()
    arguments = ray.put((job, vqgan.cpu()))
    rows = [{"parts": run} for run in runs(parts, workers)]
    made = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        Maker,
        fn_constructor_args=([arguments], board, os.getcwd()),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
        **share,
    )
    made.context.enable_progress_bars = False
    failure: OSError | None = None
    with pass_on_reports(board, report):
        for row in made.iter_rows():
            match row["error"]:
                case OSError() as error if not isinstance(error, WorkersDie):
                    failure = failure or error  # the others can still finish their parts
                case Exception() as error:
                    raise error
    if failure:
        raise failure


@contextmanager
def pass_on_reports(board: Any, report: Report) -> Iterator[None]:
    """Tell what the makers report, as long as the block runs and once more behind it."""
    import ray

    ended = Event()

    def pass_on() -> None:
        for part, (seen, complete) in ray.get(board.take_reports.remote()).items():
            report(part, seen, complete)

    def watch() -> None:
        while not ended.wait(POLL_S):
            pass_on()

    with ThreadPoolExecutor(1, thread_name_prefix="reports") as thread:
        watching = thread.submit(watch)
        try:
            yield
        finally:
            ended.set()
    watching.result()
    pass_on()


class Board:
    """Where the makers say what they begin and how far they are."""

    def __init__(self) -> None:
        self.begun: Counter[int] = Counter()
        self.reports: dict[int, tuple[int, bool]] = {}

    def begin(self, run: int) -> int:
        """How often this run has been begun: again after each death, as often as there are deaths."""
        self.begun[run] += 1
        return self.begun[run]

    def report(self, part: int, seen: int, complete: bool) -> None:
        self.reports[part] = seen, complete

    def take_reports(self) -> dict[int, tuple[int, bool]]:
        reports, self.reports = self.reports, {}
        return reports


class Maker:
    """Runs the VQGAN on the GPU that Ray gives it, or on the CPU.

    `arguments` refers to the job and the VQGAN; `folder` is where relative paths begin. What fails is told by the call
    alone: an actor that fails as it starts would be started again and again.
    """

    def __init__(self, arguments: list[Any], board: Any, folder: str):
        self.arguments = arguments
        self.board = board
        self.folder = folder

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[Exception | None]]:
        """Make the parts of one row that are not made yet; returns what went wrong, or None, in one row."""
        try:
            self.make([int(part) for part in rows["parts"][0]])
        except Exception as error:  # raised, it would be told as Ray's own
            error.add_note(traceback.format_exc())
            return {"error": [error]}
        return {"error": [None]}

    def make(self, parts: Sequence[int]) -> None:
        import ray

        if ray.get(self.board.begin.remote(parts[0])) > MAX_DEATHS:
            raise deadly(f"at parts {parts[0]} to {parts[-1]} of the source")
        job, vqgan = self.loaded
        make_parts(job, vqgan, [part for part in parts if not is_finished(job.out, job.parts[part])], self.report)

    def report(self, part: int, seen: int, complete: bool) -> None:
        import ray

        said = self.board.report.remote(part, seen, complete)
        if complete:
            ray.get(said)  # before this call ends

    @cached_property
    def loaded(self) -> tuple[Job, VQGAN]:
        import ray

        os.chdir(self.folder)
        job, vqgan = ray.get(self.arguments[0])
        device = "cuda" if ray.get_gpu_ids() else "cpu"
        if device == "cpu":
            torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", 1))))
        return job, vqgan.to(device)
