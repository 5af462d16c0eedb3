"""Does the prompt page serve a crowd without losing or mixing up answers, in constant memory?

    python -m benchmarks.page_load --people 20 --minutes 5 [--num-images 16] [--model FOLDER]

Starts the page in a process of its own, on the CPU. Each user draws their own prompts, one after another, through the
endpoint, and compares every answer with what the same prompt and seed give alone.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from gradio_client import Client
from gradio_client.exceptions import AppError
from PIL import Image

from benchmarks.crowd import Load, Person, run_crowd
from benchmarks.report import make_parser, print_json, print_table
from demo.service.scheduler import Busy
from inference import Generator
from inference.gallery import codes_sha256

PROMPTS = ("a red heart", "a green book", "a cat on an orange ground", "a slice of pizza", "a blue car")
REQUESTS_EACH = 2
START_S = 120.0
MEMORY_INTERVAL_S = 60.0


@dataclass(frozen=True)
class DrawRequest:
    """A drawing and its right answer."""

    prompt: str
    seed: int
    num_images: int
    answer: str


def fingerprint(codes: Sequence[str], pixels: Sequence[bytes]) -> str:
    """A hash of pictures, best first, from the hashes of their codes and their pixels."""
    return hashlib.sha256(b"".join(pixels) + "".join(codes).encode()).hexdigest()


def make_requests(generator: Generator, user: int, num_images: int) -> list[DrawRequest]:
    """One user's requests, each drawn alone first."""
    requests = []
    for number in range(REQUESTS_EACH):
        prompt, seed = PROMPTS[(user + number) % len(PROMPTS)], 1000 * user + number
        pictures = generator(prompt, num_images=num_images, best=min(4, num_images), seed=seed)
        codes = [codes_sha256(picture.codes) for picture in pictures]
        answer = fingerprint(codes, [picture.image.tobytes() for picture in pictures])
        requests.append(DrawRequest(prompt, seed, num_images, answer))
    return requests


def ask(client: Client, request: DrawRequest) -> str:
    """The fingerprint of the page's answer; Busy if the page turns the user away."""
    asked = {"prompt": request.prompt, "num_images": request.num_images, "seed": request.seed}
    try:
        pictures, facts = client.predict(**asked, best=min(4, request.num_images), api_name="/draw")
    except AppError as error:
        if str(error).startswith("busy"):
            raise Busy(0, 0, 1.0) from None
        raise
    pixels = [Image.open(picture["image"]).convert("RGB").tobytes() for picture in pictures]
    return fingerprint([one["codes_sha256"] for one in facts["pictures"]], pixels)


def make_person(url: str, requests: Sequence[DrawRequest], folder: Path) -> Person:
    """A user who repeats their requests."""
    client = Client(url, download_files=folder, verbose=False, analytics_enabled=False)

    def person(number: int) -> bool:
        request = requests[number % len(requests)]
        return ask(client, request) == request.answer

    return person


def run_users(url: str, requests: Sequence[Sequence[DrawRequest]], seconds: float) -> Load:
    """Let all users ask at once for `seconds` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        people = [make_person(url, each, Path(folder) / str(number)) for number, each in enumerate(requests)]
        return run_crowd(people, seconds)


@contextmanager
def page_process(model: str | None, log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run the page on the CPU; its address and process."""
    command = [sys.executable, "-c", "from dalle_lean.cli import main; main()", "demo", "--device", "cpu"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *(["--model", model] if model else [])], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield wait_for_address(process, log), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def wait_for_address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """The address that the page prints; RuntimeError with its output if it does not start."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        if found := re.search(r"the prompt page is at (\S+)", log.read_text()):
            return found[1]
        time.sleep(0.2)
    raise RuntimeError(f"the page did not start: {log.read_text()}")


def watch_memory(process: psutil.Process, samples: list[int], stop: threading.Event) -> None:
    """Record the resident bytes at the start, after each minute and at the end."""
    samples.append(process.memory_info().rss)
    while not stop.wait(MEMORY_INTERVAL_S):
        samples.append(process.memory_info().rss)
    samples.append(process.memory_info().rss)


def figures(result: Load, memory_bytes: Sequence[int], seconds: float, people: int) -> dict[str, Any]:
    """The figures to report."""
    answered = len(result.latencies_s)
    return {
        "people": people,
        "minutes": round(seconds / 60, 2),
        "requests": answered + len(result.lost) + result.busy,
        "answered": answered,
        "latency_median_s": result.latency_s(0.5),
        "latency_p95_s": result.latency_s(0.95),
        "lost": len(result.lost),
        "mixed_up": result.mixed_up,
        "refused_as_busy": result.busy,
        "rss_mib": [round(sample / 2**20) for sample in memory_bytes],
    }


def main() -> None:
    """Draw all requests alone, then all users' at once."""
    parser = make_parser(__doc__)
    parser.add_argument("--people", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--num-images", type=int, default=16, help="candidates of each drawing")
    parser.add_argument("--model", help="model folder or hub id (default: the bundled one)")
    options = parser.parse_args()
    generator = Generator.from_folder(options.model, device="cpu")
    requests = [make_requests(generator, user, options.num_images) for user in range(options.people)]
    del generator
    memory_bytes: list[int] = []
    with tempfile.TemporaryDirectory() as folder, page_process(options.model, Path(folder) / "log") as (url, process):
        stop = threading.Event()
        watcher = threading.Thread(target=watch_memory, args=(process, memory_bytes, stop))
        watcher.start()
        started_s = time.monotonic()
        result = run_users(url, requests, 60 * options.minutes)
        seconds = time.monotonic() - started_s
        stop.set()
        watcher.join()
    found = figures(result, memory_bytes, seconds, options.people)
    print_table(("figure", "value"), list(found.items()))
    for reason in sorted(set(result.lost)):
        print(f"lost: {reason}")
    print_json("page_load", {"num_images": options.num_images, **found})


if __name__ == "__main__":
    main()
