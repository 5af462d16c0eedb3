"""Supervising a run's peers, and passing on their notices."""

import contextlib
import math
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from dalle_lean.ending import Terminated
from tests.foreign import foreign_folder
from tests.training.swarm.host.small_run import make, until
from tests.training.swarm.nursery import is_alive
from training.swarm.host import supervisor as host
from training.swarm.host.checkpoints import Checkpoints
from training.swarm.host.host_config import HostConfig
from training.swarm.host.status import StatusFile
from training.swarm.host.supervisor import Supervisor
from training.swarm.peer.gradient_worker import build_model


@pytest.fixture
def supervisor(shards, tmp_path):
    """The supervisor of a run whose peers have not started, with its notices."""
    make(tmp_path / "run", shards)
    notices = []
    waits = []
    options = {"on_notice": notices.append, "on_wait": waits.append}
    supervisor = Supervisor(tmp_path / "run", HostConfig.load(tmp_path / "run"), **options)
    supervisor.notices, supervisor.waits = notices, waits
    (tmp_path / "run/status").mkdir(exist_ok=True)
    return supervisor


def test_each_notice_of_a_peer_is_passed_on_once_however_many_there_are(supervisor):
    status = StatusFile(supervisor.run_dir, "helper-0")
    for number in range(50):
        status.notice(str(number))
        supervisor.forward_notices(supervisor.processes["helper-0"])
    assert supervisor.notices == [f"helper-0: {number}" for number in range(50)]


def test_the_notices_of_a_peer_that_was_started_again_are_new_ones(supervisor):
    member = supervisor.processes["helper-0"]
    StatusFile(supervisor.run_dir, "helper-0").notice("begins")
    supervisor.forward_notices(member)
    again = StatusFile(supervisor.run_dir, "helper-0")
    again.content["pid"] += 1
    again.notice("begins")
    supervisor.forward_notices(member)
    assert supervisor.notices == 2 * ["helper-0: begins"]


def test_a_peer_that_is_killed_starts_again_as_the_same_peer(supervisor, monkeypatch, request):
    started = []

    def launch(member, command):
        started.append(command)
        member.process, member.started_s = sleeper("import time"), time.monotonic()
        request.addfinalizer(member.process.kill)

    monkeypatch.setattr(supervisor, "launch", launch)
    supervisor.poll()
    before, peer = list(started), supervisor.processes["helper-0"]
    peer.process.kill()
    peer.process.wait()
    supervisor.poll()
    [notice] = supervisor.notices
    assert notice.startswith("helper-0 ended (killed by signal 9); it restarts in 1 s as the same peer")
    assert started == before
    peer.due_s = 0.0
    supervisor.poll()
    assert started[len(before) :] == [command for command in before if "helper-0" in command]


def test_a_port_that_is_taken_is_told_of_once_and_the_others_live_on(supervisor, monkeypatch):
    started = []
    monkeypatch.setattr(supervisor, "start", lambda member: started.append(member.name))
    with socket.create_server(("127.0.0.1", supervisor.host_config.ports["helper-0"])):
        supervisor.poll()
        assert supervisor.notices == []
        supervisor.processes["helper-0"].due_s -= 2 * host.PORT_TIMEOUT_S
        for _ in range(3):
            supervisor.poll()
    [notice] = supervisor.notices
    assert "helper-0 starts as soon as the port is free" in notice
    assert set(started) == {"helper-1", "donor-0"}
    supervisor.poll()
    assert "helper-0" in started


@pytest.mark.swarm
def test_a_peer_runs_no_code_of_the_current_folder(supervisor, monkeypatch, tmp_path):
    monkeypatch.chdir(foreign_folder(tmp_path))
    member = supervisor.processes["helper-0"]
    supervisor.start(member)
    try:
        until("a port", lambda: supervisor.host_config.is_up("helper-0") or member.process.poll() is not None)
        assert member.process.poll() is None, (supervisor.run_dir / "logs/helper-0.log").read_text()
    finally:
        supervisor.stop()


STARTS_A_DONOR_AND_DIES = """
import os, sys
from pathlib import Path
from training.swarm.host.checkpoints import Checkpoints
from training.swarm.host.host_config import HostConfig
from training.swarm.host.supervisor import Supervisor
from training.swarm.peer.gradient_worker import build_model

supervisor = Supervisor(Path(sys.argv[1]), HostConfig.load(Path(sys.argv[1])), on_notice=print)
supervisor.start(supervisor.processes["donor-0"])
print(supervisor.processes["donor-0"].process.pid, flush=True)
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.swarm
def test_a_peer_whose_host_dies_before_it_has_imported_anything_ends(supervisor):
    command = [sys.executable, "-c", STARTS_A_DONOR_AND_DIES, str(supervisor.run_dir)]
    died = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    orphan = psutil.Process(int(died.stdout))
    try:
        until("its end", lambda: not is_alive(orphan), 60)  # it would wait for the helpers for 90 s
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()


DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)"
SAVES = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(7)))"


def sleeper(code):
    """A process that has begun to run `code`."""
    # Short sleeps: Python handles a signal that comes just before a sleep only after it.
    endless = f"{code}\nprint(1)\nwhile True: time.sleep(0.1)"
    process = subprocess.Popen([sys.executable, "-uc", endless], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"1\n"
    return process


def run_as(supervisor, name, code):
    """Let a process that runs `code` be this peer, which has been up."""
    member = supervisor.processes[name]
    member.process, member.was_up = sleeper(code), True
    return member.process


def test_a_peer_that_still_starts_is_not_waited_for(supervisor):
    process = run_as(supervisor, "donor-0", DEAF)
    supervisor.processes["donor-0"].was_up = False
    supervisor.stop()
    assert process.returncode == -signal.SIGKILL
    assert supervisor.notices == []


def test_a_donor_that_saves_is_waited_for_and_that_is_said_without_a_warning(supervisor, monkeypatch):
    monkeypatch.setattr(host, "SILENT_WAIT_S", 0.2)
    process = run_as(supervisor, "donor-0", SAVES)
    supervisor.stop()
    assert process.returncode == 7
    [line] = supervisor.waits
    assert "waiting for donor-0 to save its state, 300 s at most" in line
    assert supervisor.notices == []


@pytest.mark.parametrize("trainers", [1, 0])
def test_helpers_stay_until_the_trainers_have_noticed_the_end_of_the_run_but_not_for_long(
    supervisor, monkeypatch, trainers
):
    monkeypatch.setattr(host, "SILENT_WAIT_S", 0.2)
    monkeypatch.setattr(host, "FAREWELL_S", 2.0)
    StatusFile(supervisor.run_dir, "donor-0").update(finished=True)
    StatusFile(supervisor.run_dir, "helper-0").update(trainers=trainers)
    run_as(supervisor, "helper-0", "import time")
    began_s = time.monotonic()
    supervisor.stop()
    assert (time.monotonic() - began_s >= 2) == bool(trainers)
    line = "the run is over; waiting for the trainers to notice, 2 s at most"
    assert supervisor.waits[:1] == trainers * [line]


@pytest.mark.parametrize("before", [signal.SIGTERM, signal.SIGINT, None])
def test_a_sigterm_does_not_cut_off_a_donor_that_saves(shards, tmp_path, monkeypatch, before):
    make(tmp_path / "run", shards)
    monkeypatch.setattr(host, "SILENT_WAIT_S", 0.0)
    lines = []

    def terminate(line):  # that the host waits for the donor
        lines.append(line)
        signal.raise_signal(signal.SIGTERM)

    with (
        contextlib.suppress(Terminated),
        host.supervised(tmp_path / "run", on_notice=print, on_wait=terminate) as supervisor,
    ):
        process = run_as(supervisor, "donor-0", SAVES)
        if before is not None:
            signal.raise_signal(before)
    assert process.returncode == 7
    assert "waiting for donor-0 to save its state" in lines[0]


def test_a_peer_that_does_not_end_is_killed_in_the_end(supervisor, monkeypatch):
    monkeypatch.setattr(host, "LEAVE_TIMEOUT_S", 0.3)
    process = run_as(supervisor, "helper-1", DEAF)
    supervisor.stop()
    assert process.returncode == -signal.SIGKILL
    assert supervisor.notices == ["helper-1 did not end in 0 s; killed"]


def test_the_second_ctrl_c_ends_a_donor_that_is_waited_for_at_once(supervisor, monkeypatch):
    process = run_as(supervisor, "donor-0", DEAF)
    monkeypatch.setattr(host, "STOP_POLL_S", None)  # makes the wait fail, as a signal does
    with pytest.raises(TypeError):
        supervisor.stop()
    assert process.returncode == -signal.SIGKILL


def test_the_runs_page_starts_once_all_are_up_and_again_where_it_ends_and_never_outlives_them(supervisor, monkeypatch):
    started = []

    def launch(member, command, **_):
        started.append((member.name, command))
        member.process = sleeper("import time")

    monkeypatch.setattr(supervisor, "launch", launch)
    supervisor.page_options = ["--page", "--page-address", "127.0.0.1:7870"]
    supervisor.poll()
    assert "page" not in {name for name, _ in started}
    for member in supervisor.processes.values():
        member.was_up = True
    supervisor.poll()
    name, command = started[-1]
    assert (name, command[-3:]) == ("page", ["--page", "--page-address", "127.0.0.1:7870"])
    assert supervisor.host_config.local_address(supervisor.run_dir, "helper-0") in command
    supervisor.page.process.kill()
    supervisor.page.process.wait()
    supervisor.poll()
    assert supervisor.page.process is None
    assert "page ended (killed by signal 9); it restarts in 1 s" in supervisor.notices[-1]
    supervisor.page.due_s = 0.0
    supervisor.poll()
    again = supervisor.page.process
    supervisor.stop()
    assert again.returncode == -signal.SIGTERM


def test_the_runs_page_is_ended_after_the_peers_and_killed_if_it_does_not_end(supervisor, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "PAGE_TIMEOUT_S", 0.3)
    order, ends = tmp_path / "order", "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: ({}, {}))"
    run_as(supervisor, "donor-0", ends.format(f"open({str(order)!r}, 'a').write('donor ')", "sys.exit()"))
    supervisor.page.process = page = sleeper(ends.format(f"open({str(order)!r}, 'a').write('page ')", "0"))
    supervisor.stop()
    assert (order.read_text(), page.returncode) == ("donor page ", -signal.SIGKILL)


def test_a_run_that_is_hosted_again_is_shown_from_its_newest_checkpoint_on(shards, tmp_path, monkeypatch):
    class Started(Supervisor):
        """One whose peers run; at each look its donor says more."""

        all_up, reports = True, iter([{}, {"step": 54}, {"finished": True}])

        def poll(self):
            (self.run_dir / "status").mkdir(exist_ok=True)
            StatusFile(self.run_dir, "donor-0").update(**next(self.reports))

        def stop(self):
            pass

    run_dir, shown = tmp_path / "run", []
    settings = make(run_dir, shards)
    checkpoints = Checkpoints(run_dir, settings, HostConfig(ports={}), pytest.fail)
    assert checkpoints.save(53, build_model(settings), [], math.nan)
    monkeypatch.setattr(host, "Supervisor", Started)
    monkeypatch.setattr(host, "POLL_S", 0.0)
    options = {"on_ready": lambda: None, "on_notice": pytest.fail}
    host.host_run(run_dir, settings, on_progress=lambda step, *_: shown.append(step), **options)
    assert shown[:2] == [53, 54]


def test_all_is_as_before_where_a_host_cannot_begin(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="not the folder of a run"), host.supervised(tmp_path, on_notice=print):
        pass
    assert signal.getsignal(signal.SIGTERM) is before
