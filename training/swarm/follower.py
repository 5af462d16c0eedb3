"""The other processes of a peer with several GPUs: they learn from batches of their own when rank 0 says so."""

import signal
import threading
from pathlib import Path

from dalle_lean.tokenizer import Tokenizer
from training.order import Position
from training.recipe import MemoryRecipe
from training.shard_set import ShardSet
from training.swarm.portion import Portion
from training.swarm.ranks import Order, Ranks
from training.swarm.settings import SwarmSettings


def follow(
    settings: SwarmSettings,
    shards: ShardSet,
    tokenizer: Tokenizer,
    ranks: Ranks,
    *,
    folder: Path,
    batch_size: int,
    memory: MemoryRecipe | None = None,
) -> None:
    """Do what rank 0's Peer says until it says stop; Ctrl+C is for it alone.

    Args:
        batch_size: samples of a batch of this rank, as many as each other's.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    portion = Portion(
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
    position = Position()
    with portion.batches() as batches:
        while True:
            order, step = ranks.listen()
            if order == Order.STOP:
                return
            if order == Order.TAKE_WEIGHTS:
                ranks.share(portion.model)
            elif order == Order.REMEMBER:
                portion.write_cursor(position)
            else:
                batch, position = next(batches)
                portion.learn_from(batch, step)
                if not portion.takes_own_steps:
                    portion.model.zero_grad(set_to_none=True)
