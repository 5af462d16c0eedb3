"""Many machines through Ray: an actor for each GPU, and parts for whichever is free.

The source and the output folder must be the same paths on every machine.
"""

import os
from collections.abc import Sequence
from itertools import count
from types import ModuleType
from typing import Any

from dalle_lean.require import require
from dalle_lean.vqgan import VQGAN
from preprocessing.desk import Desk
from preprocessing.pipeline import Job, Report, make_parts
from preprocessing.progress import is_finished

POLL_S = 0.5


def connect() -> ModuleType:
    """Join the cluster that RAY_ADDRESS or this machine names, else start one on this machine."""
    ray = require("ray", extra="ray")
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="error")
    return ray


def num_gpus() -> int:
    """GPUs of the cluster."""
    return int(connect().cluster_resources().get("GPU", 0))


def make_on_ray(job: Job, vqgan: VQGAN, parts: Sequence[int], report: Report, *, workers: int | None = None) -> None:
    """As `make_parts`, by `workers` actors, one for each GPU by default, else one for each machine.

    An actor that dies is replaced.
    """
    ray = connect()
    gpus = num_gpus()
    cpus = ray.cluster_resources().get("CPU", 1)
    workers = min(len(parts), workers or gpus or len(ray.nodes()))
    share = {"num_gpus": min(1, gpus / workers)} if gpus else {"num_cpus": max(1, cpus // workers)}
    desk = ray.remote(num_cpus=0)(SharedDesk).remote(list(parts))
    maker = ray.remote(**share)(Maker)
    arguments = ray.put((job, vqgan.cpu()))
    numbers = count()
    running: dict[Any, tuple[str, Any]] = {}
    failure: OSError | None = None

    def start() -> None:
        name, actor = f"maker {next(numbers)}", maker.remote()
        running[actor.make.remote(arguments, os.getcwd(), desk, name)] = name, actor

    try:
        for _ in range(workers):
            start()
        while running:
            done, _ = ray.wait(list(running), timeout=POLL_S)
            # After the wait: what ended has reported.
            for part, (seen, complete) in ray.get(desk.take_reports.remote()).items():
                report(part, seen, complete)
            for result in done:
                name, actor = running.pop(result)
                try:
                    ray.get(result)
                except ray.exceptions.RayTaskError as error:
                    if not isinstance(error.cause, OSError):
                        raise error.cause from None
                    failure = failure or error.cause  # the others can still finish their parts
                except ray.exceptions.RayError:
                    made = {part for part in parts if is_finished(job.out, job.source.parts[part])}
                    if ray.get(desk.give_back_unmade.remote(name, made)):
                        start()
                finally:
                    ray.kill(actor)
    finally:
        for actor in [desk, *(actor for _, actor in running.values())]:
            ray.kill(actor)
    if failure:
        raise failure


class SharedDesk(Desk):
    """The desk as an actor, which also collects the reports of the makers."""

    def __init__(self, parts: Sequence[int]):
        super().__init__(parts)
        self.reports: dict[int, tuple[int, bool]] = {}

    def report(self, part: int, seen: int, complete: bool) -> None:
        self.reports[part] = seen, complete

    def take_reports(self) -> dict[int, tuple[int, bool]]:
        reports, self.reports = self.reports, {}
        return reports

    def give_back_unmade(self, worker: str, made: set[int]) -> bool:
        return self.give_back(worker, made.__contains__)


class Maker:
    """Runs the VQGAN on the GPU that Ray gives it, or on the CPU."""

    def make(self, arguments: tuple[Job, VQGAN], folder: str, desk: Any, name: str) -> None:
        """Make parts until the desk has no more; `folder` is where relative paths begin."""
        import ray
        import torch

        os.chdir(folder)
        job, vqgan = arguments
        device = "cuda" if ray.get_gpu_ids() else "cpu"
        if device == "cpu":
            torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", 1))))
        parts = iter(lambda: ray.get(desk.next_part.remote(name)), None)

        def report(part: int, seen: int, complete: bool) -> None:
            said = desk.report.remote(part, seen, complete)
            if complete:
                ray.get(said)  # before this call ends

        make_parts(job, vqgan.to(device), parts, report)
