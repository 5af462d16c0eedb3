"""A run by invitation, from end to end: `host`, `invite`, `join`, `monitor` and `ban`, each as a process."""

import dataclasses
import re
import shutil
import signal

import pytest

from tests.training.swarm.harness import TIMING
from tests.training.swarm.host.small_run import ON_LOOPBACK, PATIENCE_S, Hosted, until
from training.run.recipe import load_recipe
from training.swarm.config import read_settings
from training.swarm.host.run_setup import make_run

pytestmark = [pytest.mark.swarm, pytest.mark.slow]


class People(Hosted):
    """A hosted run and its participants' processes, whose output lies in files of their names."""

    def __init__(self, run_dir):
        super().__init__(run_dir)
        self.folder, self.addresses = run_dir.parent, read_settings(run_dir).swarm.addresses

    def begin(self, name, *arguments):
        return self.start(*map(str, arguments), output=self.folder / f"{name}.out")

    def run(self, name, *arguments):
        """Its exit code."""
        return self.begin(name, *arguments).wait(PATIENCE_S)

    def output_of(self, name):
        return (self.folder / f"{name}.out").read_text(errors="replace")


@pytest.fixture(scope="module")
def people(shards, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("invited") / "run"
    make_run(
        run_dir,
        str(shards),
        load_recipe("tiny").override(steps=500, batch_size=32),
        timing=dataclasses.replace(
            TIMING, next_chunk_timeout_s=8.0, averaging_timeout_s=30.0, progress_expiration_s=20.0
        ),
        admission="invite",
        on_notice=print,
        **ON_LOOPBACK,
    )
    (run_dir / ".run.lock").touch()
    with People(run_dir) as people:
        until("the host", lambda: people.said("dalle-lean invite"))
        yield people
        people.report()


def join_options(people, name):
    return (*people.addresses, "--client", "--batch-size", "8", "--folder", people.folder / name)


def test_who_is_not_invited_reads_why_and_whom_to_ask(people):
    assert people.run("uninvited", "join", *join_options(people, "uninvited")) == 2
    last = people.output_of("uninvited").splitlines()[-1]
    assert last == (
        "error: admission: the run admits only machines that its host has invited; "
        "ask the host for a code and pass it with --code"
    )


@pytest.fixture(scope="module")
def anna(people):
    """An invited volunteer with a `code`."""
    assert people.run("invite", "invite", people.run_dir, "--name", "Anna") == 0
    [code] = re.findall(r"--code\s+(\S+)", people.output_of("invite"))
    anna = people.begin("anna", "join", *join_options(people, "anna"), "--code", code)
    anna.code = code
    return anna


def test_who_is_invited_trains(people, anna):
    until("a step", lambda: people.step() >= 1 or anna.poll() is not None)
    assert anna.poll() is None


def test_a_code_that_was_used_lets_nobody_else_in(people, anna):
    assert people.run("replayed", "join", *join_options(people, "replayed"), "--code", anna.code) == 2
    assert "the code has admitted as many machines as it allows" in people.output_of("replayed")


def test_the_host_sees_passes_and_what_was_refused(people, anna):
    watch = ("--once", "--out", people.folder / "watch")

    def sees_passes(*source):  # not while the trainer's record is on its way
        assert people.run("monitor", "monitor", *source, *watch) == 0
        return re.search(r"\d+ passes", people.output_of("monitor"))

    until("a monitor that sees a trainer", lambda: sees_passes(people.run_dir))
    shutil.rmtree(people.folder / "watch")
    assert sees_passes(*people.addresses, "--run-dir", people.run_dir)  # as the process of the host's page


def test_a_ban_of_a_code_ends_who_came_with_it(people, anna):
    assert people.run("ban", "ban", people.run_dir, anna.code) == 0
    assert anna.wait(PATIENCE_S) == 2
    refusal = "admission: the host has banned this machine, or the code that it joined with; ask the run's host why"
    assert people.output_of("anna").splitlines()[-1].endswith(refusal)
    assert people.host.poll() is None


def test_the_host_ends_cleanly(people):
    people.host.send_signal(signal.SIGINT)
    assert people.host.wait(PATIENCE_S) == 130
