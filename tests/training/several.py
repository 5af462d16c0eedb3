"""Processes that train together, as torchrun starts them, in less time: forked once everything is imported.

python -m tests.training.several WORLD PORT FUNCTION [ARGUMENT ...]
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo  # before the fork, it takes long

from dalle_lean import Dalle, DalleConfig
from dalle_lean.io.safetensors_io import save_weights
from training.data.loader import Batch
from training.run.checkpoint import load_checkpoint, save_checkpoint
from training.run.processes import ALONE, open_processes
from training.run.recipe import MemoryRecipe, OptimizerRecipe, Recipe, load_recipe
from training.step.data_parallel import sharded, whole_model
from training.step.learner import Learner
from training.trainer import train

ROOT = Path(__file__).parents[2]
STEPS = 10
LAMB = OptimizerRecipe(eight_bit=False)
ADAMW = OptimizerRecipe(name="adamw")
PLANS = {
    "keep": {"activations": "keep"},
    "checkpoint": {"activations": "checkpoint", "samples": 1, "loss_tokens": 16},
    "reversible": {"activations": "reversible", "loss_tokens": 16},
}
CASES = {
    f"{parallel} {plan} {optimizer.name}": (parallel, plan, optimizer)
    for parallel in ("ddp", "fsdp")
    for plan in PLANS
    for optimizer in (LAMB, ADAMW)
}
QUICK = ["ddp reversible lamb", "fsdp checkpoint adamw"]


def run_together(world, function, *arguments, check=True, **options):
    """Runs a function of this file in `world` processes; returns what they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.training.several", str(world), str(port), function, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert not check or done.returncode == 0, done.stdout
    return done.stdout


def tiny_recipe(plan, optimizer):
    """A model with tied blocks and a batch of 8 in 4 parts, or 2 in each of two processes."""
    model = {
        "text_vocab_size": 11, "image_vocab_size": 13, "text_len": 5, "image_side": 2, "hidden_size": 16,
        "num_layers": 3, "num_heads": 2, "head_size": 8, "shared_blocks": 2, "reversible": plan == "reversible",
    }  # fmt: skip
    memory = MemoryRecipe(**PLANS[plan], offload_optimizer=False, micro_batches=4)
    recipe = Recipe(model=model, memory=memory, optimizer=optimizer)
    return replace(recipe, data=replace(recipe.data, batch_size=8))


def new_learner(recipe, processes, parallel, seed):
    torch.manual_seed(seed)
    model = Dalle(DalleConfig.from_dict(recipe.model))
    if parallel == "fsdp":
        model = sharded(model if processes.first else None, processes)
    return Learner(model, recipe.share_of(processes.world), processes)


def through_a_checkpoint(out, learner, *arguments):
    """Another learner, in the state of this one."""
    other = new_learner(*arguments, seed=1)
    processes = learner.processes
    save_checkpoint(out, model=learner.model, optimizer=learner.optimizer, progress={}, run={}, processes=processes)
    load_checkpoint(out, model=other.model, optimizer=other.optimizer, run={})
    return other


def learnt(recipe, processes=ALONE, parallel="ddp", out=None):
    """The weights after STEPS steps, half of them before a checkpoint if there is an `out`, and the losses."""
    learner = new_learner(recipe, processes, parallel, seed=0)
    config = learner.model.config
    draws = torch.Generator().manual_seed(1)
    losses = []
    for step in range(STEPS):
        if out is not None and step == STEPS // 2:
            learner = through_a_checkpoint(out, learner, recipe, processes, parallel)
        text_ids = torch.randint(config.text_vocab_size, (8, config.text_len), generator=draws)
        codes = torch.randint(config.image_vocab_size, (8, config.image_len), generator=draws)
        share = Batch(*processes.share((text_ids, codes) if processes.first else None))
        losses.append(learner.step(share, lr=0.01).loss)
    return whole_model(learner.model, processes).state_dict(), losses


def learn_all(folder, *names):
    """Writes the weights of each of the cases."""
    processes = open_processes("cpu")
    for name in names:
        parallel, plan, optimizer = CASES[name]
        weights, losses = learnt(tiny_recipe(plan, optimizer), processes, parallel, Path(folder) / name)
        if processes.first:
            save_weights({**weights, "losses": torch.tensor(losses)}, Path(folder) / f"{name}.safetensors", None)
    processes.close()


def train_recipe():
    """12 steps of 8 samples, saved every third."""
    recipe = load_recipe("tiny")
    return replace(recipe, memory=replace(recipe.memory, offload_optimizer=False), optimizer=LAMB)


def train_until_killed(shards, out, parallel, rank, step):
    """Trains; the process of that rank kills itself after a step, or in the midst of "saving" for the second time."""
    mine, saved, write = os.environ["RANK"] == rank, 0, torch.save

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def save(state, path):
        nonlocal saved
        saved += 1
        write(state, path)
        if mine and step == "saving" and saved == 2:
            os.truncate(path, os.path.getsize(path) // 2)
            kill()

    def on_progress(done, total, note):
        if mine and (done == 8 * int(step) if step != "saving" else rank != "0" and done == 48):
            kill()

    torch.save = save
    Path(out).mkdir(exist_ok=True)
    train(shards, Path(out), train_recipe(), parallel=parallel, on_progress=on_progress)


def main(world, port, function, *arguments):
    children = []
    for rank in range(world):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        children.append(multiprocessing.get_context("fork").Process(target=globals()[function], args=arguments))
        children[-1].start()
    for child in children:
        child.join()
    sys.exit(max(abs(child.exitcode) for child in children))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
