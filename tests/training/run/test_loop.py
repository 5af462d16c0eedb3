"""Steps are taken, measured, saved and finished when it is their turn."""

import math
import os
import signal

import pytest
import torch

from dalle_lean.ending import Terminated
from training.data.picture_batches import shuffled_batches
from training.run.checkpoint import has_checkpoint, load_checkpoint
from training.run.loop import TrainingRun
from training.run.loop_settings import LoopSettings
from training.run.metrics import read_metrics
from training.run.progress import StepCount, TrainingDiverged
from training.step.guarded_step import guarded_step

SETTINGS = {"batch_size": 2, "log_every": 2, "heldout_every": 3, "checkpoint_every": 4, "max_skipped_in_row": 3}


class NotedRun(TrainingRun):
    """Learns nothing, and notes what is done in order."""

    unit, identity = "pictures", {}

    def __init__(self, out, steps, take_step):
        self.out, self.result, self.take = out, out / "result", take_step
        self.settings = LoopSettings(**SETTINGS, steps=steps)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters())
        saved = load_checkpoint(out, model=self.model, optimizer=self.optimizer, run={})
        self.progress, self.done = StepCount(**(saved or {})), []

    def batches(self, stopping):
        return shuffled_batches(6, 2, 0, start=self.progress.step, steps=self.settings.steps)

    def step(self, step, batch):
        return self.take(step, batch)

    def evaluate(self):
        if self.due(self.settings.heldout_every):
            self.done.append(("measure", self.progress.step))

    def write_result(self):
        self.done.append(("result", self.progress.step))
        self.result.write_text("")


def run(out, steps, take_step=lambda step, rows: {"loss": 1.0 / step}):
    """Returns what was done, in order."""
    noted = NotedRun(out, steps, take_step)
    noted.run(lambda pictures, total, note: noted.done.append((pictures, total)))
    return noted.done


def state_of(out):
    model = torch.nn.Linear(1, 1)
    return load_checkpoint(out, model=model, optimizer=torch.optim.SGD(model.parameters()), run={})


def test_what_is_due_is_done_at_its_multiples_and_at_the_end(tmp_path):
    done = run(tmp_path, 5)
    assert [what for what in done if what[0] in ("measure", "result")] == [
        ("measure", 3),
        ("measure", 5),
        ("result", 5),
    ]
    assert [what for what in done if isinstance(what[0], int)] == [(pictures, 10) for pictures in (0, 2, 4, 6, 8, 10)]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [2, 4, 5]
    assert state_of(tmp_path)["step"] == 5


def test_nothing_is_saved_while_steps_are_skipped(tmp_path):
    assert run(tmp_path, 4, lambda step, rows: {"loss": math.nan if step == 4 else 1.0})[-1] == ("result", 4)
    assert not has_checkpoint(tmp_path)


def test_a_finished_run_is_left_as_it_is_and_its_result_written_again_only_where_it_is_lost(tmp_path, caplog):
    caplog.set_level("INFO", "training")
    run(tmp_path, 5)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run(tmp_path, 5) == []
    assert caplog.messages == ["already finished at step 5"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    (tmp_path / "result").unlink()
    assert run(tmp_path, 5) == [(10, 10), ("result", 5)]


def test_too_many_skipped_steps_end_the_run_without_a_result(tmp_path):
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row .* until step 6"):
        run(tmp_path, 9, lambda step, rows: {"loss": 1.0 if step < 4 else math.inf})


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_more_threads_than_cores_are_warned_of_in_one_line(tmp_path, monkeypatch, caplog, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5})
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    run(tmp_path, 1)
    assert [message for message in caplog.messages if "OMP_NUM_THREADS=2" in message] == caplog.messages
    assert len(caplog.messages) == (threads > 2)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_ends_the_steps_once_the_present_one_is_saved(tmp_path, number, error, caplog):
    caplog.set_level("INFO", "training")

    def take_step(step, rows):
        if step == 3:
            os.kill(os.getpid(), number)
        return {"loss": 1.0 / step}

    before = signal.getsignal(number)
    with pytest.raises(error):
        run(tmp_path, 9, take_step)
    assert state_of(tmp_path)["step"] == 3
    assert signal.getsignal(number) is before
    assert caplog.messages[-1] == f"saved in {tmp_path}: step 3/9; the same command continues"
    run(tmp_path, 9)
    assert caplog.messages[-1] == "continuing from step 3/9"


def test_where_every_step_was_skipped_nothing_is_said_to_be_saved(tmp_path, caplog):
    caplog.set_level("INFO", "training")

    def take_step(step, rows):
        os.kill(os.getpid(), signal.SIGINT)
        return {"loss": math.nan}

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 9, take_step)
    assert caplog.messages[-1] == f"saved in {tmp_path}: nothing yet; the same command continues"


def test_a_signal_in_the_last_step_leaves_nothing_to_continue(tmp_path, caplog):
    caplog.set_level("INFO", "training")

    def take_step(step, rows):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": 1.0}

    with pytest.raises(Terminated):
        run(tmp_path, 3, take_step)
    assert state_of(tmp_path)["step"] == 3
    assert not any("continues" in message for message in caplog.messages)


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
