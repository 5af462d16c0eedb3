"""Does the prompt page keep up with a crowd, lose nothing, mix nothing up and keep its memory flat?

    python -m benchmarks.page_load --people 20 --minutes 5 [--num-images 16] [--model FOLDER]

Starts the page in a process of its own, on the CPU. Each person draws prompts of their own, one after another, through
the endpoint, and compares every answer with what that prompt and seed give alone.
"""

import argparse
import hashlib
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradio_client import Client
from gradio_client.exceptions import AppError
from PIL import Image

from benchmarks.report import print_json, print_table
from inference import Generator
from inference.gallery import codes_sha256

PROMPTS = (
    "a red heart",
    "a green book",
    "a cat on an orange ground",
    "a slice of pizza",
    "a blue car",
)
DRAWINGS_EACH = 2
START_S = 120.0


@dataclass(frozen=True)
class Task:
    """A drawing, and the only right answer to it."""

    prompt: str
    seed: int
    num_images: int
    answer: str


@dataclass
class Tally:
    """What happened to the requests of all people."""

    latencies_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    mixed_up: int = 0
    busy: int = 0


def fingerprint(codes: Sequence[str], pixels: Sequence[bytes]) -> str:
    """Of the pictures, best first: their codes' hashes and their pixels."""
    return hashlib.sha256(b"".join(pixels) + "".join(codes).encode()).hexdigest()


def make_tasks(generator: Generator, person: int, num_images: int) -> list[Task]:
    """One person's drawings, each drawn alone first."""
    tasks = []
    for number in range(DRAWINGS_EACH):
        prompt, seed = PROMPTS[(person + number) % len(PROMPTS)], 1000 * person + number
        pictures = generator(prompt, num_images=num_images, best=min(4, num_images), seed=seed)
        answer = fingerprint(
            [codes_sha256(picture.codes) for picture in pictures], [picture.image.tobytes() for picture in pictures]
        )
        tasks.append(Task(prompt, seed, num_images, answer))
    return tasks


def ask(client: Client, task: Task) -> str:
    """The page's answer to a task."""
    best = min(4, task.num_images)
    asked = {"prompt": task.prompt, "num_images": task.num_images, "best": best, "seed": task.seed}
    pictures, facts = client.predict(**asked, api_name="/draw")
    pixels = [Image.open(picture["image"]).convert("RGB").tobytes() for picture in pictures]
    return fingerprint([one["codes_sha256"] for one in facts["pictures"]], pixels)


def draw_until(end_s: float, url: str, tasks: Sequence[Task], tally: Tally, folder: Path) -> None:
    """One person: their tasks again and again until the time is up; who is told the page is busy tries again."""
    client = Client(url, download_files=folder, verbose=False, analytics_enabled=False)
    for task in itertools.cycle(tasks):
        if time.monotonic() >= end_s:
            return
        started_s = time.monotonic()
        try:
            answer = ask(client, task)
        except AppError as error:
            if not str(error).startswith("busy"):
                tally.lost.append(str(error))
                continue
            tally.busy += 1
            time.sleep(1)
            continue
        except Exception as error:  # whatever the reason: the answer is lost, and that is what is counted
            tally.lost.append(f"{type(error).__name__}: {error}")
            time.sleep(1)
            continue
        tally.latencies_s.append(time.monotonic() - started_s)
        tally.mixed_up += answer != task.answer


def run_people(url: str, tasks: Sequence[Sequence[Task]], seconds: float) -> Tally:
    """All people at once for so many seconds; a drawing that was begun is waited for."""
    tally = Tally()
    end_s = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        people = [
            threading.Thread(target=draw_until, args=(end_s, url, own, tally, Path(folder) / str(number)))
            for number, own in enumerate(tasks)
        ]
        for person in people:
            person.start()
        for person in people:
            person.join()
    return tally


@contextmanager
def page_process(model: str | None, log: Path) -> Iterator[tuple[str, int]]:
    """The page's address and process id while it runs, on the CPU."""
    command = [sys.executable, "-c", "from dalle_lean.cli import main; main()", "demo", "--device", "cpu"]
    if model is not None:
        command += ["--model", model]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield wait_for_address(process, log), process.pid
    finally:
        process.terminate()
        process.wait(30)


def wait_for_address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """As the page says it; RuntimeError with all it said where it does not come up."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        if found := re.search(r"the prompt page is at (\S+)", log.read_text()):
            return found[1]
        time.sleep(0.2)
    raise RuntimeError(f"the page did not come up: {log.read_text()}")


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])


def watch_memory(pid: int, samples: list[int], stop: threading.Event, interval_s: float = 60.0) -> None:
    """Add the resident memory at the start and after each minute."""
    samples.append(rss_bytes(pid))
    while not stop.wait(interval_s):
        samples.append(rss_bytes(pid))


def figures(tally: Tally, memory_bytes: Sequence[int], seconds: float, people: int) -> dict[str, Any]:
    """What is reported."""
    times_s = sorted(tally.latencies_s)
    return {
        "people": people,
        "minutes": round(seconds / 60, 2),
        "requests": len(times_s) + len(tally.lost) + tally.busy,
        "answered": len(times_s),
        "latency_median_s": round(statistics.median(times_s), 2) if times_s else None,
        "latency_p95_s": round(times_s[int(0.95 * (len(times_s) - 1))], 2) if times_s else None,
        "lost": len(tally.lost),
        "mixed_up": tally.mixed_up,
        "refused_as_busy": tally.busy,
        "rss_mib": [round(sample / 2**20) for sample in memory_bytes],
    }


def main() -> None:
    """Draw everything alone, then all at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--num-images", type=int, default=16, help="candidates of each drawing")
    parser.add_argument("--model", help="model folder or hub id (default: the bundled one)")
    options = parser.parse_args()
    generator = Generator.from_folder(options.model, device="cpu")
    tasks = [make_tasks(generator, person, options.num_images) for person in range(options.people)]
    del generator
    memory_bytes: list[int] = []
    with tempfile.TemporaryDirectory() as folder, page_process(options.model, Path(folder) / "log") as (url, pid):
        stop = threading.Event()
        watcher = threading.Thread(target=watch_memory, args=(pid, memory_bytes, stop))
        watcher.start()
        started_s = time.monotonic()
        tally = run_people(url, tasks, 60 * options.minutes)
        seconds = time.monotonic() - started_s
        stop.set()
        watcher.join()
        memory_bytes.append(rss_bytes(pid))
    found = figures(tally, memory_bytes, seconds, options.people)
    print_table(("figure", "value"), list(found.items()))
    for reason in sorted(set(tally.lost)):
        print(f"lost: {reason}")
    print_json("page_load", {"num_images": options.num_images, **found})


if __name__ == "__main__":
    main()
