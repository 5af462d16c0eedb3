"""What a donor saves and measures, and what it does not wait for."""

import dataclasses
import math
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from dalle_lean.io.files import read_json, write_json
from tests.training.swarm.harness import TIMING, make_settings
from tests.training.swarm.host.conftest import STEPS
from training.data.loader import Batch
from training.run.recipe import ScheduleRecipe
from training.swarm.config import WireSection
from training.swarm.host import roles
from training.swarm.host.checkpointer import Checkpointer, heldout_batch
from training.swarm.host.checkpoints import Checkpoints, list_checkpoints
from training.swarm.host.host_config import HostConfig
from training.swarm.peer.gradient_worker import build_model

WITHOUT_STATISTICS = SimpleNamespace(
    latest_members=list, state_averager=SimpleNamespace(main_parameters=(), state_tensors=list)
)


@pytest.fixture
def heldout(settings):
    """10 samples, which is no multiple of SAMPLES_AT_ONCE."""
    config = build_model(settings).config
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1, config.text_vocab_size, (10, config.text_len), generator=generator)
    codes = torch.randint(config.image_vocab_size, (10, config.image_side**2), generator=generator)
    return Batch(text, codes)


def make_checkpointer(run, settings, heldout, notices, **options):
    checkpoints = Checkpoints(run, settings, HostConfig(ports={}), notices.append)
    return Checkpointer(checkpoints, heldout, **options)


def test_a_run_is_finished_only_once_its_last_state_is_written(run, settings):
    notices, waited = [], []
    (run / "checkpoints").write_text("in the way")

    def wait(seconds):
        assert not checkpointer.is_finished
        waited.append(seconds)
        if len(waited) == 3:
            (run / "checkpoints").unlink()
        return False

    checkpointer = make_checkpointer(run, settings, None, notices)
    checkpointer.close(STEPS, WITHOUT_STATISTICS, build_model(settings), wait)
    assert checkpointer.is_finished
    assert [checkpoint.step for checkpoint in list_checkpoints(run, pytest.fail)] == [STEPS]
    assert checkpointer.checkpoints.failed == len(notices) == 3
    assert all("it will be retried" in notice for notice in notices)


def test_who_ends_the_donor_does_not_wait_for_a_disk_that_stays_full(run, settings):
    (run / "checkpoints").write_text("in the way")
    checkpointer = make_checkpointer(run, settings, None, [])
    checkpointer.close(STEPS, WITHOUT_STATISTICS, build_model(settings), lambda _: True)
    assert not checkpointer.is_finished


def test_the_held_out_loss_is_the_mean_over_all_samples_at_once(run, settings, heldout):
    checkpointer = make_checkpointer(run, settings, heldout, [])
    whole = checkpointer.copy.measure(heldout)["heldout_loss"]
    assert checkpointer.measure(heldout) == pytest.approx(whole, rel=1e-6)


def test_a_run_can_go_back_to_the_weights_that_it_began_with(run, settings, heldout):
    checkpointer = make_checkpointer(run, settings, heldout, [])
    checkpointer.checkpoints.begin_with(build_model(settings))
    [first] = list_checkpoints(run, pytest.fail)
    assert math.isnan(first.heldout_loss)
    checkpointer.restore(build_model(settings))
    checkpointer.worker.join()
    [first] = list_checkpoints(run, pytest.fail)
    first.check()
    assert first.heldout_loss == pytest.approx(checkpointer.measure(heldout), rel=1e-6)
    checkpointer.judge(STEPS // 2, 1.2 * first.heldout_loss)
    assert checkpointer.go_back_to == first.step


def test_a_donor_that_is_to_end_measures_no_more_but_writes_its_state(run, settings, heldout):
    looks = iter([False, True])
    checkpointer = make_checkpointer(run, settings, heldout, [], stopped=lambda: next(looks))
    checkpointer.measure_and_save(STEPS // 2, save=True)
    [checkpoint] = list_checkpoints(run, pytest.fail)
    assert math.isnan(checkpoint.heldout_loss)
    checkpoint.check()


def test_a_state_whose_loss_cannot_be_measured_is_written_all_the_same(run, settings, heldout, monkeypatch):
    notices = []
    checkpointer = make_checkpointer(run, settings, heldout, notices)
    monkeypatch.setattr(checkpointer.copy, "measure", lambda _: 1 / 0)
    checkpointer.measure_and_save(STEPS // 2, save=True)
    [checkpoint] = list_checkpoints(run, pytest.fail)
    assert math.isnan(checkpoint.heldout_loss)
    [notice] = notices
    assert notice.startswith(f"the held-out loss of step {STEPS // 2} was not measured: ZeroDivisionError")


def test_held_out_samples_come_from_a_data_set_of_the_hub_without_dataset_json_too(shards, tmp_path, monkeypatch):
    settings = make_settings(tmp_path, shards, "tiny", WireSection(), TIMING, 8, {})
    of_folder = heldout_batch(settings, tmp_path / "tokenizer.json", pytest.fail)
    monkeypatch.setattr(
        "training.data.catalog.published_files", lambda name: tuple(map(str, sorted(shards.glob("*.parquet"))))
    )
    monkeypatch.setattr("training.data.catalog.read_file", missing)
    swarm = dataclasses.replace(settings.swarm, data="hf://datasets/owner/name")
    heldout = heldout_batch(dataclasses.replace(settings, swarm=swarm), tmp_path / "tokenizer.json", pytest.fail)
    assert len(heldout.text_ids) > 0
    assert all(torch.equal(part, other) for part, other in zip(heldout, of_folder, strict=True))


def missing(url):
    raise FileNotFoundError(url)


def test_a_donor_that_counts_steps_without_their_weights_saves_none_under_their_name(run, settings, monkeypatch):
    class Counting:
        """A donor's optimizer: restored at step 8, it counts 13 steps with the others and has their weights at 14."""

        def __init__(self):
            self.local_epoch, self.resyncs = 8, 0
            self.tracker = SimpleNamespace(global_epoch=8)
            self.state_averager = SimpleNamespace(state_epoch=8, main_parameters=(), state_tensors=list)

        def step(self, batch_size):
            self.local_epoch = {8: 13, 13: 14}[self.local_epoch]
            self.state_averager.state_epoch = {13: 8, 14: 14}[self.local_epoch]

        def latest_members(self):
            return []

        def shutdown(self):
            pass

    monkeypatch.setattr(roles, "swarm_optimizer", lambda *_, **__: optimizer)
    optimizer, rounds = Counting(), iter([False, False, True])
    settings = dataclasses.replace(settings, recipe=dataclasses.replace(settings.recipe, schedule=EVERY_STEP))
    checkpointer = make_checkpointer(run, settings, None, [])
    roles.run_donor(settings, None, lambda _: next(rounds), checkpointer=checkpointer, on_round=joined(checkpointer))
    assert [checkpoint.step for checkpoint in list_checkpoints(run, pytest.fail)] == [14]


def test_a_donor_reports_its_step_before_its_first_step_with_the_others(run, settings, monkeypatch):
    optimizer = SimpleNamespace(
        local_epoch=8, tracker=SimpleNamespace(global_epoch=8), state_averager=SimpleNamespace()
    )
    optimizer.shutdown = lambda: None
    monkeypatch.setattr(roles, "swarm_optimizer", lambda *_, **__: optimizer)
    seen = []
    roles.run_donor(settings, None, lambda _: True, on_round=lambda optimizer: seen.append(optimizer.local_epoch))
    assert seen == [8]


@pytest.mark.parametrize(("name", "away_s"), [("", 100.0), ("before-", 0.0)])
def test_a_donor_was_away_since_a_checkpoint_was_saved_unless_it_was_rolled_back(run, settings, name, away_s):
    checkpointer = make_checkpointer(run, settings, None, [])
    assert checkpointer.checkpoints.save(8, build_model(settings), [], math.nan)
    path = run / "checkpoints/step-000008/checkpoint.json"
    write_json(path, {**read_json(path), "saved_at": time.time() - 100.0, "run": name + settings.run_id})
    checkpointer.restore(build_model(settings))
    assert checkpointer.away_s == pytest.approx(away_s, abs=10.0)


EVERY_STEP = ScheduleRecipe(total_steps=STEPS, warmup_steps=0, checkpoint_every=1)


def joined(checkpointer):
    """Waits for the checkpointer's thread."""
    return lambda _: checkpointer.worker is None or checkpointer.worker.join()


def test_a_checkpoint_that_is_due_while_another_is_measured_is_taken_when_that_is_done(run, settings, heldout):
    notices, step = [], STEPS // 4
    schedule = dataclasses.replace(settings.recipe.schedule, checkpoint_every=step, heldout_every=0)
    recipe = dataclasses.replace(settings.recipe, schedule=schedule)
    checkpointer = make_checkpointer(run, dataclasses.replace(settings, recipe=recipe), heldout, notices)
    done = threading.Event()
    checkpointer.start_worker(done.wait)
    for _ in range(3):
        checkpointer.poll(step, WITHOUT_STATISTICS, build_model(settings))
    assert notices == [f"the checkpoint of step {step} waits for the measurement or checkpoint before it"]
    done.set()
    checkpointer.worker.join()
    checkpointer.poll(step + 1, WITHOUT_STATISTICS, build_model(settings))
    checkpointer.poll(step + 2, WITHOUT_STATISTICS, build_model(settings))
    checkpointer.worker.join()
    assert len(notices) == 1
    assert [checkpoint.step for checkpoint in list_checkpoints(run, pytest.fail)] == [step + 1]
