"""What tests of the trainer do with a run and read from its folder."""

import json

import torch

from dalle_lean import load_model
from training.run.checkpoint import NAME as CHECKPOINT
from training.run.metrics import NAME as METRICS
from training.run.metrics import read_metrics


def losses(out):
    """The loss of each step, and that no step was written twice."""
    lines = [line for line in read_metrics(out / METRICS) if "loss" in line]
    steps = {line["step"]: line["loss"] for line in lines}
    assert len(steps) == len(lines)
    return steps


def weights(out):
    return load_model(out / "model").state_dict()


class Killed(Exception):
    pass


def at_step(step, action):
    """An on_progress that acts after a step (batches of 8)."""

    def on_progress(done, total, note):
        if done == step * 8:
            action()

    return on_progress


def kill():
    raise Killed


def saved_progress(out):
    return torch.load(out / CHECKPOINT, weights_only=True)["progress"]


def relabelled(shards, folder, **changes):
    """The same shards with other words in their dataset.json."""
    folder.mkdir()
    for shard in shards.glob("*.parquet"):
        (folder / shard.name).hardlink_to(shard)
    info = json.loads((shards / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps({**info, **changes}))
    return folder
