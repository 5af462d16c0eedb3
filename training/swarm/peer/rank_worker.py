"""The other processes of a peer with several GPUs: they learn from batches of their own when rank 0 says so."""

import signal
import threading
from pathlib import Path

from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import ShardSet
from training.data.sampler import Position
from training.run.recipe import MemoryRecipe
from training.swarm.config import SwarmSettings
from training.swarm.peer.data_parallel import RankCommand, Ranks
from training.swarm.peer.gradient_worker import GradientWorker


class RankWorker(GradientWorker):
    """A rank that does what rank 0's Peer says; the arguments are Portion's, except for what rank 0 knows."""

    ranks: Ranks

    def __init__(
        self,
        settings: SwarmSettings,
        shards: ShardSet,
        tokenizer: Tokenizer,
        *,
        folder: Path,
        batch_size: int,
        memory: MemoryRecipe | None = None,
        ranks: Ranks,
    ):
        super().__init__(
            settings,
            shards,
            tokenizer,
            identity=ranks.share_text(None),
            folder=folder,
            batch_size=batch_size,
            memory=memory,
            device=str(ranks.device),
            ranks=ranks,
        )

    def go(self) -> None:
        """Until rank 0 says stop; Ctrl+C and SIGTERM are for it alone."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        position = Position()
        with self.batches() as batches:
            while True:
                order, step = self.ranks.listen()
                if order == RankCommand.STOP:
                    return
                if order == RankCommand.TAKE_WEIGHTS:
                    self.ranks.share(self.model)
                elif order == RankCommand.REMEMBER:
                    self.write_cursor(position)
                else:
                    batch, position = next(batches)
                    self.learn_from(batch, step)
                    if not self.takes_own_steps:
                        self.model.zero_grad(set_to_none=True)
