"""The other processes of a peer with several GPUs: they learn from their own batches on rank 0's command."""

import dataclasses
import json
import signal
import threading
from pathlib import Path
from typing import Any

from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import find_shards
from training.data.sampler import Position
from training.run.recipe import MemoryRecipe
from training.swarm.config import read_settings
from training.swarm.network.bootstrap_service import TOKENIZER
from training.swarm.peer.data_parallel import RankCommand, Ranks, open_ranks
from training.swarm.peer.gradient_worker import GradientWorker
from training.swarm.preflight.checks import codes_of


def send_work(ranks: Ranks, folder: Path, data: str, batch_size: int, memory: MemoryRecipe) -> None:
    """On rank 0: tell the others what they work on, before the Peer is made."""
    work = {"folder": str(folder), "data": data, "batch_size": batch_size, "memory": dataclasses.asdict(memory)}
    ranks.broadcast_text(json.dumps(work))


def end_work(ranks: Ranks) -> None:
    """On rank 0: let the others end."""
    ranks.broadcast_text(json.dumps(None))


def follow(device: str) -> None:
    """On the others: work until rank 0 has no more work."""
    ranks = open_ranks(device)
    assert ranks is not None
    while (work := json.loads(ranks.broadcast_text(None))) is not None:
        folder = Path(work["folder"])
        settings = read_settings(folder)
        shards = find_shards(work["data"], codes=codes_of(settings))
        tokenizer = Tokenizer.from_file(folder / TOKENIZER)
        options: dict[str, Any] = {"batch_size": work["batch_size"], "memory": MemoryRecipe(**work["memory"])}
        obey(GradientWorker(settings, shards, tokenizer, identity=None, folder=folder, ranks=ranks, **options), ranks)
    ranks.close()


def obey(worker: GradientWorker, ranks: Ranks) -> None:
    """Follow the commands of rank 0's Peer until it says stop; it alone handles Ctrl+C and SIGTERM."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    position = Position()
    with worker.batches() as batches:
        while True:
            command, step = ranks.receive()
            if command == RankCommand.STOP:
                return
            if command == RankCommand.RECEIVE_WEIGHTS:
                ranks.broadcast(worker.model)
            elif command == RankCommand.SAVE_CURSOR:
                worker.write_cursor(position)
            else:
                batch, position = next(batches)
                worker.learn_from(batch, step)
                if not worker.has_inner_steps:
                    worker.model.zero_grad(set_to_none=True)
