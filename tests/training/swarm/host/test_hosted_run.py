"""`dalle-lean host` with real processes on loopback."""

import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import subprocess
import time
from functools import partial

import psutil
import pytest

from dalle_lean import load_model
from tests.children import PROGRAM, kill_family
from tests.training.swarm.host.small_run import ON_LOOPBACK, PATIENCE_S, Hosted, make, run_program, until
from tests.training.swarm.nursery import is_alive
from training.swarm.admission.keys import SigningKey
from training.swarm.admission.passes import Invite
from training.swarm.admission.service import enter_by_pass
from training.swarm.averaging.attestation import parse_credits
from training.swarm.config import read_settings, write_settings
from training.swarm.host.checkpoints import list_checkpoints
from training.swarm.host.host_config import HostConfig, identity_path, peer_id
from training.swarm.host.host_gate import begin_host_admission, host_gate_with_pass, run_key_file
from training.swarm.host.run_setup import make_helper
from training.swarm.network.addresses import free_ports
from training.swarm.network.bootstrap_service import PUBLIC, fetch_run, offer_run
from training.swarm.network.dht import open_dht
from training.swarm.peer.gradient_worker import build_model

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def hosted(shards, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("hosted") / "run"
    make(run_dir, shards)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with Hosted(run_dir, "--page", "--page-address", address) as hosted:
        until("the host", lambda: hosted.said("dalle-lean join"))
        hosted.trainer = hosted.train("trainer")
        yield hosted


@pytest.mark.long
@pytest.mark.swarm
def test_the_line_for_volunteers_names_the_data_that_they_need(running):
    data = read_settings(running.run_dir).swarm.data
    assert f" --data {data}" in running.output.read_text().replace("\n", "")


@pytest.mark.long
@pytest.mark.swarm
def test_a_hosted_run_that_is_joined_takes_steps_and_keeps_checkpoints(running):
    until("step 2", lambda: running.step() >= 2)
    checkpoint = until("a checkpoint", lambda: list_checkpoints(running.run_dir, print))[0]
    checkpoint.check()
    assert 0 < checkpoint.heldout_loss < 10


@pytest.mark.long
@pytest.mark.swarm
def test_of_two_helpers_that_average_a_step_one_counts_its_samples(running):
    def credits():
        paths = (running.run_dir / PUBLIC).glob("attested-*.json")
        return [credit for path in paths for credit in parse_credits(path.read_text()).values()]

    until("five steps of both", lambda: len(credits()) == 2 and min(one.samples for one in credits()) >= 5 * 32)
    most = max(credit.samples for credit in credits())
    assert most / 2 < sum(credit.counted_samples for credit in credits()) < 1.5 * most


@pytest.mark.slow
@pytest.mark.swarm
def test_a_killed_helper_comes_back_as_the_same_peer(running):
    settings, before = read_settings(running.run_dir), running.step()
    killed = running.status("helper-0")["pid"]
    os.kill(killed, signal.SIGKILL)
    until("another process", lambda: running.status("helper-0").get("pid", killed) != killed)
    # libp2p verifies the peer id at the end of the address.
    until("the helper", lambda: HostConfig.load(running.run_dir).is_up("helper-0"))
    assert until("its files", lambda: fetched_by(settings.swarm.addresses[0]), 30) == settings
    assert running.said("helper-0 ended (killed by signal 9); it restarts in 1 s as the same peer")
    until("a step after it", lambda: running.step() > before)


@pytest.mark.slow
@pytest.mark.swarm
def test_a_killed_donor_goes_on_with_the_others(running):
    killed = until("the donor", lambda: running.status("donor-0").get("pid"))
    before = running.step()
    os.kill(killed, signal.SIGKILL)
    until("another process", lambda: running.status("donor-0").get("pid", killed) != killed)
    until("a later step", lambda: running.step() > before)


@pytest.mark.long
@pytest.mark.swarm
def test_kill_9_of_the_host_leaves_no_process(running):
    processes = psutil.Process(running.host.pid).children(recursive=True)
    assert len(processes) > 6
    running.host.kill()
    running.host.wait()
    until("the end of all", lambda: not any(is_alive(process) for process in processes), 15)


@pytest.mark.slow
@pytest.mark.swarm
def test_all_train_on_from_the_model_that_a_run_was_given(shards, given_model, tmp_path):
    settings = make(tmp_path / "run", shards, init=given_model)
    with Hosted(tmp_path / "run") as hosted:
        until("the host", lambda: hosted.said("dalle-lean join"))
        trainer = hosted.train("trainer")
        until("step 3", lambda: hosted.step() >= 3 or trainer.poll() is not None)
        newest = until("a checkpoint", lambda: list_checkpoints(tmp_path / "run", print)[1:])[-1]
        given, seeded = load_model(given_model).output.weight, build_model(settings).output.weight
        now = load_model(newest.folder / "model").output.weight
        assert 0 < (now - given).norm() < 0.2 * (now - seeded).norm()


@pytest.mark.slow
@pytest.mark.swarm
def test_a_host_that_was_away_for_the_last_steps_gets_their_state_from_a_trainer_that_stays(shards, tmp_path):
    make(tmp_path / "run", shards, steps=12)
    with Hosted(tmp_path / "run") as hosted:
        until("the host", lambda: hosted.said("dalle-lean join"))
        trainer = hosted.train("trainer", "--listen", str(free_ports(1)[0]), "--announce", "127.0.0.1")
        until("step 3", lambda: hosted.step() >= 3 or trainer.poll() is not None)
        hosted.host.send_signal(signal.SIGINT)
        assert hosted.host.wait(PATIENCE_S) == 130
        [*_, saved] = list_checkpoints(hosted.run_dir, print)
        assert saved.step < 11
        trained = tmp_path / "trainer.out"
        until("the last step", lambda: "the last step is done; staying until the host has it" in trained.read_text())
        hosted.output.unlink()
        again = hosted.start("host", str(hosted.run_dir), output=hosted.output)
        assert again.wait(PATIENCE_S) == trainer.wait(PATIENCE_S) == 0
        assert hosted.said(f"this peer is at step {saved.step}, and most trainers are at the last one, 12")
        assert hosted.said("finished at step 12")
        assert list_checkpoints(hosted.run_dir, print)[-1].step == 12


@pytest.mark.slow
@pytest.mark.swarm
def test_a_host_that_is_interrupted_ends_cleanly_and_goes_on_with_the_same_command(shards, tmp_path):
    make(tmp_path / "run", shards)
    for ending, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with Hosted(tmp_path / "run") as hosted:
            until("the host", lambda hosted=hosted: hosted.said("dalle-lean join"))
            processes = psutil.Process(hosted.host.pid).children(recursive=True)
            hosted.host.send_signal(ending)
            assert hosted.host.wait(PATIENCE_S) == code
            until("the end of all", lambda those=processes: not any(is_alive(process) for process in those), 15)
            assert hosted.said(
                "stopped; only what was finished is kept" if code == 130 else "To go on: dalle-lean host"
            )
        hosted.output.unlink()


@pytest.mark.swarm
def test_a_host_ends_on_sigint_where_its_shell_started_it_with_sigint_ignored(shards, tmp_path):
    make(tmp_path / "run", shards)
    output = tmp_path / "host.out"
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with open(output, "wb") as file:
        command = [*PROGRAM, "host", str(tmp_path / "run")]
        host = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=ignore)
    try:
        until("a peer", lambda: len(psutil.Process(host.pid).children()) > 1 or host.poll() is not None)
        host.send_signal(signal.SIGINT)
        assert host.wait(PATIENCE_S) == 130, output.read_text()
        assert "stopped; only what was finished is kept" in output.read_text()
    finally:
        kill_family(host)


@pytest.mark.parametrize("taken", ["helper-0", "donor-0", "page"])
def test_a_port_that_is_taken_is_said_before_any_peer_is_started(shards, tmp_path, taken, capsys):
    make(tmp_path / "run", shards)
    [page_port] = free_ports(1)
    ports = HostConfig.load(tmp_path / "run").ports | {"page": page_port}
    options = ("--page", "--page-address", f"127.0.0.1:{page_port}") if taken == "page" else ()
    with socket.create_server(("127.0.0.1", ports[taken])):
        assert run_program("host", str(tmp_path / "run"), *options) == 2
    said = capsys.readouterr()
    assert "starting" not in said.out
    assert (f":{page_port}'" if taken == "page" else f"port {ports[taken]} of {taken} is taken") in said.err


def test_a_host_that_is_started_again_serves_its_page_until_it_is_told_not_to(shards, tmp_path, capsys):
    run_dir = tmp_path / "run"
    make(run_dir, shards)
    [page_port] = free_ports(1)
    page = ["--page", "--page-address", f"127.0.0.1:{page_port}"]
    before = dataclasses.replace(HostConfig.load(run_dir), page=page)
    before.save(run_dir)
    for option, taken in (((), page_port), (("--no-page",), before.ports["helper-0"])):
        with socket.create_server(("127.0.0.1", taken)):
            assert run_program("host", str(run_dir), *option) == 2
        said = capsys.readouterr().err
        assert (f":{page_port}'" if taken == page_port else f"port {taken} of helper-0 is taken") in said
        assert HostConfig.load(run_dir).page == ([] if option else page)


def test_a_helper_of_another_run_needs_somebody_who_answers(tmp_path):
    with pytest.raises(ValueError, match=r"no helper at .* serves the run's files"):
        make_helper(tmp_path / "helper", ["/ip4/127.0.0.1/tcp/1/p2p/QmNo"], print, **ON_LOOPBACK)


@pytest.mark.parametrize("option", [("--data", "shards"), ("--donors", "2"), ("--mode", "diloco"), ("--lr", "1e-3")])
def test_a_helper_of_another_run_is_given_nothing_of_a_run_of_its_own(tmp_path, capsys, option):
    address = "/ip4/127.0.0.1/tcp/1/p2p/QmNo"
    assert run_program("host", str(tmp_path / "helper"), "--helper-of", address, *option) == 2
    assert f"leave out {option[0]}" in capsys.readouterr().err
    assert not (tmp_path / "helper").exists()


def test_the_folder_of_a_hosted_run_is_not_made_one_of_a_helper(shards, tmp_path):
    make(tmp_path / "run", shards)
    with pytest.raises(ValueError, match="hosted here"):
        make_helper(tmp_path / "run", ["/ip4/127.0.0.1/tcp/1/p2p/QmNo"], print, **ON_LOOPBACK)


@pytest.mark.slow
@pytest.mark.swarm
def test_one_more_helper_elsewhere_lets_newcomers_in_and_goes_back_with_the_run(shards, tmp_path):
    settings = make(tmp_path / "run", shards, admission="invite")
    node = open_helper(tmp_path / "run")
    address = settings.swarm.addresses[0]
    options = ("--helper-of", address, "--port", "0", "--announce", "127.0.0.1", "--listen", "127.0.0.1")
    options = (*options, "--code", make_code(tmp_path / "run", "helper"))
    with Hosted(tmp_path / "helper", *options) as hosted, contextlib.ExitStack() as ending:
        ending.callback(lambda: node.shutdown())
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


@pytest.mark.long
@pytest.mark.swarm
def test_a_helper_elsewhere_admits_newcomers_while_the_host_is_away(shards, tmp_path):
    settings = make(tmp_path / "run", shards, admission="invite")
    host_node = open_helper(tmp_path / "run")
    addresses = [settings.swarm.addresses[0]]
    trainers, helpers = (make_code(tmp_path / "run", role) for role in ("trainer", "helper"))
    for code, words in (("", "has invited"), (trainers, "code is for a trainer")):
        with pytest.raises(ValueError, match=words):
            make_helper(tmp_path / words, addresses, print, code=code, **ON_LOOPBACK)
    make_helper(tmp_path / "helper", addresses, print, code=helpers, **ON_LOOPBACK)
    elsewhere = open_helper(tmp_path / "helper")
    host_node.shutdown()
    address = HostConfig.load(tmp_path / "helper").address(tmp_path / "helper", "helper-0")
    newcomer = open_dht([address], client_mode=True, must_bootstrap=False)
    code = make_code(tmp_path / "run", "trainer")
    try:
        given = enter_by_pass(newcomer, [address], settings, tmp_path / "newcomer", code=code).own_pass()
    finally:
        newcomer.shutdown()
        elsewhere.shutdown()
    assert (given.role, given.issuer) == ("trainer", peer_id(tmp_path / "helper", "helper-0"))


def make_code(run_dir, role):
    """The code of an invitation for one machine."""
    invite = Invite(id=secrets.token_hex(4), uses=1, ends=int(time.time() + 3600), role=role)
    return invite.code(SigningKey.load(run_key_file(run_dir)))


def open_helper(run_dir):
    """The first helper of the run in this folder, or the helper of another host's run, in this process."""
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
    """The settings that a newcomer gets from this address; None if nobody answers."""
    with contextlib.suppress(ValueError):
        dht = open_dht([address], client_mode=True, must_bootstrap=False)
        try:
            return fetch_run(dht, address).settings
        finally:
            dht.shutdown()
