"""Many machines through Ray Data: its rows are runs of parts, and an actor on each GPU encodes them.

The source and the output folder must have the same paths on every machine.
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
from preprocessing.encoding.pipeline import EncodingJob, Report, make_parts
from preprocessing.encoding.work_queue import MAX_DEATHS, WorkersDie, runs, too_many_deaths

POLL_S = 0.5


def connect() -> ModuleType:
    """Join the cluster named by RAY_ADDRESS or running on this machine; if there is none, start one here."""
    ray = require("ray", extra="ray")
    require("ray.data", extra="ray")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it raises what it logs
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="error")
    return ray


def num_gpus() -> int:
    """GPUs of the cluster."""
    return int(connect().cluster_resources().get("GPU", 0))


def make_on_ray(
    job: EncodingJob, vqgan: VQGAN, parts: Sequence[int], report: Report, *, workers: int | None = None
) -> None:
    """Like `make_parts`, by `workers` actors: by default one for each GPU, or without GPUs one for each machine.

    Ray Data replaces an actor that dies and repeats its run. Raises WorkersDie when a run has ended three of them.
    """
    ray = connect()
    gpus = num_gpus()
    cpus = ray.cluster_resources().get("CPU", 1)
    machines = sum(node["Alive"] for node in ray.nodes())  # nodes that left are listed too
    workers = min(len(parts), workers or gpus or machines)
    share = {"num_gpus": min(1, gpus / workers)} if gpus else {"num_cpus": max(1, cpus // workers)}
    collector = ray.remote(num_cpus=0)(ReportCollector).remote()
    arguments = ray.put((job, vqgan.cpu()))
    rows = [{"parts": run} for run in runs(parts, workers)]
    made = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        EncodingActor,
        fn_constructor_args=([arguments], collector, os.getcwd()),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
        **share,
    )
    made.context.enable_progress_bars = False
    failure: OSError | None = None
    with pass_on_reports(collector, report):
        for row in made.iter_rows():
            match row["error"]:
                case OSError() as error if not isinstance(error, WorkersDie):
                    failure = failure or error  # the others can still finish their parts
                case Exception() as error:
                    raise error
    if failure:
        raise failure


@contextmanager
def pass_on_reports(collector: Any, report: Report) -> Iterator[None]:
    """Pass the actors' reports on while the block runs, and once more after it."""
    import ray

    ended = Event()

    def pass_on() -> None:
        for part, (seen, complete) in ray.get(collector.take_reports.remote()).items():
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


class ReportCollector:
    """A Ray actor to which the encoding actors report what they begin and how far they are."""

    def __init__(self) -> None:
        self.begun: Counter[int] = Counter()
        self.reports: dict[int, tuple[int, bool]] = {}

    def begin(self, run: int) -> int:
        """Count a start of this run, one after each death; returns the number of starts so far."""
        self.begun[run] += 1
        return self.begun[run]

    def report(self, part: int, seen: int, complete: bool) -> None:
        self.reports[part] = seen, complete

    def take_reports(self) -> dict[int, tuple[int, bool]]:
        reports, self.reports = self.reports, {}
        return reports


class EncodingActor:
    """Runs the VQGAN on the GPU that Ray assigns, or on the CPU.

    `arguments` refers to the job and the VQGAN; relative paths start at `folder`. Only the call reports failures:
    an actor that fails in its constructor would be started again and again.
    """

    def __init__(self, arguments: list[Any], collector: Any, folder: str):
        self.arguments = arguments
        self.collector = collector
        self.folder = folder

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[Exception | None]]:
        """Encode the parts of one row that are not finished; returns one row with what went wrong, or None."""
        try:
            self.make([int(part) for part in rows["parts"][0]])
        except Exception as error:  # Ray would wrap it in an error of its own
            error.add_note(traceback.format_exc())
            return {"error": [error]}
        return {"error": [None]}

    def make(self, parts: Sequence[int]) -> None:
        import ray

        if ray.get(self.collector.begin.remote(parts[0])) > MAX_DEATHS:
            raise too_many_deaths(f"at parts {parts[0]} to {parts[-1]} of the source")
        job, vqgan = self.loaded
        make_parts(job, vqgan, [part for part in parts if not is_finished(job.out, job.parts[part])], self.report)

    def report(self, part: int, seen: int, complete: bool) -> None:
        import ray

        reported = self.collector.report.remote(part, seen, complete)
        if complete:
            ray.get(reported)  # before this call ends

    @cached_property
    def loaded(self) -> tuple[EncodingJob, VQGAN]:
        import ray

        os.chdir(self.folder)
        job, vqgan = ray.get(self.arguments[0])
        device = "cuda" if ray.get_gpu_ids() else "cpu"
        if device == "cpu":
            torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", 1))))
        return job, vqgan.to(device)
