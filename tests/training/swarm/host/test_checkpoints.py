"""Checkpoints of a run: complete or absent, which are kept, and the rollback."""

import dataclasses
import fcntl
import itertools
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress

import pytest
import torch

from dalle_lean import load_model
from dalle_lean.errors import UserError
from dalle_lean.io.files import locked
from dalle_lean.vocabulary import Vocabulary
from tests.tiny import DALLE_FIELDS, tiny_dalle
from tests.training.swarm.host.small_run import make, run_program
from training.run.recipe import Recipe, ScheduleRecipe
from training.swarm.config import SwarmSection, SwarmSettings, read_settings, write_settings
from training.swarm.host.checkpoints import (
    LOCK,
    ROLLBACK,
    Checkpoints,
    begin_rollback,
    finish_rollback,
    is_intact,
    list_checkpoints,
    rollback,
    steps_to_keep,
    successor,
)
from training.swarm.host.host_config import HostConfig
from training.swarm.peer.gradient_worker import build_model

EVERY = 10
STATISTICS = [torch.arange(6.0), torch.arange(256, dtype=torch.uint8)]


@pytest.fixture
def settings():
    schedule = ScheduleRecipe(total_steps=995, warmup_steps=0, checkpoint_every=EVERY)
    return SwarmSettings(swarm=SwarmSection(name="emoji"), recipe=Recipe(model=DALLE_FIELDS, schedule=schedule))


@pytest.fixture
def notices():
    return []


@pytest.fixture
def checkpoints(run, settings, notices):
    return Checkpoints(run, settings, HostConfig(ports={}), notices.append)


@contextmanager
def full_disk(free_bytes):
    """Limit the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def steps(run, on_notice=None):
    return [checkpoint.step for checkpoint in list_checkpoints(run, on_notice or pytest.fail)]


def model_of(step):
    torch.manual_seed(step)
    model = tiny_dalle()
    for parameter in model.parameters():
        parameter.data.normal_()
    return model


def test_the_model_of_a_checkpoint_has_the_vocabulary_that_the_run_has(checkpoints, run):
    Vocabulary({"heart": 7}, 9).save(run / "vocabulary.json")
    assert checkpoints.save(EVERY, model_of(EVERY), STATISTICS, 1.0)
    assert Vocabulary.load(run / "checkpoints/step-000010/model/vocabulary.json") == Vocabulary({"heart": 7}, 9)
    assert steps(run) == [EVERY]


def test_a_checkpoint_brings_back_weights_and_statistics(checkpoints, run):
    assert checkpoints.save(20, model_of(20), STATISTICS, 3.5)
    restored = tiny_dalle()
    step, statistics = checkpoints.restore(restored)
    assert step == 20
    for have, saved in zip(
        [*restored.parameters(), *statistics], [*model_of(20).parameters(), *STATISTICS], strict=True
    ):
        assert torch.equal(have, saved)
    assert [checkpoint.heldout_loss for checkpoint in list_checkpoints(run, pytest.fail)] == [3.5]


def test_its_model_is_a_model_folder(checkpoints, run):
    checkpoints.save(20, model_of(20), STATISTICS, math.nan)
    model = load_model(run / "checkpoints/step-000020/model")
    assert torch.equal(next(model.parameters()), next(model_of(20).parameters()))


def test_a_run_without_checkpoints_has_nothing_to_restore(checkpoints):
    assert checkpoints.restore(tiny_dalle()) is None


def test_the_newest_five_are_kept_and_of_the_older_ones_every_tenth(checkpoints, run):
    for step in range(EVERY, 260, EVERY):
        assert checkpoints.is_due(step)
        assert checkpoints.save(step, tiny_dalle(), STATISTICS, math.nan)
    assert steps(run) == [10, 100, 200, 210, 220, 230, 240, 250]


@pytest.mark.parametrize("made", [[], [7], list(range(0, 1000, 7))])
def test_what_is_kept_grows_slowly_and_has_the_newest(made):
    kept = steps_to_keep(made, 7)
    assert kept <= set(made)
    assert set(made[-5:]) <= kept
    assert len(kept) <= 5 + len(made) / 10 + 1


@pytest.mark.parametrize(
    ("tried", "step", "due"),
    [(0, 9, False), (0, 10, True), (10, 19, False), (10, 21, True), (990, 995, True), (995, 995, False)],
)
def test_a_checkpoint_is_due_at_each_interval_even_where_the_exact_step_was_skipped(checkpoints, tried, step, due):
    checkpoints.last_attempt = tried
    assert checkpoints.is_due(step) is due


def test_a_full_disk_is_counted_and_said_and_leaves_what_was_there(checkpoints, run, notices):
    checkpoints.save(10, tiny_dalle(), STATISTICS, math.nan)
    for free_bytes in (0, 100, 5_000):
        with full_disk(free_bytes):
            assert not checkpoints.save(20, tiny_dalle(), STATISTICS, math.nan)
    assert checkpoints.failed == len(notices) == 3
    assert all("training goes on" in notice for notice in notices)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000010"]
    assert checkpoints.save(20, tiny_dalle(), STATISTICS, math.nan)


def test_a_killed_writer_leaves_no_half_checkpoint(checkpoints, run, settings, notices, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("training.swarm.host.checkpoints.os.rename", killed)
        patch.setattr("training.swarm.host.checkpoints.shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            checkpoints.save(10, tiny_dalle(), STATISTICS, math.nan)
    assert list((run / "checkpoints").iterdir())
    assert steps(run) == []
    Checkpoints(run, settings, HostConfig(ports={}), notices.append)
    assert not list((run / "checkpoints").iterdir())


def test_of_two_donors_one_writes_a_checkpoint_and_the_other_leaves_it_and_its_half_written_ones_alone(
    checkpoints, run, settings
):
    writing = run / "checkpoints/.step-000010.half.tmp"
    writing.mkdir(parents=True)
    with locked(run / LOCK):
        second = threading.Thread(
            target=lambda: made.append(Checkpoints(run, settings, HostConfig(ports={}), pytest.fail))
        )
        made = []
        second.start()
        second.join(0.3)
        assert not made
        assert writing.exists()
    second.join()
    assert checkpoints.save(10, model_of(1), STATISTICS, 1.0)
    assert made[0].save(10, model_of(2), STATISTICS, 2.0)
    assert [checkpoint.heldout_loss for checkpoint in list_checkpoints(run, pytest.fail)] == [1.0]


def test_after_a_donor_was_killed_while_it_wrote_the_other_one_writes(checkpoints, run):
    code = "import fcntl, sys; lock = open(sys.argv[1]); fcntl.flock(lock, fcntl.LOCK_EX); print(1); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-u", "-c", code, str(run / LOCK)], **pipes) as writer:
        assert writer.stdout.readline() == b"1\n"
        with open(run / LOCK) as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        writer.kill()
    assert checkpoints.save(10, model_of(1), STATISTICS, 1.0)
    assert steps(run) == [10]


@pytest.mark.parametrize("name", ["state.safetensors", "model/model.safetensors", "checkpoint.json"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(checkpoints, run, notices, name):
    for step in (10, 20):
        checkpoints.save(step, model_of(step), STATISTICS, math.nan)
    path = run / "checkpoints/step-000020" / name
    path.write_bytes(path.read_bytes()[:-9] + b"?" * 9)
    step, _ = checkpoints.restore(tiny_dalle())
    assert step == 10
    assert len(notices) == 1
    assert "step-000020" in notices[0]


@pytest.mark.parametrize("name", ["state.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("is_gone", [True, False])
def test_a_damaged_checkpoint_is_written_anew_when_the_run_comes_to_its_step_again(checkpoints, run, name, is_gone):
    checkpoints.save(10, model_of(1), STATISTICS, math.nan)
    path = run / "checkpoints/step-000010" / name
    path.unlink() if is_gone else path.write_bytes(b"?")
    assert checkpoints.save(10, model_of(2), STATISTICS, math.nan)
    [checkpoint] = list_checkpoints(run, pytest.fail)
    checkpoint.check()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000010"]


def test_checkpoints_of_another_run_are_refused(checkpoints, run, settings):
    checkpoints.save(10, tiny_dalle(), STATISTICS, math.nan)
    other = dataclasses.replace(settings, swarm=dataclasses.replace(settings.swarm, data_fingerprint="f" * 64))
    with pytest.raises(ValueError, match="to another run"):
        Checkpoints(run, other, HostConfig(ports={}), pytest.fail).restore(tiny_dalle())


def test_a_run_taken_back_goes_on_under_another_run_id_from_that_step(checkpoints, run, settings):
    for step in (10, 20, 30):
        checkpoints.save(step, model_of(step), STATISTICS, math.nan)
    back = rollback(run, 20)
    assert back == read_settings(run)
    assert back.run_id != settings.run_id
    assert not back.differences(settings)
    assert steps(run) == [10, 20]
    assert (run / "checkpoints/given-up-emoji/step-000030/checkpoint.json").exists()
    step, _ = Checkpoints(run, back, HostConfig(ports={}), pytest.fail).restore(tiny_dalle())
    assert step == 20


def test_a_rollback_that_was_killed_half_way_is_finished_by_the_same_command(checkpoints, run, monkeypatch):
    for step in (10, 20):
        checkpoints.save(step, model_of(step), STATISTICS, math.nan)
    with monkeypatch.context() as patch:
        patch.setattr("training.swarm.host.checkpoints.write_settings", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rollback(run, 10)
    assert rollback(run, 10).swarm.name == "emoji-back1"
    assert steps(run) == [10]


def test_a_run_goes_back_to_sound_checkpoints_only(checkpoints, run, settings):
    checkpoints.save(10, tiny_dalle(), STATISTICS, math.nan)
    with pytest.raises(ValueError, match="no checkpoint of step 11; it has 10"):
        rollback(run, 11)
    (run / "checkpoints/step-000010/state.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="damaged"):
        rollback(run, 10)
    assert read_settings(run) == settings


def test_names_count_how_often_a_run_went_back():
    assert [successor(SwarmSection(name=name)) for name in ("emoji", "emoji-back1", "emoji-back9")] == [
        "emoji-back1",
        "emoji-back2",
        "emoji-back10",
    ]
    assert {SwarmSection(name=name).first_name for name in ("emoji", "emoji-back1", "emoji-back10")} == {"emoji"}


def test_the_command_line_lists_checkpoints_and_takes_a_run_back(shards, tmp_path, capsys):
    folder = tmp_path / "my runs/run"
    settings = make(folder, shards)
    checkpoints = Checkpoints(folder, settings, HostConfig(ports={}), print)
    model = build_model(settings)
    for step, loss in ((3, 5.5), (6, math.nan)):
        checkpoints.save(step, model, [], loss)
    capsys.readouterr()
    assert run_program("rollback", str(folder)) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "step       3  held-out loss        5.5" in listed[0]
    assert "step       6  held-out loss          -" in listed[1]
    assert run_program("rollback", str(folder), "--to", "4") == 2
    assert "no checkpoint of step 4; it has 3, 6" in capsys.readouterr().err
    assert run_program("rollback", str(folder), "--to", "3") == 0
    assert f"goes on as run-back1: start it with dalle-lean host '{folder}'. " in capsys.readouterr().out
    again = make(folder, shards)
    assert again.swarm.name == "run-back1"
    assert again.swarm.addresses == settings.swarm.addresses


def test_where_no_checkpoint_can_be_loaded_the_run_does_not_begin_again(checkpoints, run):
    for step in (10, 20):
        checkpoints.save(step, tiny_dalle(), STATISTICS, math.nan)
        (run / f"checkpoints/step-0000{step}/state.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"none of the checkpoints in .* can be loaded"):
        checkpoints.restore(tiny_dalle())
    for step in (10, 20):
        (run / f"checkpoints/step-0000{step}/checkpoint.json").write_bytes(b"")
    with pytest.raises(UserError, match=r"none of the checkpoints in .* can be loaded"):
        checkpoints.restore(tiny_dalle())


def test_a_checkpoint_without_a_part_of_its_model_is_not_whole(checkpoints, run):
    Vocabulary({"heart": 7}, 9).save(run / "vocabulary.json")
    checkpoints.save(10, tiny_dalle(), STATISTICS, math.nan)
    (run / "checkpoints/step-000010/model/vocabulary.json").write_bytes(b"")
    assert not is_intact(run / "checkpoints/step-000010")


def test_a_vqgan_folder_that_is_gone_costs_the_checkpoint_and_not_the_donor(run, settings, notices):
    checkpoints = Checkpoints(run, settings, HostConfig(ports={}, vqgan=str(run / "moved")), notices.append)
    assert not checkpoints.save(10, tiny_dalle(), STATISTICS, math.nan)
    assert checkpoints.failed == 1
    assert "training goes on" in notices[0]


def test_a_rollback_whose_moves_a_kill_left_half_done_can_be_made_again(checkpoints, run):
    for step in (10, 20):
        checkpoints.save(step, tiny_dalle(), STATISTICS, math.nan)
    left = run / "checkpoints" / "given-up-emoji" / "step-000020"
    left.mkdir(parents=True)
    (left / "old").touch()
    write_settings(run / "swarm.toml", checkpoints.settings)
    rollback(run, 10)
    assert not (left / "old").exists()
    assert (left / "checkpoint.json").exists()


@contextmanager
def killed_at(number, monkeypatch):
    """Die before the file operation of this number, from 0; as after kill -9, none follows.

    Yields a list that stays empty if there are fewer operations.
    """
    begun, refused = itertools.count(), []

    class Killed(BaseException):
        pass

    def mortal(operate):
        def operation(*arguments, **options):
            if next(begun) >= number:
                refused.append(arguments)
                raise Killed
            return operate(*arguments, **options)

        return operation

    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "unlink"):
            patch.setattr(os, name, mortal(getattr(os, name)))
        with suppress(Killed):
            yield refused


def test_a_rollback_killed_between_any_file_operations_is_whole_after_the_hosts_next_start(
    shards, tmp_path, monkeypatch
):
    settings = make(tmp_path / "run", shards)
    checkpoints = Checkpoints(tmp_path / "run", settings, HostConfig(ports={}), print)
    for step in (3, 6, 9):
        checkpoints.save(step, build_model(settings), [], 5.5)
    found = []
    for number in itertools.count():
        folder = tmp_path / str(number) / "run"
        shutil.copytree(tmp_path / "run", folder)
        with killed_at(number, monkeypatch) as refused:
            rollback(folder, 3)
        settings = make(folder, shards)
        donor = Checkpoints(folder, settings, HostConfig(ports={}), pytest.fail)
        assert donor.restore(build_model(settings))[0] == steps(folder)[-1]
        set_aside = sorted(path.name for path in folder.glob("checkpoints/given-up-*/*"))
        found.append((settings.swarm.name, steps(folder), set_aside))
        assert not (folder / ROLLBACK).exists()
        if not refused:
            break
    untouched, whole = ("run", [3, 6, 9], []), ("run-back1", [3], ["step-000006", "step-000009"])
    assert found == sorted(found)  # untouched until the rollback is noted
    assert {str(state) for state in found} == {str(untouched), str(whole)}


def test_a_rollback_that_cannot_be_completed_says_so_until_another_step_is_chosen(checkpoints, run):
    for step in (10, 20, 30):
        checkpoints.save(step, tiny_dalle(), STATISTICS, math.nan)
    begin_rollback(run, 20)
    (run / "checkpoints/step-000020/state.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"damaged.*; choose another step with dalle-lean rollback"):
        finish_rollback(run, print)
    for damaged in ("{}", ""):
        (run / ROLLBACK).write_text(damaged)
        with pytest.raises(UserError, match=f"{ROLLBACK} .*; choose a step with dalle-lean rollback"):
            finish_rollback(run, print)
    rollback(run, 10)
    finish_rollback(run, pytest.fail)
    assert steps(run) == [10]
    assert read_settings(run).swarm.name == "emoji-back1"
