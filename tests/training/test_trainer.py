import dataclasses
import json
import os
import shlex
import signal
import subprocess
import time

import pytest
import torch

from dalle_lean import Dalle, load_model
from dalle_lean.cli import main
from dalle_lean.errors import UserError
from dalle_lean.io.model_folder import check_parts
from tests.children import PROGRAM, start
from tests.training.runs import Killed, at_step, kill, losses, relabelled, saved_progress, weights
from training.data.loader import Batch
from training.run.checkpoint import NAME as CHECKPOINT
from training.run.checkpoint import has_checkpoint, save_checkpoint
from training.run.metrics import NAME as METRICS
from training.run.metrics import read_metrics
from training.run.progress import TrainingDiverged
from training.run.recipe import load_recipe
from training.step.learner import Learner
from training.trainer import DalleRun, train


@pytest.fixture(scope="module")
def uninterrupted(shards, tmp_path_factory):
    """The folder of a whole run."""
    out = tmp_path_factory.mktemp("whole")
    train(shards, out, load_recipe("tiny"))
    return out


def test_a_run_learns_and_leaves_a_model_folder_metrics_and_a_checkpoint(uninterrupted):
    steps = losses(uninterrupted)
    assert list(steps) == list(range(1, 13))
    measured = [line for line in read_metrics(uninterrupted / METRICS) if "heldout_loss" in line]
    assert [line["step"] for line in measured] == [4, 8, 12]
    assert measured[-1]["heldout_loss"] < measured[0]["heldout_loss"]
    assert measured[0]["heldout_image_bits"] == pytest.approx(measured[0]["heldout_image_nats"] / 0.6931, rel=1e-3)
    parts = {"model.safetensors", "tokenizer.json", "vocabulary.json"}
    assert set(check_parts(uninterrupted / "model")["parts"]) == parts
    assert list((uninterrupted / "tensorboard").glob("events*"))


@pytest.mark.parametrize("killed_after", [1, 3, 8, 11])
def test_a_run_killed_anywhere_ends_with_the_losses_and_weights_of_a_whole_one(
    shards, recipe, uninterrupted, tmp_path, killed_after
):
    with pytest.raises(Killed):
        train(shards, tmp_path, recipe, on_progress=at_step(killed_after, kill))
    train(shards, tmp_path, recipe)
    assert losses(tmp_path) == losses(uninterrupted)
    for name, value in weights(tmp_path).items():
        assert torch.equal(value, weights(uninterrupted)[name]), name


def test_a_checkpoint_of_an_earlier_program_is_continued(shards, recipe, tmp_path):
    with pytest.raises(Killed):
        train(shards, tmp_path, recipe, on_progress=at_step(6, kill))
    state = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    run = json.loads(state["run"])
    del state["scales"], state["progress"]["tokens"], state["progress"]["rescaled"]
    del run["model"]["ffn_activation"], run["data"]["caption_dropout"]
    torch.save({**state, "run": json.dumps(run)}, tmp_path / CHECKPOINT)
    assert train(shards, tmp_path, recipe).step == 12


def with_delayed(out, value):
    """Turn a checkpoint into one of an earlier program, whose optimizer had the option `delayed`."""
    state = torch.load(out / CHECKPOINT, weights_only=True)
    run = json.loads(state["run"])
    run["optimizer"]["delayed"] = value
    torch.save({**state, "run": json.dumps(run)}, out / CHECKPOINT)


def test_a_checkpoint_without_the_delayed_step_goes_on_and_one_with_it_is_refused(shards, recipe, tmp_path):
    with pytest.raises(Killed):
        train(shards, tmp_path, recipe, on_progress=at_step(6, kill))
    with_delayed(tmp_path, True)
    with pytest.raises(UserError, match=r"delayed = true, an option that is gone: leave it out, .* --init .*model"):
        train(shards, tmp_path, recipe)
    with_delayed(tmp_path, False)
    assert train(shards, tmp_path, recipe).step == 12


def with_an_old_position(out):
    """Turn a checkpoint's place in the data into one of an earlier program: passes and samples."""
    state = torch.load(out / CHECKPOINT, weights_only=True)
    state["progress"]["position"] = (0, 24)
    run = json.loads(state["run"])
    del run["data"]["shuffle_shards"]
    torch.save({**state, "run": json.dumps(run)}, out / CHECKPOINT)


def test_a_checkpoint_whose_order_of_the_data_is_not_known_any_more_is_refused(shards, recipe, tmp_path):
    with pytest.raises(Killed):
        train(shards, tmp_path, recipe, on_progress=at_step(6, kill))
    with_an_old_position(tmp_path)
    with pytest.raises(ValueError, match=r"run of an earlier version, .* --init .*model"):
        train(shards, tmp_path, recipe)


def test_a_finished_run_of_an_earlier_program_stays_finished(shards, recipe, tmp_path):
    train(shards, tmp_path, recipe)
    with_an_old_position(tmp_path)
    assert train(shards, tmp_path, recipe).step == 12


@pytest.mark.parametrize("killed_after", [4, 11])
def test_a_damaged_shard_is_named_counted_and_killed_beside_as_any_other(
    shards, recipe, tmp_path, killed_after, caplog
):
    data = relabelled(shards, tmp_path / "data")
    (data / "shard-00002.parquet").unlink()
    (data / "shard-00002.parquet").write_bytes((shards / "shard-00002.parquet").read_bytes()[:600])
    caplog.set_level("INFO", "training")
    notes = []
    train(data, tmp_path / "whole", recipe, on_progress=lambda *at: notes.append(at[2]))
    told = [line for line in caplog.messages if " weights in " not in line]
    assert told
    assert all("shard-00002.parquet is damaged" in line for line in told)
    assert "damaged shards skipped" in notes[-1]
    counted = [
        line["damaged_shards"] for line in read_metrics(tmp_path / "whole" / METRICS) if "damaged_shards" in line
    ]
    assert counted == list(range(1, counted[-1] + 1))

    with pytest.raises(Killed):
        train(data, tmp_path / "again", recipe, on_progress=at_step(killed_after, kill))
    train(data, tmp_path / "again", recipe)
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    again = [line["damaged_shards"] for line in read_metrics(tmp_path / "again" / METRICS) if "damaged_shards" in line]
    assert again == counted


@pytest.mark.parametrize("step", [3, 12])
def test_a_kill_between_model_and_checkpoint_loses_nothing(shards, recipe, uninterrupted, tmp_path, monkeypatch, step):
    def killed_before_saving(out, *, progress, **parts):
        if progress["step"] == step:
            raise Killed
        save_checkpoint(out, progress=progress, **parts)

    monkeypatch.setattr("training.run.loop.save_checkpoint", killed_before_saving)
    with pytest.raises(Killed):
        train(shards, tmp_path, recipe)
    monkeypatch.undo()
    check_parts(tmp_path / "model")
    assert has_checkpoint(tmp_path) == (step > 3)
    train(shards, tmp_path, recipe)
    assert losses(tmp_path) == losses(uninterrupted)
    assert all(torch.equal(value, weights(uninterrupted)[name]) for name, value in weights(tmp_path).items())


class Started:
    """`dalle-lean train` as a process."""

    def __init__(self, shards, out, steps):
        self.command = ["train", str(shards), str(out), "--config", "tiny", "--steps", str(steps), "--device", "cpu"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.process = start([*PROGRAM, *self.command], stderr=subprocess.PIPE, env=environment, text=True)
        self.out = out

    def end_by(self, number):
        """Send it a signal after some steps; its exit code and what it said."""
        with self.process as process:
            try:
                while len(read_metrics(self.out / METRICS)) < 8:
                    assert process.poll() is None, process.stderr.read()
                    time.sleep(0.01)
                process.send_signal(number)
                said = process.communicate(timeout=240)[1]
            finally:
                process.kill()
        return process.returncode, said


@pytest.mark.long
def test_a_process_killed_with_signal_9_continues_with_the_same_command(shards, recipe, tmp_path):
    started = Started(shards, tmp_path / "killed", 20)
    assert started.end_by(signal.SIGKILL)[0] == -signal.SIGKILL
    train(shards, tmp_path / "whole", recipe.override(steps=20))
    with pytest.raises(SystemExit) as end:
        main(started.command)
    assert end.value.code == 0
    assert len(losses(tmp_path / "killed")) == 20
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.long
def test_sigterm_saves_the_step_it_comes_in_and_says_how_to_go_on(shards, tmp_path):
    started = Started(shards, tmp_path / "ended", 10_000)
    code, said = started.end_by(signal.SIGTERM)
    assert code == 143
    assert said.endswith(f"what was finished is saved. To go on: dalle-lean {shlex.join(started.command)}\n")
    assert saved_progress(tmp_path / "ended")["step"] == max(losses(tmp_path / "ended"))


def test_control_c_saves_the_step_it_interrupts(shards, recipe, uninterrupted, tmp_path, caplog):
    caplog.set_level("INFO", "training")
    before = signal.getsignal(signal.SIGINT)

    def press():
        os.kill(os.getpid(), signal.SIGINT)
        while len(caplog.messages) < 2:  # it comes at once, before the step is saved
            assert saved_progress(tmp_path)["step"] == 3

    with pytest.raises(KeyboardInterrupt):
        train(shards, tmp_path, recipe, on_progress=at_step(5, press))
    answer = "finishing this step, then saving ... (Ctrl+C again stops at once)"
    assert caplog.messages[1:] == [answer, f"saved in {tmp_path}: step 5/12; the same command continues"]
    assert saved_progress(tmp_path)["step"] == 5
    assert signal.getsignal(signal.SIGINT) is before
    train(shards, tmp_path, recipe)
    assert losses(tmp_path) == losses(uninterrupted)


@pytest.mark.parametrize("computed", ["bf16", "fp32"])
def test_a_run_says_what_it_trains_and_where(shards, recipe, tmp_path, caplog, monkeypatch, computed):
    monkeypatch.setattr("training.trainer.effective_precision", lambda device, precision: computed)
    caplog.set_level("INFO", "training")
    train(shards, tmp_path, recipe.override(steps=1))
    size = sum(parameter.numel() for parameter in load_model(tmp_path / "model").parameters())
    assert caplog.messages == [
        f"training {size:,} weights in {computed} on cpu, {recipe.data.batch_size} samples a step"
    ]


def test_a_finished_run_stays_as_it_is(shards, recipe, uninterrupted):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")}
    assert train(shards, uninterrupted, recipe).step == 12
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")} == before


def test_a_finished_run_says_so_without_reading_the_data_again(shards, recipe, tmp_path, caplog):
    train(relabelled(shards, tmp_path / "data"), tmp_path / "out", recipe)
    for shard in (tmp_path / "data").glob("*.parquet"):
        shard.unlink()
        shard.write_bytes(b"unreadable")
    caplog.set_level("INFO", "training")
    caplog.clear()
    assert train(tmp_path / "data", tmp_path / "out", recipe).step == 12
    assert caplog.messages == ["already finished at step 12"]


def test_another_run_is_refused_in_the_same_folder(shards, recipe, uninterrupted):
    with pytest.raises(ValueError, match=r"another run \(seed was 0, now 5\): give the --config, options and data"):
        train(shards, uninterrupted, recipe.override(seed=5))


def spoil(run, steps):
    """Turn the gradient of one weight into NaN in the given steps, as an overflow would."""
    run.model.norm.weight.register_hook(
        lambda gradient: torch.where(torch.tensor(run.progress.step + 1 in steps), torch.nan, gradient)
    )


def test_steps_with_nan_gradients_are_skipped_counted_and_said(shards, recipe, tmp_path):
    run = DalleRun(shards, tmp_path, recipe)
    spoil(run, {4, 5, 9})
    notes = []
    run.run(lambda done, total, note: notes.append(note))
    assert run.progress.skipped == 3
    assert "3 steps skipped" in notes[-1]
    assert sorted(losses(tmp_path)) == [1, 2, 3, 6, 7, 8, 10, 11, 12]
    assert [line["step"] for line in read_metrics(tmp_path / METRICS) if "skipped" in line] == [4, 5, 9]
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


def test_a_skipped_step_changes_neither_weights_nor_statistics(shards, recipe, tmp_path):
    run = DalleRun(shards, tmp_path, recipe)
    batch, _ = next(run.batches())
    run.learner.step(batch, 0.01)
    before = [tensor.clone() for tensor in everything(run)]
    run.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    norm = run.learner.step(batch, 0.01).grad_norm
    assert not torch.tensor(norm).isfinite()
    assert all(torch.equal(old, new) for old, new in zip(before, everything(run), strict=True))


def everything(run):
    statistics = [value for state in run.learner.optimizer.state.values() for value in state.values()]
    return [*run.model.state_dict().values(), *(value for value in statistics if isinstance(value, torch.Tensor))]


def test_many_bad_steps_in_a_row_end_the_run_and_the_last_good_state_stays(shards, recipe, tmp_path):
    recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, max_skipped_in_row=5))
    run = DalleRun(shards, tmp_path, recipe)
    spoil(run, range(5, 100))
    with pytest.raises(TrainingDiverged, match=r"5 steps in a row .* state of step 3"):
        run.run()
    assert saved_progress(tmp_path)["step"] == 3
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_accumulated_gradients_are_those_of_the_whole_batch(recipe, micro_batches):
    whole, parts = learner(recipe), learner(recipe, micro_batches=micro_batches)
    loss, accumulated = whole.accumulate_gradient(random_batch()), parts.accumulate_gradient(random_batch())
    torch.testing.assert_close(accumulated, loss)
    for one, other in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_the_loss_that_is_trained_is_the_models_own(recipe):
    ours = learner(recipe)
    batch = random_batch()
    torch.testing.assert_close(ours.accumulate_gradient(batch), ours.model.loss(*batch))
    assert ours.measure(batch)["heldout_loss"] == pytest.approx(ours.model.loss(*batch).item(), rel=1e-5)


def test_the_gradient_is_clipped_to_its_norm(recipe):
    ours = learner(recipe)
    ours.clip_norm = 0.01
    norm = ours.step(random_batch(), lr=0.0).grad_norm
    assert norm > 0.1
    total = torch.stack([parameter.grad.norm() for parameter in ours.model.parameters()]).norm()
    assert float(total) == pytest.approx(0.01, rel=1e-3)


def test_bfloat16_trains_float32_weights_to_nearly_the_same_loss(recipe):
    ends = []
    for precision in ("fp32", "bf16"):
        ours = learner(recipe, precision=precision)
        ends.append([ours.step(random_batch(), 0.01).loss for _ in range(5)][-1])
        assert all(parameter.dtype == torch.float32 for parameter in ours.model.parameters())
    assert ends[1] == pytest.approx(ends[0], rel=0.01)


@pytest.mark.slow
def test_a_compiled_model_has_the_same_gradient(recipe):
    plain, compiled = learner(recipe, activations="keep"), learner(recipe, activations="keep", compile=True)
    torch.testing.assert_close(compiled.accumulate_gradient(random_batch()), plain.accumulate_gradient(random_batch()))
    for one, other in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def learner(recipe, **memory):
    torch.manual_seed(0)
    recipe = dataclasses.replace(recipe, memory=dataclasses.replace(recipe.memory, **memory))
    model = Dalle(recipe.model_config(image_side=4, image_vocab_size=32, text_vocab_size=300))
    return Learner(model, recipe)


def random_batch():
    generator = torch.Generator().manual_seed(1)
    text_ids = torch.randint(1, 300, (8, 12), generator=generator)
    return Batch(text_ids, torch.randint(0, 32, (8, 16), generator=generator))


def test_a_run_can_start_from_a_model_folder(shards, recipe, uninterrupted, tmp_path):
    run = DalleRun(shards, tmp_path, recipe, init=uninterrupted / "model")
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, weights(uninterrupted)[name]), name
    tokenizers = [json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, uninterrupted)]
    assert tokenizers[0] == tokenizers[1]


def test_a_run_whose_time_is_up_stops_saved_and_goes_on_with_the_same_command(
    shards, recipe, uninterrupted, tmp_path, clock
):
    end = train(shards, tmp_path, recipe, max_minutes=2, on_progress=at_step(5, lambda: clock.advance(120)))
    assert end.step == saved_progress(tmp_path)["step"] == 5
    assert check_parts(tmp_path / "model")
    assert train(shards, tmp_path, recipe, max_minutes=2).step == 12
    assert losses(tmp_path) == losses(uninterrupted)


def test_the_last_line_says_that_the_time_is_up(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("training.run.graceful_stop.TimeLimit.reached", lambda limit: limit.end_s is not None)
    with pytest.raises(SystemExit) as end:
        main(["train", str(shards), str(tmp_path / "run"), "--config", "tiny", "--device", "cpu", "--max-minutes", "9"])
    assert end.value.code == 0
    last = " ".join(capsys.readouterr().out.split())
    assert last.endswith(
        f"the time is up, and the same command continues from here; so far the model is in {tmp_path / 'run' / 'model'}"
    )


def test_time_that_is_none_is_refused(shards, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", str(shards), str(tmp_path / "run"), "--config", "tiny", "--device", "cpu", "--max-minutes", "0"])
    assert end.value.code == 2
    assert "max_minutes=0.0: must be above 0" in capsys.readouterr().err
