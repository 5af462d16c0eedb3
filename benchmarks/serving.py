"""Does the engine scale, without losing or mixing up answers, in constant memory, and with little overhead?

    python -m benchmarks.serving [--model FOLDER] [--replicas 1 2 4] [--people 100] [--minutes 5] [--kill-interval-s 20]

Eight pictures take a fixed time, for which their scorer sleeps, so that a machine with two cores can run four replicas.
Users ask through the page's client, and compare every answer with what the same prompt and seed give alone.
"""

import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.crowd import Load, run_crowd
from benchmarks.report import make_parser, print_json, print_table
from demo.serve.client import RemoteService
from demo.serve.cluster import EngineSettings, engine_running
from demo.serve.drawer import UNIT
from demo.server import free_port
from inference import Generator
from inference.request import Request, Settings

SLOW, FAST = "benchmarks.slow_scorer:Slow", "benchmarks.slow_scorer:Fast"
PROMPTS = 5
CROWD_REPLICAS = 2
MEMORY_INTERVAL_S = 20.0


def make_request(unit_s: float, num_images: int, number: int) -> Request:
    """One of a few prompts, each unit of which takes `unit_s` seconds."""
    return Request(f"a red heart {unit_s} s", Settings(num_images=num_images, top_k=0, seed=number % PROMPTS))


def fingerprint(pictures: Sequence[Any]) -> list[Any]:
    """All that identifies a prompt's pictures."""
    return [(one.index, one.score, one.codes.tolist(), one.image.tobytes()) for one in pictures]


def run_people(service: RemoteService, people: int, seconds: float, asked: Sequence[Request], right: Any) -> Load:
    """Let everybody ask at once for `seconds` seconds, each beginning with another prompt."""

    def person(first: int, number: int) -> bool:
        place = (first + number) % len(asked)
        *_, done = service.draw(asked[place])
        return fingerprint(done.pictures) == right[place]

    return run_crowd([partial(person, first) for first in range(people)], seconds)


def processes(name: str) -> list[psutil.Process]:
    """The processes of a deployment that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # ended meanwhile, or a zombie
            if f":{name}" in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill_replicas(stop: threading.Event, kill_interval_s: float, memory: list[int], kills: list[float]) -> None:
    """Kill a replica every `kill_interval_s`, and record the memory of the front."""
    rng, started_s = random.Random(0), time.monotonic()
    last_s = started_s
    while not stop.wait(1.0):
        if kill_interval_s and time.monotonic() - last_s >= kill_interval_s:
            last_s = time.monotonic()
            if drawers := processes("Drawer"):
                os.kill(rng.choice(drawers).pid, signal.SIGKILL)
                kills.append(last_s)
        if len(memory) * MEMORY_INTERVAL_S <= time.monotonic() - started_s:
            memory.append(sum(process.memory_info().rss for process in processes("Front")))


def measure_scaling(folder: Path, counts: Sequence[int], seconds: float, unit_s: float) -> dict[str, Any]:
    """Units drawn per second by different numbers of replicas in steady state, and their share of the ideal."""
    found = {}
    for replicas in counts:
        with engine(folder, replicas, batch_size=UNIT) as service:
            asked = [make_request(unit_s, UNIT, number) for number in range(PROMPTS)]
            right = answers(folder, asked, replicas)
            # More people than a replica draws for at once: some always wait.
            load = run_people(service, 4 * replicas, seconds, asked, right)
            first, last = sorted(load.ended_s)[2 * replicas], sorted(load.ended_s)[-4 * replicas]
            count = len([end for end in load.ended_s if first < end <= last])
            assert not load.lost, load.lost
            assert not load.mixed_up
            found[replicas] = count / (last - first)
    return {
        "units_per_s": {number: round(rate, 3) for number, rate in found.items()},
        "of_ideal": {number: round(rate * unit_s / number, 3) for number, rate in found.items()},
    }


def measure_latency(folder: Path, repeats: int = 20) -> dict[str, Any]:
    """How long one prompt of eight pictures takes in this process and through the engine, in ms."""
    request = make_request(0, UNIT, 1)
    torch.set_num_threads(os.cpu_count() or 1)
    generator = Generator.from_folder(folder, "cpu", scorer=FAST)
    with engine(folder, 1, batch_size=UNIT) as service:
        here, there = [], []
        for _ in range(repeats):
            started_s = time.perf_counter()
            generator.run(request.prompt, request.settings)
            here.append(time.perf_counter() - started_s)
            started_s = time.perf_counter()
            list(service.draw(request))
            there.append(time.perf_counter() - started_s)
    medians = statistics.median(here), statistics.median(there)
    return {
        "alone_ms": round(1e3 * medians[0], 1),
        "engine_ms": round(1e3 * medians[1], 1),
        "added_ms": round(1e3 * (medians[1] - medians[0]), 1),
        "added_least_ms": round(1e3 * (min(there) - min(here)), 1),
    }


def answers(folder: Path, asked: Sequence[Request], replicas: int) -> list[Any]:
    """What each request gives alone, with as many threads as one of `replicas` has: more may round otherwise."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // replicas))
    generator = Generator.from_folder(folder, "cpu", scorer=FAST)
    return [fingerprint(generator.run(request.prompt, request.settings)) for request in asked]


@contextmanager
def engine(folder: Path, replicas: int, batch_size: int) -> Iterator[RemoteService]:
    """An engine on loopback, through the page's client."""
    port, metrics_port = free_port("127.0.0.1", 29000, 100), free_port("127.0.0.1", 29200, 100)
    settings = EngineSettings(
        replicas, port=port, metrics_port=metrics_port, device="cpu", scorer=SLOW, batch_size=batch_size
    )
    with engine_running(folder, settings):
        yield RemoteService(f"http://127.0.0.1:{port}")


def measure_load(folder: Path, people: int, seconds: float, kill_interval_s: float, unit_s: float) -> dict[str, Any]:
    """Serve a crowd while replicas are killed."""
    asked = [make_request(unit_s, 2 * UNIT, number) for number in range(PROMPTS)]
    right, memory, kills = answers(folder, asked, CROWD_REPLICAS), [], []
    with engine(folder, CROWD_REPLICAS, batch_size=2 * UNIT) as service:
        stop = threading.Event()
        watcher = threading.Thread(target=kill_replicas, args=(stop, kill_interval_s, memory, kills))
        watcher.start()
        load = run_people(service, people, seconds, asked, right)
        stop.set()
        watcher.join()
    return {
        "people": people,
        "minutes": round(seconds / 60, 2),
        "replicas_killed": len(kills),
        "answered": len(load.latencies_s),
        "lost": len(load.lost),
        "reasons": sorted(set(load.lost)),
        "mixed_up": load.mixed_up,
        "busy": load.busy,
        "latency_median_s": load.latency_s(0.5),
        "front_rss_mib": [round(one / 2**20) for one in memory],
    }


def main() -> None:
    """Measure scaling, latency, and a crowd."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, help="model folder (default: a tiny one with random weights)")
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--people", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--kill-interval-s", type=float, default=20.0)
    parser.add_argument(
        "--unit-s", type=float, default=2.0, help="time that eight pictures take (default: %(default)s)"
    )
    parser.add_argument("--only", choices=["scaling", "latency", "load"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = options.model
        if folder is None:
            from tests.inference.tiny_model import save_tiny_model

            folder = save_tiny_model(Path(place))
        found: dict[str, Any] = {}
        if options.only in (None, "scaling"):
            found |= measure_scaling(folder, options.replicas, 20 * options.unit_s, options.unit_s)
        if options.only in (None, "latency"):
            found |= measure_latency(folder)
        if options.only in (None, "load"):
            crowd = options.people, 60 * options.minutes, options.kill_interval_s
            found |= measure_load(folder, *crowd, unit_s=options.unit_s / 10)
    print_table(("figure", "value"), list(found.items()))
    print_json("serving", found)


if __name__ == "__main__":
    main()
