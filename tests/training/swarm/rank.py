"""One process of a machine with several: the first is a swarm of one, the others follow it.

python -m tests.training.swarm.rank FOLDER STEPS
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from dalle_lean.optim.parameter_groups import parameter_groups
from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import find_shards
from training.swarm.config import read_settings
from training.swarm.network.dht import log_to, open_dht
from training.swarm.network.orphan_reaper import guard_children
from training.swarm.peer.gradient_worker import Work, open_peer, run_rank
from training.swarm.peer.trainer import Peer


class ToldPeer(Peer):
    """Records the schedule's steps that it has learnt from."""

    def learn_from(self, batch, step):
        self.learnt.append(step)
        return super().learn_from(batch, step)


def main(folder: Path, steps: int) -> None:
    """Save the parameters to rank0.npy, and rank 0's record to rank0.json."""
    torch.set_num_threads(1)
    settings = read_settings(folder / "swarm.toml")
    shards, tokenizer = find_shards(settings.swarm.data), Tokenizer.from_file(folder / "tokenizer.json")
    place = folder / "place"
    place.mkdir(exist_ok=True)
    processes = open_peer("cpu")
    if processes.first:
        guard_children()
        log_to(folder / "log")
        dht = open_dht([], client_mode=False, listen=["/ip4/127.0.0.1/tcp/0"])
        processes.from_first(Work(folder, 4, settings.recipe.memory))
        options = {"batch_size": 4, "memory": settings.recipe.memory, "processes": processes}
        worker = ToldPeer(settings, dht, shards, tokenizer, folder=place, **options)
        worker.learnt = []
        worker.run()
        processes.from_first(None)
        told = {"peer": dht.peer_id.to_base58(), "learnt": worker.learnt, "samples": worker.metrics.samples}
        (folder / "rank0.json").write_text(json.dumps(told))
        dht.shutdown()
        groups = parameter_groups(worker.model, 0.0)
        values = torch.cat([parameter.detach().flatten() for group in groups for parameter in group["params"]])
        np.save(folder / "rank0.npy", values.numpy())
        processes.close()
    else:
        run_rank("cpu")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
