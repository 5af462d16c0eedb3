"""Steps are taken, measured, saved and finished when it is their turn."""

import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from dalle_lean.ending import Terminated
from training.run.checkpoint import has_checkpoint, load_checkpoint
from training.run.graceful_stop import TimeLimit
from training.run.metrics import read_metrics
from training.run.progress import StepCount, TrainingDiverged
from training.tokenizers.loop import guarded_step, shuffled_batches, take_steps

SCHEDULE = {"batch_size": 2, "log_every": 2, "heldout_every": 3, "checkpoint_every": 4, "max_skipped_in_row": 3}


def run(out, steps, take_step=lambda step, rows: {"loss": 1.0 / step}, **settings):
    """Returns what was done, in order."""
    done = []
    model = torch.nn.Linear(1, 1)
    progress = StepCount()

    def note(what):
        return lambda metrics: done.append((what, progress.step))

    schedule = SimpleNamespace(**{**SCHEDULE, "steps": steps, **settings})
    take_steps(
        out,
        schedule,
        shuffled_batches(6, schedule, 0, 0),
        take_step,
        measure=note("measure"),
        finish=note("finish"),
        progress=progress,
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        run={},
        limit=TimeLimit(None),
        on_progress=lambda pictures, total, note: done.append((pictures, total)),
    )
    return done


def state_of(out):
    model = torch.nn.Linear(1, 1)
    return load_checkpoint(out, model=model, optimizer=torch.optim.SGD(model.parameters()), run={})


def test_what_is_due_is_done_at_its_multiples_and_at_the_end(tmp_path):
    done = run(tmp_path, 5)
    assert [what for what in done if what[0] in ("measure", "finish")] == [
        ("measure", 3),
        ("measure", 5),
        ("finish", 5),
    ]
    assert [what for what in done if isinstance(what[0], int)] == [(pictures, 10) for pictures in (2, 4, 6, 8, 10)]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [2, 4, 5]
    assert state_of(tmp_path)["step"] == 5


def test_nothing_is_saved_while_steps_are_skipped(tmp_path):
    assert run(tmp_path, 4, lambda step, rows: {"loss": math.nan if step == 4 else 1.0})[-1] == ("finish", 4)
    assert not has_checkpoint(tmp_path)


def test_too_many_skipped_steps_end_the_run_without_a_result(tmp_path):
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row .* until step 6"):
        run(tmp_path, 9, lambda step, rows: {"loss": 1.0 if step < 4 else math.inf})


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_ends_the_steps_once_the_present_one_is_saved(tmp_path, number, error):
    def take_step(step, rows):
        if step == 3:
            os.kill(os.getpid(), number)
        return {"loss": 1.0 / step}

    before = signal.getsignal(number)
    with pytest.raises(error):
        run(tmp_path, 9, take_step)
    assert state_of(tmp_path)["step"] == 3
    assert signal.getsignal(number) is before


def test_sigterm_that_comes_twice_does_not_end_a_step_in_the_middle(tmp_path):
    def take_step(step, rows):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": 1.0}

    with pytest.raises(Terminated):
        run(tmp_path, 9, take_step)
    assert state_of(tmp_path)["step"] == 1


def linear(weight):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def test_a_step_goes_down_the_clipped_gradient_at_the_rate_given():
    model, optimizer = linear(3.0)
    numbers = guarded_step(model, optimizer, lambda: 5 * model(torch.ones(1, 1)).sum(), lr=0.5, clip_grad_norm=2.0)
    assert numbers == {"loss": 15.0, "grad_norm": 5.0, "lr": 0.5}
    assert model.weight.item() == pytest.approx(3.0 - 0.5 * 2.0)
    assert not model.training


def test_a_step_that_is_not_finite_puts_running_means_back():
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    guarded_step(model, optimizer, lambda: model(torch.randn(4, 2)).sum() * math.nan, lr=0.5, clip_grad_norm=2.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
