"""`dalle-lean host` with real processes on loopback."""

import contextlib
import dataclasses
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from dalle_lean.cli import main
from dalle_lean.io.files import read_json
from dalle_lean.vocabulary import Vocabulary
from tests.children import PROGRAM, kill_family, start
from tests.foreign import foreign_folder
from tests.training.conftest import write_shards
from tests.training.swarm.nursery import is_alive
from training.run.recipe import load_recipe
from training.swarm.admission.keys import SigningKey
from training.swarm.admission.newcomer import enter_by_pass
from training.swarm.admission.passes import Invite
from training.swarm.config import TimingSection, WireSection, read_settings, write_settings
from training.swarm.host import supervisor as host
from training.swarm.host.checkpoints import Checkpoints, list_checkpoints
from training.swarm.host.host_config import HostConfig, identity_path, peer_id
from training.swarm.host.host_gate import begin_host_admission, host_gate_with_pass, run_key_file
from training.swarm.host.run_setup import ListenOptions, choose_ports, make_helper, make_run, slug
from training.swarm.host.status import StatusFile
from training.swarm.host.supervisor import Supervisor
from training.swarm.network.addresses import free_ports
from training.swarm.network.bootstrap_service import fetch_run, offer_run
from training.swarm.network.dht import open_dht
from training.swarm.peer.gradient_worker import build_model

TIMING = TimingSection(
    matchmaking_time_s=2,
    request_timeout_s=1,
    averaging_timeout_s=20,
    next_chunk_timeout_s=5,
    load_state_timeout_s=30,
    progress_expiration_s=20,
)
PLACE = ListenOptions(port=0, announce="127.0.0.1", listen="127.0.0.1")
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards") / "train")


def make(run_dir, shards, *, batch_size=32, steps=100, place=PLACE, **options):
    recipe = load_recipe("tiny").override(steps=steps, batch_size=batch_size)
    return make_run(run_dir, str(shards), recipe, timing=TIMING, place=place, on_notice=print, **options)


def until(what, condition, patience_s=PATIENCE_S):
    """Wait for it."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.3)
    raise AssertionError(f"{what} did not come about in {patience_s:.0f} s")


def test_a_run_is_made_with_all_that_volunteers_need_and_nothing_secret(shards, tmp_path):
    settings = make(tmp_path / "my run", shards)
    assert settings == read_settings(tmp_path / "my run")
    assert settings.swarm.name == "my-run"
    assert len(settings.swarm.addresses) == 2
    assert settings.recipe.model["image_side"] == 4
    assert Vocabulary.load(tmp_path / "my run" / "vocabulary.json").unknown("a red zeppelin") == ["zeppelin"]
    host_config = HostConfig.load(tmp_path / "my run")
    for name in host_config.ports:
        path = identity_path(tmp_path / "my run", name)
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_same_command_keeps_identities_ports_and_run_id(shards, tmp_path):
    first = make(tmp_path / "run", shards)
    for place in (PLACE, ListenOptions()):
        again = make(tmp_path / "run", shards, place=place)
        assert again.run_id == first.run_id
        assert again.swarm == first.swarm


def test_a_run_publishes_where_it_did_until_it_is_told_not_to(shards, tmp_path):
    make(tmp_path / "run", shards, place=dataclasses.replace(PLACE, publish="hf://me/birds"))
    for publish, expected in ((None, "hf://me/birds"), ("s3://b/birds", "s3://b/birds"), ("", None), (None, None)):
        make(tmp_path / "run", shards, place=dataclasses.replace(PLACE, publish=publish))
        assert HostConfig.load(tmp_path / "run").publish == expected


def test_a_run_goes_on_by_its_folder_alone(shards, tmp_path):
    first = make(tmp_path / "run", shards, place=dataclasses.replace(PLACE, donors=2))
    assert len(first.swarm.donors) == 2
    assert make_run(tmp_path / "run", None, load_recipe("emoji64"), on_notice=print) == first


@pytest.mark.parametrize(
    "option",
    [
        ("--config", "emoji64"),
        ("--tokenizer", "tokenizer.json"),
        ("--name", "other"),
        ("--min-peers", "2"),
        ("--mode", "diloco"),
        ("--compression", "fp16"),
        ("--power-sgd-rank", "2"),
        ("--matchmaking-time", "3"),
        ("--steps", "50"),
        ("--batch-size", "64"),
        ("--lr", "1e-3"),
        ("--seed", "1"),
    ],
)
def test_a_run_that_goes_on_by_its_folder_alone_is_given_no_settings(shards, tmp_path, capsys, monkeypatch, option):
    make(tmp_path / "run", shards)
    (tmp_path / "run/.run.lock").touch()
    before = (tmp_path / "run/swarm.toml").read_bytes()
    monkeypatch.setattr(host, "host_run", lambda *_, **__: pytest.fail("the host began"))
    assert run_program("host", str(tmp_path / "run"), *option, "--donors", "2") == 2
    error = capsys.readouterr().err
    assert f"leave out {option[0]}, or" in error
    assert (tmp_path / "run/swarm.toml").read_bytes() == before


@pytest.mark.parametrize("port", [None, 0])
def test_peers_that_a_run_had_keep_their_addresses_where_it_gets_another_donor(shards, tmp_path, port):
    before = make(tmp_path / "run", shards)
    ports = HostConfig.load(tmp_path / "run").ports
    more = make(tmp_path / "run", shards, place=ListenOptions(port=port, donors=2))
    assert more.swarm.addresses == before.swarm.addresses
    now = HostConfig.load(tmp_path / "run").ports
    assert list(now) == ["helper-0", "helper-1", "donor-0", "donor-1"]
    assert {name: now[name] for name in ports} == ports
    assert now["donor-1"] not in ports.values()


def test_further_peers_have_the_ports_behind_the_others():
    assert choose_ports(["a", "b"], {}, None, "127.0.0.1") == {"a": 31337, "b": 31338}
    assert choose_ports(["a", "b"], {"a": 40000}, None, "127.0.0.1") == {"a": 40000, "b": 40001}
    assert choose_ports(["a", "b"], {"a": 40000}, 50000, "127.0.0.1") == {"a": 50000, "b": 50001}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 64}, "batch size"),
        ({"steps": 50}, "schedule"),
        ({"wire": WireSection(compression="fp16")}, "wire settings"),
        ({"name": "other"}, r"name \(run\)"),
    ],
)
def test_another_recipe_for_a_run_that_is_there_is_refused_by_name(shards, tmp_path, changes, named):
    before = make(tmp_path / "run", shards)
    with pytest.raises(ValueError, match=f"another {named}"):
        make(tmp_path / "run", shards, **changes)
    assert read_settings(tmp_path / "run") == before


def test_a_new_run_needs_data(tmp_path):
    with pytest.raises(ValueError, match="--data"):
        make_run(tmp_path / "run", None, load_recipe("tiny"), on_notice=print)


@pytest.fixture
def supervisor(shards, tmp_path):
    """Of a run whose peers have not been started, and what it says."""
    make(tmp_path / "run", shards)
    notices = []
    supervisor = Supervisor(tmp_path / "run", HostConfig.load(tmp_path / "run"), on_notice=notices.append)
    supervisor.notices = notices
    (tmp_path / "run/status").mkdir(exist_ok=True)
    return supervisor


def test_each_notice_of_a_peer_is_passed_on_once_however_many_there_are(supervisor):
    status = StatusFile(supervisor.run_dir, "helper-0")
    for number in range(50):
        status.notice(str(number))
        supervisor.pass_on_notices(supervisor.processes["helper-0"])
    assert supervisor.notices == [f"helper-0: {number}" for number in range(50)]


def test_the_notices_of_a_peer_that_was_started_again_are_new_ones(supervisor):
    member = supervisor.processes["helper-0"]
    StatusFile(supervisor.run_dir, "helper-0").notice("begins")
    supervisor.pass_on_notices(member)
    again = StatusFile(supervisor.run_dir, "helper-0")
    again.content["pid"] += 1
    again.notice("begins")
    supervisor.pass_on_notices(member)
    assert supervisor.notices == 2 * ["helper-0: begins"]


def test_a_port_that_is_taken_while_peers_start_ends_the_host_in_one_sentence(supervisor):
    port = supervisor.host_config.ports["helper-0"]
    member = supervisor.processes["helper-0"]
    with socket.create_server(("127.0.0.1", port)):
        supervisor.wait_for_port(member)  # what an ended host has left may hold it for a moment
        member.due_s -= 2 * host.PORT_TIMEOUT_S
        with pytest.raises(ValueError, match=rf"port {port} of helper-0 is taken"):
            supervisor.poll()


def test_a_port_that_is_taken_later_is_told_of_once_and_the_others_live_on(supervisor, monkeypatch):
    started = []
    monkeypatch.setattr(supervisor, "start", lambda member: started.append(member.name))
    supervisor.was_ready = True
    with socket.create_server(("127.0.0.1", supervisor.host_config.ports["helper-0"])):
        supervisor.poll()
        assert supervisor.notices == []
        supervisor.processes["helper-0"].due_s -= 2 * host.PORT_TIMEOUT_S
        for _ in range(3):
            supervisor.poll()
    [notice] = supervisor.notices
    assert "helper-0 starts as soon as it is free" in notice
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


DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)"


def sleeper(code):
    """A process that has begun to run `code`."""
    # Short sleeps: Python takes a signal that comes just before a sleep only after it.
    endless = f"{code}\nprint(1)\nwhile True: time.sleep(0.1)"
    process = subprocess.Popen([sys.executable, "-uc", endless], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"1\n"
    return process


def test_a_donor_that_saves_is_waited_for_and_that_is_said(supervisor, monkeypatch):
    monkeypatch.setattr(host, "SILENT_WAIT_S", 0.2)
    saves = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), sys.exit(7)))"
    process = supervisor.processes["donor-0"].process = sleeper(saves)
    supervisor.stop()
    assert process.returncode == 7
    [notice] = supervisor.notices
    assert "waiting for donor-0 to save and leave the others, 300 s at most" in notice


def test_a_peer_that_does_not_end_is_killed_in_the_end(supervisor, monkeypatch):
    monkeypatch.setattr(host, "LEAVE_TIMEOUT_S", 0.3)
    process = sleeper(DEAF)
    supervisor.processes["helper-1"].process = process
    supervisor.stop()
    assert process.returncode == -signal.SIGKILL
    assert supervisor.notices == ["helper-1 did not end in 0 s; killed"]


def test_the_second_ctrl_c_ends_a_donor_that_is_waited_for_at_once(supervisor, monkeypatch):
    process = supervisor.processes["donor-0"].process = sleeper(DEAF)
    monkeypatch.setattr(host, "STOP_POLL_S", None)  # the wait for it fails, as it does upon a signal
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
    assert "page ended (killed by signal 9); it starts again in 1 s" in supervisor.notices[-1]
    supervisor.page.due_s = 0.0
    supervisor.poll()
    again = supervisor.page.process
    supervisor.stop()
    assert again.returncode == -signal.SIGKILL


def test_all_is_as_before_where_a_host_cannot_begin(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="no folder of a run"), host.supervised(tmp_path, on_notice=print):
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_notice_is_lost_where_two_threads_give_theirs(tmp_path):
    status = StatusFile(tmp_path, "donor-0")
    (tmp_path / "status").mkdir()
    threads = [threading.Thread(target=lambda: [status.notice("x") for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert status.content["noticed"] == 400


def test_a_name_comes_from_the_folder(tmp_path):
    assert slug(tmp_path / "My Run_2!") == "my-run-2"
    assert slug(tmp_path / "___") == "run"


def test_the_command_line_lists_checkpoints_and_takes_a_run_back(shards, tmp_path, capsys):
    settings = make(tmp_path / "run", shards)
    (tmp_path / "run/.run.lock").touch()
    checkpoints = Checkpoints(tmp_path / "run", settings, on_notice=print)
    model = build_model(settings)
    for step, loss in ((3, 5.5), (6, math.nan)):
        checkpoints.save(step, model, [], loss)
    assert run_program("rollback", str(tmp_path / "run")) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "step       3  held-out loss        5.5" in listed[0]
    assert "step       6  held-out loss          -" in listed[1]
    assert run_program("rollback", str(tmp_path / "run"), "--to", "4") == 2
    assert "no checkpoint of step 4; it has 3, 6" in capsys.readouterr().err
    assert run_program("rollback", str(tmp_path / "run"), "--to", "3") == 0
    assert "goes on as run-back1" in capsys.readouterr().out
    again = make(tmp_path / "run", shards)
    assert again.swarm.name == "run-back1"
    assert again.swarm.addresses == settings.swarm.addresses


def run_program(*arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


class Hosted:
    """A run that `dalle-lean host` keeps alive, and a trainer of it."""

    def __init__(self, run_dir, *options):
        self.run_dir = run_dir
        self.started = []
        self.output = run_dir.parent / "host.out"
        self.host = self.start("host", str(run_dir), *options, output=self.output)

    def start(self, *arguments, output):
        with open(output, "ab") as file:
            process = start(
                [*PROGRAM, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self.started.append(process)
        return process

    def train(self, name):
        addresses = read_settings(self.run_dir).swarm.addresses
        options = ("--client", "--batch-size", "8", "--folder", str(self.run_dir.parent / name))
        return self.start("join", *addresses, *options, output=self.run_dir.parent / f"{name}.out")

    def status(self, name):
        path = self.run_dir / "status" / f"{name}.json"
        return read_json(path) if path.exists() else {}

    def step(self):
        return self.status("donor-0").get("step") or 0

    def said(self, words):
        return words in self.output.read_text()

    def report(self):
        for path in [*self.run_dir.parent.glob("*.out"), *self.run_dir.glob("logs/*.log")]:
            print(f"== {path}\n{path.read_text(errors='replace')[-3000:]}")

    def close(self):
        for process in self.started:
            kill_family(process)


@pytest.fixture(scope="module")
def hosted(shards, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("hosted") / "run"
    make(run_dir, shards)
    (run_dir / ".run.lock").touch()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    hosted = Hosted(run_dir, "--page", "--page-address", address)
    hosted.page_address = address
    try:
        until("the host", lambda: hosted.said("dalle-lean join"))
        hosted.trainer = hosted.train("trainer")
        yield hosted
    except BaseException:
        hosted.report()
        raise
    finally:
        hosted.close()


@pytest.fixture
def running(hosted, request):
    """The same; what its processes said, where a test fails."""
    before = request.session.testsfailed
    yield hosted
    if request.session.testsfailed > before:
        hosted.report()


@pytest.mark.swarm
def test_a_hosted_run_that_is_joined_takes_steps_and_keeps_checkpoints(running):
    until("step 2", lambda: running.step() >= 2)
    checkpoint = until("a checkpoint", lambda: list_checkpoints(running.run_dir, print))[0]
    checkpoint.check()
    assert 0 < checkpoint.heldout_loss < 10


@pytest.mark.swarm
@pytest.mark.browser
def test_the_page_of_a_hosted_run_shows_in_chromium_what_its_helpers_averaged(running):
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    pytest.importorskip("gradio")
    from docs.screenshot import FLAGS

    if shutil.which("chromium") is None:
        pytest.skip("apt-get install chromium")
    run_json = running.run_dir / "watch" / "page" / "run.json"
    run = until("gradients on the page", lambda: read_json(run_json)["samples_in_all"] if run_json.exists() else 0, 300)
    assert run > 0
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        page = chromium.new_page()
        page.goto(f"http://{running.page_address}")
        page.wait_for_function("() => document.body.dataset.ready")
        assert "averaged into steps" in page.locator("#board-note").inner_text()
        assert "dalle-lean join /ip4/127.0.0.1" in page.locator("#line").inner_text()
        chromium.close()


@pytest.mark.swarm
def test_a_killed_helper_comes_back_as_the_same_peer(running):
    settings, before = read_settings(running.run_dir), running.step()
    killed = running.status("helper-0")["pid"]
    os.kill(killed, signal.SIGKILL)
    until("another process", lambda: running.status("helper-0").get("pid", killed) != killed)
    # libp2p proves who answers: the address ends in the peer id.
    until("the helper", lambda: HostConfig.load(running.run_dir).is_up("helper-0"))
    dht = open_dht([settings.swarm.addresses[0]], client_mode=True, only_asks=True)
    try:
        files = until("its files", lambda: try_to_fetch(dht, settings.swarm.addresses[0]), 30)
    finally:
        dht.shutdown()
    assert files.settings == settings
    assert running.said("helper-0 ended (killed by signal 9); it starts again in 1 s as the same peer")
    until("a step after it", lambda: running.step() > before)


def try_to_fetch(dht, address):
    with contextlib.suppress(ValueError):
        return fetch_run(dht, address)


@pytest.mark.slow
@pytest.mark.swarm
def test_a_killed_donor_goes_on_with_the_others(running):
    before, killed = running.step(), running.status("donor-0")["pid"]
    os.kill(killed, signal.SIGKILL)
    until("another process", lambda: running.status("donor-0").get("pid", killed) != killed)
    until("a later step", lambda: running.step() > before)


@pytest.mark.swarm
def test_kill_9_of_the_host_leaves_no_process(running):
    processes = psutil.Process(running.host.pid).children(recursive=True)
    assert len(processes) > 6
    running.host.kill()
    running.host.wait()
    until("the end of all", lambda: not any(is_alive(process) for process in processes), 15)


@pytest.mark.slow
@pytest.mark.swarm
@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_host_that_is_interrupted_ends_cleanly_and_goes_on_with_the_same_command(shards, tmp_path, ending, code):
    make(tmp_path / "run", shards)
    (tmp_path / "run/.run.lock").touch()
    for _ in range(2):
        hosted = Hosted(tmp_path / "run")
        try:
            until("the host", lambda hosted=hosted: hosted.said("dalle-lean join"))
            processes = psutil.Process(hosted.host.pid).children(recursive=True)
            hosted.host.send_signal(ending)
            assert hosted.host.wait(PATIENCE_S) == code
            until("the end of all", lambda those=processes: not any(is_alive(process) for process in those), 15)
            assert hosted.said("stopped; what was finished is kept" if code == 130 else "To go on: dalle-lean host")
        finally:
            hosted.report()
            hosted.close()
        hosted.output.unlink()


def test_a_helper_of_another_run_needs_somebody_who_answers(tmp_path):
    with pytest.raises(ValueError, match=r"no helper at .* hands out the run's files"):
        make_helper(tmp_path / "helper", ["/ip4/127.0.0.1/tcp/1/p2p/QmNo"], PLACE, print)


@pytest.mark.parametrize("option", [("--data", "shards"), ("--donors", "2"), ("--mode", "diloco"), ("--lr", "1e-3")])
def test_a_helper_of_another_run_is_given_nothing_of_a_run_of_its_own(tmp_path, capsys, option):
    address = "/ip4/127.0.0.1/tcp/1/p2p/QmNo"
    assert run_program("host", str(tmp_path / "helper"), "--helper-of", address, *option) == 2
    assert f"leave out {option[0]}" in capsys.readouterr().err
    assert not (tmp_path / "helper").exists()


def test_the_folder_of_a_hosted_run_is_not_made_one_of_a_helper(shards, tmp_path):
    make(tmp_path / "run", shards)
    with pytest.raises(ValueError, match="hosted here"):
        make_helper(tmp_path / "run", ["/ip4/127.0.0.1/tcp/1/p2p/QmNo"], PLACE, print)


@pytest.mark.slow
@pytest.mark.swarm
def test_one_more_helper_elsewhere_lets_newcomers_in_and_goes_back_with_the_run(shards, tmp_path):
    settings = make(tmp_path / "run", shards, admission="invite")
    node = open_helper(tmp_path / "run")
    address = settings.swarm.addresses[0]
    options = ("--helper-of", address, "--port", "0", "--announce", "127.0.0.1", "--listen", "127.0.0.1")
    options = (*options, "--code", make_code(tmp_path / "run", "helper"))
    hosted = Hosted(tmp_path / "helper", *options)
    try:
        until("the helper", lambda: hosted.said("dalle-lean join"))
        host_config = HostConfig.load(hosted.run_dir)
        assert list(host_config.ports) == ["helper-0"]
        own = host_config.address(hosted.run_dir, "helper-0")
        assert f"dalle-lean join {own} {address}" in hosted.output.read_text().replace("\n", " ").replace("  ", " ")
        assert fetched_by(own).run_id == settings.run_id
        node.shutdown()
        back = dataclasses.replace(settings, swarm=dataclasses.replace(settings.swarm, name="run-back1"))
        write_settings(tmp_path / "run/swarm.toml", back)
        node = open_helper(tmp_path / "run")
        until("the run of now", lambda: (fetched_by(own) or settings).run_id == back.run_id)
    except BaseException:
        hosted.report()
        raise
    finally:
        hosted.close()
        node.shutdown()


@pytest.mark.swarm
def test_a_helper_elsewhere_admits_newcomers_while_the_host_is_away(shards, tmp_path):
    settings = make(tmp_path / "run", shards, admission="invite")
    host_node = open_helper(tmp_path / "run")
    addresses = [settings.swarm.addresses[0]]
    trainers, helpers = (make_code(tmp_path / "run", role) for role in ("trainer", "helper"))
    for code, words in (("", "host invites"), (trainers, "code is for a trainer")):
        with pytest.raises(ValueError, match=words):
            make_helper(tmp_path / words, addresses, PLACE, print, code=code)
    make_helper(tmp_path / "helper", addresses, PLACE, print, code=helpers)
    elsewhere = open_helper(tmp_path / "helper")
    host_node.shutdown()
    address = HostConfig.load(tmp_path / "helper").address(tmp_path / "helper", "helper-0")
    newcomer = open_dht([address], client_mode=True, only_asks=True)
    code = make_code(tmp_path / "run", "trainer")
    try:
        given = enter_by_pass(newcomer, [address], settings, tmp_path / "newcomer", code=code).own_pass()
    finally:
        newcomer.shutdown()
        elsewhere.shutdown()
    assert (given.role, given.issuer) == ("trainer", peer_id(tmp_path / "helper", "helper-0"))


def make_code(run_dir, role):
    """Of an invitation for one machine."""
    invite = Invite(id=secrets.token_hex(4), uses=1, ends=int(time.time() + 3600), role=role)
    return invite.code(SigningKey.load(run_key_file(run_dir)))


def open_helper(run_dir):
    """The first helper of a run hosted in this folder, or the one elsewhere, without a process of its own."""
    settings, host_config = read_settings(run_dir), HostConfig.load(run_dir)
    node = open_dht(
        host_config.helper_of,
        client_mode=False,
        listen=[f"/ip4/127.0.0.1/tcp/{host_config.ports['helper-0']}"],
        identity=identity_path(run_dir, "helper-0"),
        gate=host_gate_with_pass(run_dir, settings, "helper-0"),
    )
    begin_host_admission(node, run_dir, settings, "helper-0")
    offer_run(node, run_dir)
    return node


def fetched_by(address):
    """The settings that a newcomer gets who has this address alone; None while nobody answers there."""
    with contextlib.suppress(ValueError):
        dht = open_dht([address], client_mode=True, only_asks=True)
        try:
            return fetch_run(dht, address).settings
        finally:
            dht.shutdown()
