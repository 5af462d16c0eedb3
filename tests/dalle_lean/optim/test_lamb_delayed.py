import multiprocessing
import threading

import pytest
import torch
from torch import nn

from dalle_lean.optim.lamb import Lamb, Update
from dalle_lean.optim.lamb_delayed import DelayedLamb
from training.run.checkpoint import load_checkpoint, save_checkpoint

LR = 0.05


class Bowl(nn.Module):
    """A matrix of 8-bit and a vector of float32 statistics, whose gradients depend on where they are."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(30, 40, generator=generator).to(dtype))
        self.vector = nn.Parameter(torch.randn(40, generator=generator).to(dtype))

    def backward(self, step):
        target = torch.sin(torch.arange(40.0) * (step + 1)).to(self.vector.dtype)
        ((self.matrix - target).square().sum() + (self.vector - target).square().sum()).backward()

    def values(self):
        return [parameter.detach().clone() for parameter in self.parameters()]


def lamb(model, **settings):
    return Lamb(model.parameters(), lr=LR, block_size=64, min_eight_bit_numel=100, **settings)


def run(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        model.backward(step)
        optimizer.step()


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


def late_by_one_step(model, optimizer, steps):
    """The slow, obvious twin: each gradient is taken at the weights of one step before."""
    seen = model.values()
    for step in steps:
        now = model.values()
        for parameter, value in zip(model.parameters(), seen, strict=True):
            parameter.data.copy_(value)
        optimizer.zero_grad()
        model.backward(step)
        for parameter, value in zip(model.parameters(), now, strict=True):
            parameter.data.copy_(value)
        seen = now
        optimizer.step()


def test_each_update_comes_one_step_late():
    delayed, twin = Bowl(), Bowl()
    optimizer = DelayedLamb(lamb(delayed))
    run(delayed, optimizer, range(7))
    optimizer.finish()
    late_by_one_step(twin, lamb(twin), range(7))
    assert equal(delayed, twin)
    in_time = Bowl()
    run(in_time, lamb(in_time), range(7))
    assert not equal(delayed, in_time)


def test_step_returns_while_the_arithmetic_runs_and_the_weights_stand_still(monkeypatch):
    may_go_on, real_run = threading.Event(), Update.run
    monkeypatch.setattr(Update, "run", lambda update: (may_go_on.wait(60), real_run(update)))
    model = Bowl()
    before = model.values()
    optimizer = DelayedLamb(lamb(model))
    run(model, optimizer, [0])
    assert not optimizer._running.done()
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(a, b) for a, b in zip(model.values(), before, strict=True))
    may_go_on.set()
    optimizer.finish()
    twin = Bowl()
    run(twin, lamb(twin), [0])
    assert equal(model, twin)


@pytest.mark.parametrize(
    ("dtype", "settings"), [(torch.float32, {}), (torch.bfloat16, {"master_weights": True}), (torch.bfloat16, {})]
)
def test_a_run_resumed_in_the_middle_of_a_step_goes_on_bit_for_bit(tmp_path, dtype, settings):
    whole, saved, loaded = Bowl(dtype), Bowl(dtype), Bowl(dtype)
    undisturbed = DelayedLamb(lamb(whole, **settings))
    run(whole, undisturbed, range(6))
    undisturbed.finish()

    optimizer = DelayedLamb(lamb(saved, **settings))
    run(saved, optimizer, range(3))
    save_checkpoint(tmp_path, model=saved, optimizer=optimizer, progress={"step": 3}, run={})
    resumed = DelayedLamb(lamb(loaded, **settings))
    assert load_checkpoint(tmp_path, model=loaded, optimizer=resumed, run={}) == {"step": 3}
    run(loaded, resumed, range(3, 6))
    resumed.finish()
    assert equal(loaded, whole)


def test_a_plain_optimizer_takes_over_from_a_delayed_one():
    model, twin = Bowl(), Bowl()
    delayed = DelayedLamb(lamb(model))
    run(model, delayed, range(2))
    optimizer = lamb(twin)
    optimizer.load_state_dict(delayed.state_dict())
    delayed.finish()
    optimizer.apply_pending()
    assert equal(model, twin)


def test_an_error_in_the_thread_is_raised_by_the_next_call_once():
    model = Bowl()
    before = model.values()
    optimizer = DelayedLamb(lamb(model))
    model.matrix.grad = torch.full((30, 40), float("nan"))
    optimizer.step()
    with pytest.raises(ValueError, match=r"parameter of shape \[30, 40\]: weights or gradients are not finite"):
        optimizer.step()
    optimizer.finish()
    assert all(torch.equal(a, b) for a, b in zip(model.values(), before, strict=True))


def test_a_delayed_step_that_fails_moves_the_tensors_before_the_error():
    model, twin = Bowl(), Bowl()
    optimizer = DelayedLamb(lamb(model))
    model.backward(0)
    model.vector.grad[0] = float("nan")
    optimizer.step()
    with pytest.raises(ValueError, match=r"parameter of shape \[40\]: weights or gradients are not finite"):
        optimizer.finish()
    optimizer.finish()
    assert torch.equal(model.vector, twin.vector)
    run(twin, lamb(twin), [0])
    assert torch.equal(model.matrix, twin.matrix)


@pytest.mark.parametrize(
    ("dtype", "settings"), [(torch.float32, {}), (torch.bfloat16, {"master_weights": True}), (torch.bfloat16, {})]
)
def test_weights_changed_from_outside_during_a_step_are_overwritten(dtype, settings):
    model, twin = Bowl(dtype), Bowl(dtype)
    optimizer = DelayedLamb(lamb(model, **settings))
    run(model, optimizer, [0])
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    optimizer.finish()
    run(twin, lamb(twin, **settings), [0])
    assert equal(model, twin)


def test_a_new_learning_rate_counts_from_the_next_step():
    model, twin = Bowl(), Bowl()
    optimizer, other = DelayedLamb(lamb(model)), lamb(twin)
    run(model, optimizer, [0])
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.finish()
    run(twin, other, [0])
    assert equal(model, twin)
    run(model, optimizer, [1])
    optimizer.finish()
    assert equal(model, twin)


def exit_code_of_fork(work, timeout_s=60):
    """Exit code of a forked process that does `work()`; None where it hangs."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(timeout_s)
    exit_code = process.exitcode
    process.kill()
    process.join()
    return exit_code


def test_a_forked_process_goes_on_where_its_parent_stood():
    model, twin = Bowl().share_memory(), Bowl()
    optimizer, other = DelayedLamb(lamb(model)), DelayedLamb(lamb(twin))
    run(model, optimizer, range(2))
    optimizer.wait()

    def go_on():
        run(model, optimizer, range(2, 4))
        optimizer.finish()

    assert exit_code_of_fork(go_on) == 0
    run(twin, other, range(4))
    other.finish()
    assert equal(model, twin)


def test_a_step_under_way_at_a_fork_is_an_error_in_the_child_and_ends_in_the_parent(monkeypatch):
    may_go_on, real_run = threading.Event(), Update.run
    monkeypatch.setattr(Update, "run", lambda update: (may_go_on.wait(60), real_run(update)))
    model, twin = Bowl(), Bowl()
    optimizer = DelayedLamb(lamb(model))
    run(model, optimizer, [0])

    def use():
        for call in (optimizer.step, optimizer.finish, optimizer.state_dict):
            with pytest.raises(RuntimeError, match=r"call finish\(\) before the fork"):
                call()

    assert exit_code_of_fork(use) == 0
    may_go_on.set()
    optimizer.finish()
    run(twin, lamb(twin), [0])
    assert equal(model, twin)
