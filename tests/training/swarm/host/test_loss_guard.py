"""A run whose held-out loss has risen is rolled back to its last good checkpoint, and names the latest members."""

import dataclasses
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.training.swarm.host.test_checkpointer import make_checkpointer
from training.swarm.averaging.aggregation_rules import RULES, TIGHTER, rule_of
from training.swarm.config import read_settings
from training.swarm.host import supervisor as host
from training.swarm.host.checkpointer import MAX_ROLLBACKS, MEASURED, LossGuard
from training.swarm.host.checkpoints import finish_rollback, list_checkpoints
from training.swarm.host.status import RunStatus
from training.swarm.peer.gradient_worker import build_model


def alarms(*losses):
    guard = LossGuard()
    return [number for number, loss in enumerate(losses) if guard.limit(loss) is not None]


@pytest.mark.parametrize(
    ("losses", "alarmed_at"),
    [
        ([6.6, 6.3, 6.0, 6.2, 6.4, 5.9], []),
        ([6.6, 6.3, 6.0, 6.7, 6.8, 5.9], [3, 4]),
        ([6.6, 270_000.0], [1]),
        ([6.6, math.nan, 6.5], []),
        ([6.0, *[6.5] * MEASURED, 7.0], []),
    ],
    ids=["noise", "training backwards", "garbage", "nothing measured", "a slow rise that is long ago"],
)
def test_a_loss_that_rises_too_far_is_noticed(losses, alarmed_at):
    assert alarms(*losses) == alarmed_at


@pytest.fixture
def spoilt(run, settings):
    """A checkpointer with checkpoints of steps 5, 10 and 15, of which the last is bad; and its notices."""
    notices = []
    checkpointer = make_checkpointer(run, settings, None, notices)
    checkpointer.members = ["Qm1 (20)", "Qm2 (3)"]
    for step, loss in ((5, 6.5), (10, 6.0), (15, 9.9)):
        checkpointer.checkpoints.save(step, build_model(settings), [], loss)
    return checkpointer, notices


def test_a_donor_asks_for_the_last_good_checkpoint_once_and_names_who_took_part(spoilt):
    checkpointer, notices = spoilt
    for step, loss in ((5, 6.5), (10, 6.0), (15, 9.9), (16, 10.5)):
        checkpointer.judge(step, loss)
    assert checkpointer.go_back_to == 10
    assert notices == [
        "the held-out loss of step 15 is 9.9, more than 6.6: rolling back to the checkpoint of step 10. "
        "Members of the latest steps: Qm1 (20), Qm2 (3)"
    ]


def test_a_damaged_checkpoint_is_nowhere_to_go_back_to(spoilt, run):
    checkpointer, _ = spoilt
    (run / "checkpoints/step-000010/state.safetensors").write_bytes(b"")
    for step, loss in ((10, 6.0), (15, 9.9)):
        checkpointer.judge(step, loss)
    assert checkpointer.go_back_to == 5


def test_a_run_that_goes_wrong_again_and_again_is_left_to_its_host(spoilt, settings):
    checkpointer, notices = spoilt
    named = dataclasses.replace(settings.swarm, name=f"emoji-back{MAX_ROLLBACKS}")
    checkpointer.settings = dataclasses.replace(settings, swarm=named)
    for step, loss in ((10, 6.0), (15, 9.9)):
        checkpointer.judge(step, loss)
    assert checkpointer.go_back_to is None
    assert notices[0].endswith("so the run needs your attention")


def test_all_go_back_under_another_name_with_tighter_clipping_and_the_bad_states_are_set_aside(
    spoilt, run, settings, monkeypatch
):
    asked, notices, began = iter([None, None, 10, 10, None, None]), [], []

    class Peers:
        host_config = SimpleNamespace(leading=[])
        all_up, polled = True, 0

        @property
        def go_back_to(self):
            return next(asked)

        @property
        def finished(self):
            return len(began) == 2 and self.polled > 0

        def poll(self):
            self.polled += 1

    @contextmanager
    def supervised(run_dir, **_):
        began.append(read_settings(run_dir).swarm.name)
        yield Peers()

    monkeypatch.setattr(host, "supervised", supervised)
    monkeypatch.setattr(host.RunStatus, "of_peers", classmethod(lambda *_: RunStatus()))
    monkeypatch.setattr(host, "POLL_S", 0.0)
    ready = []
    host.host_run(
        run, settings, on_ready=lambda: ready.append(1), on_progress=lambda *_: None, on_notice=notices.append
    )
    assert began == ["run", "run-back1"]
    assert [checkpoint.step for checkpoint in list_checkpoints(run, pytest.fail)] == [5, 10]
    assert notices == ["the run continues from step 10 as run-back1, with tighter clipping"]
    assert len(ready) == 1


def test_a_rollback_asked_for_is_made_at_the_next_start_if_the_host_is_ended_while_its_peers_leave(
    spoilt, run, settings, monkeypatch
):
    @contextmanager
    def supervised(*_, **__):
        yield SimpleNamespace(go_back_to=10, finished=False, poll=lambda: None)
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "supervised", supervised)
    with pytest.raises(KeyboardInterrupt):
        host.host_run(run, settings, on_ready=print, on_progress=print, on_notice=print)
    notices = []
    finish_rollback(run, notices.append)
    interrupted, done = notices
    assert interrupted == "the rollback to step 10 was interrupted; completing it"
    assert done == "the run continues from step 10 as run-back1"
    assert read_settings(run).swarm.name == "run-back1"
    assert [checkpoint.step for checkpoint in list_checkpoints(run, pytest.fail)] == [5, 10]


def test_clipping_is_tighter_after_a_rollback_and_other_rules_stay(settings):
    def rule(name, aggregation):
        wire = dataclasses.replace(settings.wire, aggregation=aggregation)
        swarm = dataclasses.replace(settings.swarm, name=name)
        return rule_of(dataclasses.replace(settings, wire=wire, swarm=swarm))

    assert rule("emoji", "centred_clipping") is RULES["centred_clipping"]
    assert rule("emoji-back1", "centred_clipping") is TIGHTER
    assert rule("emoji-back1", "median") is RULES["median"]
