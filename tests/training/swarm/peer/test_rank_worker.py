"""Two processes learn from a peer's batches as one process would."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from dalle_lean.optim.parameter_groups import parameter_groups
from tests.training.conftest import write_shards
from tests.training.swarm.harness import TIMING, batches_of, make_settings
from training.run.processes import Processes
from training.swarm.config import WireSection, write_settings
from training.swarm.network.addresses import free_ports
from training.swarm.optimizer.build import lr_of_epoch, make_lamb
from training.swarm.peer import gradient_worker
from training.swarm.peer.gradient_worker import GradientWorker, Work, open_peer, run_rank

ROOT = Path(__file__).parents[4]
BATCH_SIZE, STEPS = 4, 3


def launch(folder, *arguments):
    """Rank 0 and rank 1 of tests/training/swarm/rank.py, as torchrun starts them."""
    [port] = free_ports(1)
    processes = []
    for rank in range(2):
        environment = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        }
        command = [sys.executable, "-m", "tests.training.swarm.rank", str(folder), str(STEPS), *arguments]
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


def run_folder(folder, wire):
    """A run of two processes with 4 samples each per step."""
    folder.mkdir(exist_ok=True)
    shards = write_shards(folder / "shards")
    schedule = {"total_steps": STEPS * wire.inner_steps, "warmup_steps": 2, "peak_lr": 1e-2}
    settings = make_settings(folder, shards, "tiny", wire, TIMING, 2 * BATCH_SIZE, schedule)
    write_settings(folder / "swarm.toml", settings)
    return settings


def learn_alone(settings, folder, peer, learnt):
    """The parameters of one process after the peer's batches, flat; `learnt` are the steps of the schedule."""
    one = GradientWorker(settings, batch_size=2 * BATCH_SIZE, memory=settings.recipe.memory)
    batches = batches_of(settings, folder, peer, 2 * BATCH_SIZE)
    groups = parameter_groups(one.model, settings.recipe.optimizer.weight_decay)
    lamb = make_lamb(settings, groups)
    for step in learnt:
        one.learn_from(next(batches), step)
        if not one.has_inner_steps:
            for group in lamb.param_groups:
                group["lr"] = lr_of_epoch(settings, step - 1)
            lamb.step()
            lamb.zero_grad()
    return torch.cat([parameter.detach().flatten() for group in groups for parameter in group["params"]]).numpy()


@pytest.mark.slow
@pytest.mark.swarm
@pytest.mark.parametrize(
    "wire",
    [
        WireSection(compression="fp32", delayed=False, inner_steps=1),
        WireSection(mode="diloco", compression="fp32", delayed=False, inner_steps=3, outer_lr=1.0, outer_momentum=0.0),
    ],
    ids=["gradients", "diloco"],
)
def test_two_processes_of_a_machine_learn_as_one(tmp_path, wire):
    settings = run_folder(tmp_path, wire)
    launch(tmp_path)
    told = json.loads((tmp_path / "rank0.json").read_text())
    expected = learn_alone(settings, tmp_path, told["peer"], told["learnt"])
    np.testing.assert_allclose(np.load(tmp_path / "rank0.npy"), expected, rtol=0, atol=1e-5)
    assert told["samples"] == 2 * BATCH_SIZE * len(told["learnt"])
    assert {path.name for path in tmp_path.glob("place/cursor*.json")} == {"cursor.json"}


def test_the_others_end_with_rank_0_even_where_it_builds_no_peer(tmp_path, monkeypatch):
    settings = run_folder(tmp_path, WireSection())
    told = [Work(tmp_path, BATCH_SIZE, settings.recipe.memory), None]
    processes = Processes()
    monkeypatch.setattr(Processes, "from_first", lambda self, value: told.pop(0))
    monkeypatch.setattr(gradient_worker, "open_peer", lambda device: processes)
    monkeypatch.setattr(gradient_worker, "leave_signals_to_first", lambda: None)
    run_rank("cpu")
    assert not told


def test_the_others_free_their_memory_while_rank_0_rejoins(tmp_path, monkeypatch):
    settings, alive = run_folder(tmp_path, WireSection()), []
    work = Work(tmp_path, BATCH_SIZE, settings.recipe.memory)
    told, workers = [work, "the run was rolled back", work, None], []

    def next_told(*_):
        alive.append(sum(worker() is not None for worker in workers))
        return told.pop(0)

    class Worker:
        def __init__(self, *_, **__):
            workers.append(weakref.ref(self))

    monkeypatch.setattr(Processes, "from_first", next_told)
    monkeypatch.setattr(gradient_worker, "GradientWorker", Worker)
    monkeypatch.setattr(gradient_worker, "leave_signals_to_first", lambda: None)
    run_rank("cpu")
    assert alive == [0, 1, 0, 1]


def test_processes_of_several_machines_are_not_one_peer(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="start torchrun separately on each machine"):
        open_peer("cpu")
