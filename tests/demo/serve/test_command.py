"""The commands `serve` and `demo --serve` as their users run them."""

import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import psutil
import pytest
from gradio_client import Client

from dalle_lean.cli import main
from dalle_lean.errors import UserError
from tests.children import PROGRAM, kill_family, start
from tests.demo.conftest import own_port

START_S = 300


def wait_for(process, log, words):
    """What the pattern finds in the process's output."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        if found := re.search(words, log.read_text()):
            return found
        time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.fixture
def handlers():
    """Puts the handlers of the signals back that `serve` handles."""
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


def test_a_taken_port_is_said_with_the_option_that_chooses_it(folder, taken_port, capsys):
    with pytest.raises(SystemExit):
        main(["serve", str(folder), "--port", str(own_port(28400)), "--metrics-port", str(taken_port)])
    assert f"port {taken_port} is taken; choose another with --metrics-port" in capsys.readouterr().err


def test_on_a_cluster_a_taken_metrics_port_is_none_of_the_engines(folder, handlers, taken_port, monkeypatch, capsys):
    def start_elsewhere(*given):
        raise UserError("the cluster is away")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("demo.serve.cluster.engine_running", start_elsewhere)
    with pytest.raises(SystemExit):
        main(["serve", str(folder), "--port", str(own_port(28400)), "--metrics-port", str(taken_port)])
    assert "error: the cluster is away" in capsys.readouterr().err


def test_a_reload_that_cannot_read_the_folder_leaves_the_engine_running(folder, handlers, monkeypatch, capsys):
    denied = PermissionError(13, "Permission denied", "model.safetensors")
    failures = iter([denied, OSError("two\nlines"), TimeoutError(), KeyboardInterrupt()])

    def load(folder):
        os.kill(os.getpid(), signal.SIGHUP)
        raise next(failures)

    @contextmanager
    def engine_running(*given):
        os.kill(os.getpid(), signal.SIGHUP)
        yield SimpleNamespace(load=load)

    monkeypatch.setattr("demo.serve.cluster.engine_running", engine_running)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder), "--port", str(own_port(28400)), "--metrics-port", str(own_port(28500))])
    assert ended.value.code == 130
    said = capsys.readouterr().err.splitlines()
    reasons = [words for line in said for words in line.split("the previous model stays: ")[1:]]
    assert reasons == ["[Errno 13] Permission denied: 'model.safetensors'", "two lines", "TimeoutError"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_page_draws_by_the_engine_which_ends_without_a_trace(folder, tmp_path, ending, code):
    port, metrics_port = own_port(28400), own_port(28500)
    ports = ["--port", str(port), "--metrics-port", str(metrics_port)]
    logs = tmp_path / "engine", tmp_path / "page"
    with logs[0].open("w") as output:
        command = [*PROGRAM, "serve", str(folder), "--device", "cpu", *ports]
        engine = start(command, stdout=output, stderr=subprocess.STDOUT)
    page = None
    try:
        address = wait_for(engine, logs[0], r"the engine is at (\S+),")[1]
        with logs[1].open("w") as output:
            command = [*PROGRAM, "demo", "--serve", address, "--port", str(own_port(28800))]
            page = start(command, stdout=output, stderr=subprocess.STDOUT)
        client = Client(wait_for(page, logs[1], r"the prompt page is at (\S+)")[1], verbose=False)
        pictures, facts = client.predict("a red heart", num_images=16, best=3, seed=3, api_name="/draw")
        assert len(pictures) == len(facts["pictures"]) == 3
        engine.send_signal(signal.SIGHUP)
        wait_for(engine, logs[0], "the new model draws")
        assert (
            client.predict("a red heart", num_images=16, best=3, seed=3, api_name="/draw")[1]["pictures"]
            == facts["pictures"]
        )
        family = psutil.Process(engine.pid).children(recursive=True)
        engine.send_signal(ending)
        assert engine.wait(120) == code, logs[0].read_text()
        psutil.wait_procs(family, 20)
        assert [process for process in family if process.is_running()] == []
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/ready")
        assert "Traceback" not in logs[0].read_text()
        assert logs[0].read_text().splitlines()[-1] == ("stopped" if code == 130 else "stopped by SIGTERM")
    finally:
        for process in (engine, page):
            if process is not None:
                kill_family(process)


@pytest.mark.slow
def test_ctrl_c_while_the_engine_starts_is_answered_in_our_words_alone(tmp_path):
    port, metrics_port = own_port(28400), own_port(28500)
    log = tmp_path / "log"
    with log.open("w") as output:
        options = ["--device", "cpu", "--port", str(port), "--metrics-port", str(metrics_port)]
        engine = start([*PROGRAM, "serve", "models/emoji", *options], stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for(engine, log, "waiting for")
        engine.send_signal(signal.SIGINT)
        assert engine.wait(120) == 130
    finally:
        kill_family(engine)
    said = [line for line in log.read_text().splitlines() if not line.startswith(("starting", "waiting for"))]
    assert said == ["the engine has ended", "stopped"]


def test_an_engine_that_is_not_there_is_named_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr("demo.serve.client.PATIENCE_S", 0.5)
    monkeypatch.setattr("demo.serve.client.RETRY_INTERVAL_S", 0.1)
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--serve", "http://127.0.0.1:9"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    everything = " ".join((said.out + said.err).split())
    assert everything.count("no engine answers at http://127.0.0.1:9 yet (") == 1  # told once, however often it tries
    assert "error: no engine answers at http://127.0.0.1:9: " in everything


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["demo", "--serve", "127.0.0.1:8000"], "give the engine's address"),
        (["demo", "--serve", "http://127.0.0.1:8000", "--model", "m"], "--model m: with --serve, pass this to"),
        (["demo", "--serve", "http://127.0.0.1:8000", "--precision", "bf16"], "--precision bf16: with --serve, pass"),
        (["demo", "--serve", "http://127.0.0.1:8000", "--scorer", "none"], "--scorer none: with --serve, pass this to"),
        (["demo", "--serve", "http://127.0.0.1:8000", "--device", "cpu"], "--device cpu: with --serve, pass this to"),
        (["serve", "--replicas", "2", "--max-replicas", "1"], "max_replicas=1 is less"),
        (["serve", "/nowhere"], "no model folder at /nowhere"),
    ],
)
def test_mistakes_are_said_in_a_line(options, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
