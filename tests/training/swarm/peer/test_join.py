"""`dalle-lean join` as a process, in a real swarm on loopback."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest

from dalle_lean.io.files import read_json
from tests.children import PROGRAM, start
from tests.training.conftest import write_shards
from tests.training.swarm.harness import Swarm, wait_for
from tests.training.swarm.nursery import is_alive, processes_of, send
from training.commands.join import LiveLine
from training.data.sampler import Position
from training.swarm.network.addresses import free_ports, peer_id_in
from training.swarm.network.bootstrap_service import offer_run
from training.swarm.network.dht import open_dht
from training.swarm.observe.peer_metrics import read_records

pytestmark = pytest.mark.swarm
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
TIMEOUT_S = 120.0
"""Imports alone take a while next to other tests."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory, nursery):
    """A donor, and a node that serves the run's files at `address`."""
    with Swarm(tmp_path_factory.mktemp("swarm"), nursery=nursery, batch_size=64) as swarm:
        node = open_dht([], client_mode=False, listen=["/ip4/127.0.0.1/tcp/0"])
        offer_run(node, swarm.folder)
        swarm.address = str(node.get_visible_maddrs()[0])
        swarm.start("helper", addresses=[swarm.address])
        swarm.start("donor", addresses=[swarm.address])
        yield swarm
        node.shutdown()


class Joined:
    """A running `dalle-lean join`, in its own session."""

    def __init__(self, folder, *arguments, launcher=()):
        folder.mkdir(exist_ok=True)
        self.folder = folder / "run"
        self.screen, self.mistakes = folder / "screen", folder / "mistakes"
        command = [*launcher, *PROGRAM, "join", *arguments, "--folder", str(self.folder)]
        with open(self.screen, "a") as screen, open(self.mistakes, "a") as mistakes:
            self.process = start(command, stdout=screen, stderr=mistakes, start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes():
            send(process.pid, signal.SIGKILL)
        self.process.wait()

    def processes(self):
        """Itself and all that it has started; torchrun gives each process its own session."""
        found = {process.pid: process for process in processes_of(self.process.pid)}
        for process in list(found.values()):
            with suppress(psutil.Error):
                found |= {child.pid: child for child in process.children(recursive=True)}
        return list(found.values())

    def position(self):
        """Its position in the data."""
        path = self.folder / "cursor.json"
        return place(Position.from_dict(read_json(path)["position"])) if path.exists() else ()

    def wait_beyond(self, before):
        """Wait until its position has moved beyond `before`."""
        wait_for(lambda: self.position() > before or self.process.poll() is not None, TIMEOUT_S, "a step")
        assert self.process.poll() is None, self.mistakes.read_text()

    def press_ctrl_c(self):
        """Send SIGINT to all of its processes, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)


def place(position):
    return position.epoch, position.group, position.window, position.sample


def present_peers(swarm):
    """The peers that the run's monitors show as present."""
    reader = open_dht([swarm.address], client_mode=True, reads_all=True)
    try:
        records = read_records(reader, swarm.settings.run_id)
        return {peer for peer in records.by_peer if records.present(peer)}
    finally:
        reader.shutdown()


@pytest.mark.long
@pytest.mark.parametrize(
    ("ending", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_lets_it_leave_cleanly_and_the_same_command_goes_on(swarm, tmp_path, ending, code):
    with Joined(tmp_path, swarm.address, "--name", "alice") as joined:
        joined.wait_beyond(())
        wait_for(lambda: peer_id_in(joined.folder / "identity") in present_peers(swarm), 30, "its record")
        if ending == signal.SIGINT:
            joined.press_ctrl_c()
        else:
            joined.process.send_signal(ending)
        sent_s = time.monotonic()
        assert joined.process.wait(TIMEOUT_S) == code
        assert time.monotonic() - sent_s < (60 if ending == signal.SIGINT else 10)
        wait_for(lambda: not joined.processes(), 5, "its processes to end")
        stopped_at, identity = joined.position(), (joined.folder / "identity").read_bytes()
    mistakes, screen = joined.mistakes.read_text(), joined.screen.read_text()
    assert "Traceback" not in mistakes
    # After SIGTERM a busy machine may have no time to leave.
    in_haste = ending == signal.SIGTERM and "stopped at once" in mistakes
    assert ("To go on: dalle-lean join" in mistakes) == (ending == signal.SIGTERM and not in_haste)
    if not in_haste:
        assert peer_id_in(joined.folder / "identity") not in present_peers(swarm)
    for words in (
        "listening: a helper can connect",
        "samples/s",
        *([] if in_haste else ["The same command continues"]),
    ):
        assert words in screen
    assert "problem" not in screen
    assert "went by" not in screen
    with Joined(tmp_path, swarm.address, "--name", "bob") as again:
        again.wait_beyond(stopped_at)
        assert "went by the name alice" in " ".join(again.screen.read_text().split())
        assert (again.folder / "identity").read_bytes() == identity


@pytest.mark.slow
def test_another_data_set_is_refused_in_one_line(swarm, tmp_path):
    other = write_shards(tmp_path / "other", 64)
    with Joined(tmp_path, swarm.address, "--client", "--data", str(other)) as joined:
        assert joined.process.wait(TIMEOUT_S) == 2
        (line,) = joined.mistakes.read_text().splitlines()
        assert line.startswith(f"error: data: {other} is other data than the run's")
        assert not joined.folder.exists()
        assert not joined.processes()


@pytest.mark.slow
def test_the_second_ctrl_c_ends_at_once(swarm, tmp_path):
    with Joined(tmp_path, swarm.address, "--client") as joined:
        joined.wait_beyond(())
        joined.press_ctrl_c()
        time.sleep(0.2)
        joined.press_ctrl_c()
        assert joined.process.wait(10) in (130, -signal.SIGINT)  # the latter if it has left, and only exits
        wait_for(lambda: not joined.processes(), 5, "its processes to end")
        assert "Traceback" not in joined.mistakes.read_text()


# Short sleeps: Python handles a signal that comes just before a sleep only after it.
SWALLOWING = """
import os, signal, sys, time
from functools import partial
from training.run.graceful_stop import interrupt_deferred
from training.swarm.peer import join
join.LEAVE_S = 0.5
if (child := os.fork()) == 0:
    time.sleep(60)
stop = lambda: print("stopped")
with interrupt_deferred(print, partial(join.end_at_once, stop), partial(join.end_in_time, stop)) as interrupted:
    print(child)
    while True:
        try:
            time.sleep(0.1)
        except BaseException:
            pass
"""


def test_the_second_ctrl_c_ends_at_once_even_where_a_library_catches_every_exception():
    with start([sys.executable, "-uc", SWALLOWING], stdout=subprocess.PIPE, start_new_session=True) as process:
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        assert b"again stops at once" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stdout.read() == b"stopped\n"
    wait_for(lambda: not is_alive(child), 30, "the child to end")


def test_sigterm_ends_in_time_even_where_a_library_catches_every_exception():
    with start([sys.executable, "-uc", SWALLOWING], stdout=subprocess.PIPE, start_new_session=True) as process:
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
        assert process.stdout.read().splitlines()[-1] == b"stopped"
    wait_for(lambda: not is_alive(child), 30, "the child to end")


@pytest.mark.slow
def test_a_name_that_cannot_be_shown_is_refused_before_anything_is_tried(tmp_path):
    with Joined(tmp_path, "/ip4/127.0.0.1/tcp/1/p2p/QmNo", "--name", "a<b") as joined:
        assert joined.process.wait(TIMEOUT_S) == 2
        assert joined.mistakes.read_text().startswith("error: user name 'a<b'")
        assert joined.screen.read_text() == ""


@pytest.mark.slow
def test_two_processes_of_torchrun_are_one_peer(swarm, tmp_path):
    with Joined(tmp_path, swarm.address, "--client", launcher=TORCHRUN) as joined:
        joined.wait_beyond(())
        joined.press_ctrl_c()
        joined.process.wait(TIMEOUT_S)
        wait_for(lambda: not joined.processes(), 10, "its processes to end")
    assert "The same command continues" in joined.screen.read_text()


@pytest.mark.slow
def test_two_processes_of_torchrun_join_again_where_the_run_was_taken_back(tmp_path, nursery):
    with Swarm(tmp_path / "swarm", nursery=nursery, batch_size=64) as swarm:
        place = {"listen": [f"/ip4/127.0.0.1/tcp/{free_ports(1)[0]}"], "identity": tmp_path / "helper"}
        node = open_dht([], client_mode=False, **place)
        offer_run(node, swarm.folder)
        address = str(node.get_visible_maddrs()[0])
        with Joined(tmp_path / "here", address, "--client", launcher=TORCHRUN) as joined:
            joined.wait_beyond(())
            node.shutdown()
            swarm.rewrite(name=f"{swarm.settings.swarm.name}-back1")
            node = open_dht([], client_mode=False, **place)
            offer_run(node, swarm.folder)

            def in_new_run():
                return read_json(joined.folder / "cursor.json")["run"] == swarm.settings.run_id

            wait_for(in_new_run, TIMEOUT_S, "the peer's place in the new run")
            joined.press_ctrl_c()
            joined.process.wait(TIMEOUT_S)
            assert "was rolled back to an earlier step" in joined.screen.read_text()
        node.shutdown()


@pytest.mark.parametrize(("over", "said"), [(True, "the run has finished"), (False, "the run continues without")])
def test_who_is_ended_at_once_is_told_whether_the_run_goes_on(capsys, over, said):
    line = LiveLine()
    line.peer = SimpleNamespace(is_over=over)
    line.on_stop()
    assert f"stopped at once; {said}" in capsys.readouterr().err
