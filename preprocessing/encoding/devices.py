"""Several devices of one machine: a process for each, which takes the next part whenever it is free."""

import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from threading import Lock
from typing import cast

import torch

from dalle_lean.images.vqgan import VQGAN
from preprocessing.encoding.part_records import is_finished
from preprocessing.encoding.pipeline import EncodingJob, Report, make_parts
from preprocessing.encoding.work_queue import WorkQueue
from preprocessing.encoding.worker_process import Process


def make_on_devices(
    job: EncodingJob, vqgan: VQGAN, parts: Sequence[int], report: Report, *, devices: Sequence[str]
) -> None:
    """Like `make_parts`, with a process for each of `devices`; a process that dies is replaced."""
    queue = WorkQueue(parts)
    vqgan = vqgan.cpu()
    running: dict[Connection, tuple[str, Process]] = {}
    threads = max(1, torch.get_num_threads() // len(devices))

    def start(device: str) -> None:
        process = Process(serve, job, vqgan, device, threads)
        running[process.connection] = device, process

    failure: OSError | None = None
    try:
        for device in devices[: len(parts)]:
            start(device)
        while running:
            for connection in cast(list[Connection], wait(list(running))):
                device, process = running[connection]
                try:
                    message = connection.recv()
                    if message == "next part":
                        connection.send(queue.next_part(connection))
                except (EOFError, ConnectionError):
                    del running[connection]
                    process.kill()
                    if queue.worker_died(connection, lambda part: is_finished(job.out, job.parts[part])):
                        start(device)
                    continue
                match message:
                    case (part, seen, complete):
                        report(part, seen, complete)
                    case OSError():  # the others can still finish their parts
                        failure = failure or message
                    case Exception():
                        raise message
                    case "done":
                        del running[connection]
                        process.end()
    finally:
        for _, process in running.values():
            process.kill()
    if failure:
        raise failure


def serve(connection: Connection, job: EncodingJob, vqgan: VQGAN, device: str, threads: int) -> None:
    """What the process of a device does: ask for parts and encode them until there are no more."""
    torch.set_num_threads(threads)
    lock = Lock()  # another thread asks for parts

    def next_part() -> int | None:
        with lock:
            connection.send("next part")
            part: int | None = connection.recv()
            return part

    def report(part: int, seen: int, complete: bool) -> None:
        with lock:
            connection.send((part, seen, complete))

    try:
        make_parts(job, vqgan.to(device), iter(next_part, None), report)
    except Exception as error:
        error.add_note(traceback.format_exc())
        connection.send(error)  # fails, and so ends this process, if its parent is gone
    connection.send("done")
