"""A run by invitation, from end to end: `host`, `invite`, `join`, `monitor` and `ban`, each as a process."""

import dataclasses
import re
import shutil
import signal
import subprocess

import pytest

from tests.children import PROGRAM, kill_family, start
from tests.training.conftest import write_shards
from tests.training.swarm.harness import TIMING, wait_for
from training.run.recipe import load_recipe
from training.swarm.config import read_settings
from training.swarm.host.run_setup import make_run
from training.swarm.host.status import read_status

pytestmark = [pytest.mark.swarm, pytest.mark.slow]
LOOPBACK = {"port": 0, "announce": "127.0.0.1", "listen": "127.0.0.1"}
TIMEOUT_S = 240.0
"""Imports alone take a while next to other tests."""


class People:
    """The participants' processes, and their output."""

    def __init__(self, folder):
        self.folder, self.started = folder, []

    def start(self, name, *arguments):
        with open(self.folder / f"{name}.out", "ab") as output:
            process = start(
                [*PROGRAM, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def run(self, name, *arguments):
        """Its exit code."""
        return self.start(name, *arguments).wait(TIMEOUT_S)

    def said(self, name):
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def close(self):
        for process in self.started:
            kill_family(process)


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    folder = tmp_path_factory.mktemp("invited")
    shards = write_shards(folder / "shards")
    people = People(folder)
    people.run_dir = folder / "run"
    make_run(
        people.run_dir,
        str(shards),
        load_recipe("tiny").override(steps=500, batch_size=32),
        timing=dataclasses.replace(
            TIMING, next_chunk_timeout_s=15.0, averaging_timeout_s=60.0, progress_expiration_s=30.0
        ),
        admission="invite",
        on_notice=print,
        **LOOPBACK,
    )
    (people.run_dir / ".run.lock").touch()
    people.addresses = read_settings(people.run_dir).swarm.addresses
    people.host = people.start("host", "host", people.run_dir)
    try:
        wait_for(lambda: "dalle-lean invite" in people.said("host"), TIMEOUT_S, "the host")
        yield people
    finally:
        people.close()
        for path in [*folder.glob("*.out"), *people.run_dir.glob("logs/*.log"), *folder.glob("*/log")]:
            print(f"== {path}\n{path.read_text(errors='replace')[-3000:]}")


def join_options(people, name):
    return (*people.addresses, "--client", "--batch-size", "8", "--folder", people.folder / name)


def step_of(people):
    return read_status(people.run_dir, "donor-0").get("step") or 0


def test_who_is_not_invited_reads_why_and_whom_to_ask(people):
    assert people.run("uninvited", "join", *join_options(people, "uninvited")) == 2
    last = people.said("uninvited").splitlines()[-1]
    assert last == (
        "error: admission: the run admits only machines that its host has invited; "
        "ask the host for a code and pass it with --code"
    )


@pytest.fixture(scope="module")
def anna(people):
    """An invited volunteer with a `code`."""
    assert people.run("invite", "invite", people.run_dir, "--name", "Anna") == 0
    [code] = re.findall(r"--code\s+(\S+)", people.said("invite"))
    anna = people.start("anna", "join", *join_options(people, "anna"), "--code", code)
    anna.code = code
    return anna


def test_who_is_invited_trains(people, anna):
    wait_for(lambda: step_of(people) >= 1 or anna.poll() is not None, TIMEOUT_S, "a step")
    assert anna.poll() is None


def test_a_code_that_was_used_lets_nobody_else_in(people, anna):
    assert people.run("replayed", "join", *join_options(people, "replayed"), "--code", anna.code) == 2
    assert "the code has admitted as many machines as it allows" in people.said("replayed")


def test_the_host_sees_passes_and_what_was_refused(people, anna):
    watch = ("--once", "--out", people.folder / "watch")

    def sees_passes(*source):  # not while the trainer's record is on its way
        assert people.run("monitor", "monitor", *source, *watch) == 0
        return re.search(r"\d+ passes", people.said("monitor"))

    wait_for(lambda: sees_passes(people.run_dir), TIMEOUT_S, "a monitor that sees a trainer")
    shutil.rmtree(people.folder / "watch")
    assert sees_passes(*people.addresses, "--run-dir", people.run_dir)  # as the process of the host's page


def test_a_ban_of_a_code_ends_who_came_with_it(people, anna):
    assert people.run("ban", "ban", people.run_dir, anna.code) == 0
    assert anna.wait(TIMEOUT_S) == 2
    refusal = "admission: the host has banned this machine, or the code that it joined with; ask the run's host why"
    assert people.said("anna").splitlines()[-1].endswith(refusal)
    assert people.host.poll() is None


def test_the_host_ends_cleanly(people):
    people.host.send_signal(signal.SIGINT)
    assert people.host.wait(TIMEOUT_S) == 130
