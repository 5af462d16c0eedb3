"""The monitor: contributions, its outputs, and the command that shows and writes a run."""

import json
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("hivemind")

import psutil

from dalle_lean.io.files import write_json
from dalle_lean.tokenizer import Tokenizer
from tests.children import PROGRAM
from tests.training.swarm.harness import wait_for
from tests.training.swarm.host.small_run import run_program
from tests.training.swarm.nursery import is_alive
from tests.training.swarm.observe.test_overview import SETTINGS, overview, record
from training.commands.monitor import duration, end_of, table_of
from training.run.folder import LOCK, run_folder
from training.run.metrics import NAME as METRICS
from training.run.metrics import read_metrics
from training.swarm.averaging.attestation import Attestation, Credit
from training.swarm.config import write_settings
from training.swarm.host.checkpoints import HASHED_FILES
from training.swarm.network.addresses import peer_id_in, peer_of
from training.swarm.network.bootstrap_service import PUBLIC, credits_name, offer_run
from training.swarm.network.dht import open_dht
from training.swarm.observe.leaderboard import CONTRIBUTIONS, Leaderboard
from training.swarm.observe.monitor import SILENT_POLLS, Monitor, Outputs
from training.swarm.observe.peer_metrics import PeerMetrics, PeerRecords, Publisher, record_validators

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_contributions_outlive_restarts_of_peers_and_of_the_monitor(tmp_path):
    def board():
        return Leaderboard(tmp_path / CONTRIBUTIONS, "run")

    board().update({"a": record(samples=100, started=0.0, time=10.0)})
    board().update({"a": record(samples=150, started=0.0, time=20.0, user="Ada")})
    board().update({"a": record(samples=30, started=25.0, time=30.0), "b": record(samples=20)})
    board().update({"a": record(samples=60, started=25.0, time=40.0)})
    assert [(peer, one.total_samples) for peer, one in board().ranked()] == [("a", 150 + 60), ("b", 20)]


def test_what_helpers_averaged_comes_before_what_is_claimed(tmp_path):
    board = Leaderboard(tmp_path / CONTRIBUTIONS, "run")
    board.update({"liar": record(samples=2**50), "a": record(samples=90)}, {"a": Credit(samples=80.0, seconds=60.0)})
    for kept in (board, Leaderboard(tmp_path / CONTRIBUTIONS, "run")):
        [(first, one), (second, other)] = kept.ranked()
        assert (first, one.averaged_samples, one.averaged_s, one.total_samples) == ("a", 80.0, 60.0, 90)
        assert (second, other.averaged_samples) == ("liar", 0.0)


def test_the_table_shows_what_was_averaged_beside_what_is_claimed(tmp_path):
    board = Leaderboard(tmp_path / CONTRIBUTIONS, "run")
    records = {"liar": record(samples=5000), "a": record(samples=90, user="Ada")}
    board.update(records, {"a": Credit(samples=80.0, seconds=5400.0)})
    columns = {column.header: list(column.cells) for column in table_of(board, PeerRecords(records, 0)).columns}
    assert columns["samples"] == ["80", "0"]
    assert columns["share"] == ["100.0%", "0.0%"]
    assert columns["hours"] == ["1.5", "0.0"]
    assert columns["claimed"] == ["90", "5,000"]


def test_a_peer_that_has_left_is_away_in_the_table(tmp_path):
    board = Leaderboard(tmp_path / CONTRIBUTIONS, "run")
    records = {"a": record(samples=90), "b": record(samples=80, role="left")}
    board.update(records)
    columns = {column.header: list(column.cells) for column in table_of(board, PeerRecords(records, 0)).columns}
    assert (columns["claimed"], columns["samples/s"]) == (["90", "80"], ["4.0", "away"])


def test_made_up_identities_do_not_make_the_board_grow(tmp_path, monkeypatch):
    monkeypatch.setattr("training.swarm.observe.leaderboard.MOST_CONTRIBUTORS", 3)
    board = Leaderboard(tmp_path / CONTRIBUTIONS, "run")
    board.update({"a": record(samples=1)}, {"a": Credit(samples=1.0)})
    board.update({f"x{number}": record(samples=2**50) for number in range(10)})
    assert len(board.peers) == 3
    assert board.ranked()[0][0] == "a"


def test_an_old_record_adds_nothing(tmp_path):
    board = Leaderboard(tmp_path / CONTRIBUTIONS, "run")
    board.update({"a": record(samples=100, started=50.0, time=60.0)})
    board.update({"a": record(samples=900, started=0.0, time=40.0)})
    assert board.ranked()[0][1].total_samples == 100


def test_the_board_of_another_run_is_refused(tmp_path):
    Leaderboard(tmp_path / CONTRIBUTIONS, "one").update({"a": record()})
    with pytest.raises(ValueError, match=r"'one'.*--out"):
        Leaderboard(tmp_path / CONTRIBUTIONS, "two")


def steps_in(out):
    return [line["step"] for line in read_metrics(out / METRICS)]


def write_steps(out, steps, run_id="run-1"):
    outputs = Outputs(out)
    for step in steps:
        outputs.write(overview(record(step=step)), run_id)
    outputs.close()


def test_a_restarted_monitor_goes_on_in_its_files(tmp_path):
    write_steps(tmp_path, [1, 2, 2, 1, 3])
    write_steps(tmp_path, [2, 3, 4, 6])
    assert steps_in(tmp_path) == [1, 2, 3, 4, 6]
    assert list((tmp_path / "tensorboard").iterdir())
    line = read_metrics(tmp_path / METRICS)[0]
    assert (line["loss"], line["peers"], line["samples_per_s"]) == (2.0, 1, 32.0)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_run_that_was_taken_back_goes_on_from_its_checkpoint(tmp_path, restarted):
    write_steps(tmp_path, [1, 2, 3, 4])
    outputs = Outputs(tmp_path)
    if not restarted:
        outputs.write(overview(record(step=5)), "run-1")
    for step in (3, 4):
        outputs.write(overview(record(step=step, loss=1.0)), "run-2")
    outputs.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path / METRICS)] == [
        (1, 2.0),
        (2, 2.0),
        (3, 1.0),
        (4, 1.0),
    ]


def test_weights_and_biases_gets_each_step(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    outputs = Outputs(tmp_path, wandb_project="swarm")
    outputs.write(overview(record(step=1)), "run-1")
    outputs.write(overview(record(step=2)), "run-1")
    outputs.close()
    [run] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert run.stat().st_size
    assert b"reported_samples_per_s" in run.read_bytes()


def test_without_weights_and_biases_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"dalle-lean\[wandb\]"):
        Outputs(tmp_path, wandb_project="swarm")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 min"), (3000, "50 min"), (3600, "1 h 0 min"), (100_000, "1 d 3 h")]
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


@contextmanager
def helping(folder, settings, listen="/ip4/127.0.0.1/tcp/0"):
    """The address of a helper that serves the run's files from `folder`."""
    folder.mkdir(exist_ok=True)
    Tokenizer.train(["a red heart"], 300).save(folder / "tokenizer.json")
    helper = open_dht([], client_mode=False, listen=[listen], identity=folder / "helper")
    try:
        address = str(helper.get_visible_maddrs()[0])
        settings = replace(settings, swarm=replace(settings.swarm, addresses=(address,)))
        write_settings(folder / "swarm.toml", settings)
        offer_run(helper, folder)
        helper.add_validators(record_validators(settings.run_id))
        yield address
    finally:
        helper.shutdown()


@contextmanager
def published(identity, address, settings, samples=100):
    """A peer named like its identity file that has published at step 7."""
    node = open_dht([address], client_mode=True, identity=identity)
    peer = Publisher(node, settings.run_id, user=identity.name)
    try:
        peer.publish(PeerMetrics(epoch=7, loss=1.5, samples=samples, samples_per_s=8.0))
        wait_for(lambda: peer.published, 60, "publishing")
        yield
    finally:
        peer.close()
        node.shutdown()


@pytest.fixture
def run(tmp_path):
    """A run's helper that serves its files, and two peers that publish; the helper's address and the run's folder."""
    with ExitStack() as stack:
        folder = tmp_path / "run"
        address = stack.enter_context(helping(folder, SETTINGS))
        for name, samples in {"Ada": 300, "Grace": 100}.items():
            stack.enter_context(published(tmp_path / name, address, SETTINGS, samples))
        yield address, folder


@pytest.mark.swarm
@pytest.mark.parametrize("by", ["address", "file"])
def test_the_command_shows_and_writes_a_run(run, tmp_path, capsys, by):
    address, folder = run
    out = tmp_path / "out"
    Attestation(folder / PUBLIC / credits_name(peer_of(address))).add({peer_id_in(tmp_path / "Ada"): 256.0})
    assert run_program("monitor", address if by == "address" else str(folder), "--out", str(out), "--once") == 0
    shown = capsys.readouterr().out
    assert "step 7 of 100 · loss 1.5000 · 1 trainer (1 in client mode) · 8.0 samples/s, as reported by peers" in shown
    assert re.search(r"Ada.* 256 .* 100\.0% .* 300 ", shown)
    assert steps_in(out) == [7]
    board = json.loads((out / CONTRIBUTIONS).read_text())
    assert sorted(peer["samples"] for peer in board["peers"].values()) == [100, 300]


@pytest.mark.swarm
def test_a_single_look_beside_another_monitor_shows_the_run_and_leaves_its_files_alone(run, tmp_path, capsys):
    address, out = run[0], tmp_path / "out"
    Leaderboard(out / CONTRIBUTIONS, "monitored").update({"gone": record(samples=55, user="Emmy")})
    (out / LOCK).touch()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with run_folder(out):
        assert run_program("monitor", address, "--out", str(out), "--once") == 0
        assert re.search(r"Emmy.* 55 ", capsys.readouterr().out)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert run_program("monitor", address, "--out", str(out)) == 2
    assert "another process works" in (line := capsys.readouterr().err.splitlines()[-1])
    assert line.endswith("name another folder with --out")


@pytest.mark.swarm
def test_the_command_says_why_nobody_trains(tmp_path, capsys):
    with helping(tmp_path / "run", SETTINGS) as address:
        assert run_program("monitor", address, "--out", str(tmp_path / "out"), "--once") == 0
    assert capsys.readouterr().out.startswith("no trainers at the moment\n")


@pytest.mark.swarm
def test_the_page_of_a_run_says_what_its_helper_averaged(tmp_path, capsys):
    pytest.importorskip("gradio")
    folder, out, site = tmp_path / "run", tmp_path / "out", tmp_path / "site"
    model = SETTINGS.recipe.model_config(image_side=4, image_vocab_size=32, text_vocab_size=300).to_dict()
    settings = replace(SETTINGS, recipe=replace(SETTINGS.recipe, model=model))
    with helping(folder, settings) as address, published(tmp_path / "Ada", address, settings, 300):
        peer = peer_id_in(tmp_path / "Ada")
        Attestation(folder / PUBLIC / credits_name(peer_of(address))).add({peer: 64.0})
        code = run_program("monitor", address, "--out", str(out), "--once", "--export", str(site))
    assert code == 0, capsys.readouterr()
    run = json.loads((site / "run.json").read_text())
    [ada] = run["peers"]
    assert (ada["peer"], ada["name"], ada["samples"], ada["claimed_samples"]) == (peer, "Ada", 64, 300)
    assert (run["attested"], run["overview"]["step"], run["join"]) == (True, 7, address)
    assert (site / "index.html").exists()


def test_a_page_is_not_served_once(capsys):
    assert run_program("monitor", "swarm.toml", "--once", "--page") == 2
    assert "leave out one of them" in capsys.readouterr().err


@pytest.mark.swarm
def test_a_monitor_finds_a_run_again_whose_helper_was_away_and_that_was_taken_back(tmp_path):
    notices = []
    with ExitStack() as stack:
        with helping(tmp_path, SETTINGS) as address:
            monitor = stack.enter_context(closing(Monitor([address], notices.append)))
            assert monitor.poll()[1] is None
        assert monitor.poll()[1] is None
        later = replace(SETTINGS, swarm=replace(SETTINGS.swarm, data_fingerprint="another"))
        assert stack.enter_context(helping(tmp_path, later, address.split("/p2p/")[0])) == address
        stack.enter_context(published(tmp_path / "peer", address, later))
        found = [monitor.poll()[1] for _ in range(SILENT_POLLS)]
    assert found[-1].step == 7
    assert f"the run continues as {later.run_id}" in notices


@pytest.mark.slow
@pytest.mark.swarm
@pytest.mark.parametrize(
    ("ending", "code", "said"), [(signal.SIGINT, 130, "stopped"), (signal.SIGTERM, 143, "stopped by SIGTERM")]
)
def test_a_monitor_goes_on_until_ended_even_in_a_shells_background_and_leaves_nothing_behind(
    run, tmp_path, ending, code, said
):
    command = [*PROGRAM, "monitor", run[0], "--out", str(tmp_path / "out"), "--interval-s", "1"]
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as shells do for background processes
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=ignore, **pipes) as monitor:
        lines = [monitor.stdout.readline() for _ in range(3)]
        children = psutil.Process(monitor.pid).children(recursive=True)
        monitor.send_signal(ending)
        errors = monitor.communicate(timeout=60)[1]
    assert all(line.startswith("step 7 of 100") for line in lines)
    assert (monitor.returncode, errors) == (code, f"connecting to {run[0]}, up to 15 s ...\n{said}\n")
    assert steps_in(tmp_path / "out") == [7]
    assert children
    wait_for(lambda: not any(map(is_alive, children)), 10, f"the end of {children}")


@pytest.mark.swarm
def test_a_run_that_nobody_answers_for_is_one_line(tmp_path, capsys):
    assert run_program("monitor", NOBODY, "--out", str(tmp_path / "out"), "--once") == 2
    waits, mistake = capsys.readouterr().err.splitlines()
    assert waits == f"connecting to {NOBODY}, up to 15 s ..."
    assert "cannot join the swarm" in mistake
    assert "A run that is finished has no host any more" in mistake


@pytest.mark.parametrize("named", [["run"], ["run/swarm.toml"], [NOBODY, "--run-dir", "run"]])
def test_the_folder_of_a_finished_run_tells_how_it_ended(tmp_path, monkeypatch, capsys, named):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    write_settings(Path("run/swarm.toml"), SETTINGS)
    checkpoint = Path(f"run/checkpoints/step-{SETTINGS.total_steps:06d}")
    write_json(
        checkpoint / "checkpoint.json",
        {
            "step": SETTINGS.total_steps,
            "run": SETTINGS.run_id,
            "heldout_loss": 1.5,
            "saved_at": 0.0,
            "sha256": dict.fromkeys(HASHED_FILES, ""),
        },
    )
    assert run_program("monitor", *named, "--once") == 0
    said = capsys.readouterr()
    assert said.out == f"finished: all 100 steps are done; the model is in {checkpoint}/model\n"
    Path("run", LOCK).touch()
    with run_folder(Path("run")):
        assert end_of(Path("run")) is None
    write_settings(Path("run/swarm.toml"), replace(SETTINGS, recipe=SETTINGS.recipe.override(steps=200)))
    assert end_of(Path("run")) is None


README = str(Path(__file__).parents[4] / "README.md")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["monitor", NOBODY, "--page", "--page-address", "7870"], "cannot serve the page at '7870'"),
        (["monitor", NOBODY, "--page-address", "0.0.0.0:7870"], "where --page listens: add --page"),
        (["monitor", NOBODY, "--prompt-page", ""], "add --page or --export"),
        (["host", "run", "--prompt-page", "https://example.org"], "add --page or --export"),
        (["monitor", NOBODY[:-1], "--once"], "ends in a whole peer id; copy all of it"),
        (["monitor", "/ip4/127.0.0.1/tcp/9"], "it looks like /ip4/203.0.113.5/tcp/31337/p2p/Qm"),
        (
            ["monitor", README],
            "it has no section [swarm]; name a run's swarm.toml, its folder",
        ),
        (["doctor", README], "README.md is no swarm.toml"),
        (["doctor", NOBODY[:-1]], "copy all of it"),
        (["doctor", NOBODY, "--client", "--listen", "31337"], "--client accepts no connections"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_tried(command, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_program(*command) == 2
    said = capsys.readouterr()
    assert said.out == ""
    [line] = said.err.splitlines()
    assert words in line
