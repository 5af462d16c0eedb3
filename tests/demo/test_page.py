"""The page as served: what it loads, where it listens, whom it lets in."""

import asyncio
import itertools
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import gradio as gr
import pytest
import uvicorn
from fastapi import FastAPI

from dalle_lean.cli import main
from demo.server import PatientServer, free_port, launch, read_auth, read_card, read_root_path, serve_calculator
from tests.children import PROGRAM, kill_family, start
from tests.demo.conftest import own_port, served


def get(url):
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.read().decode()


def test_the_page_is_served_and_asks_no_other_host(page_url):
    text = get(page_url)
    assert "dalle_lean" in text
    loaded = re.findall(r'<(?:script|link)[^>]*(?:src|href)="(https?://[^"]+)"', text)
    preconnect = re.findall(r'<link[^>]*rel="preconnect"[^>]*>', text)
    assert [address for address in loaded if not any(address in tag for tag in preconnect)] == []


def test_a_page_gets_no_public_address_unless_it_is_asked_for(monkeypatch):
    launched = {}
    monkeypatch.setattr("gradio.Blocks.launch", lambda _, **options: launched.update(options))
    serve_calculator()
    assert launched["share"] is False


def test_a_machine_may_be_too_busy_to_start_a_server_in_the_time_that_gradio_gives_it(monkeypatch):
    start = uvicorn.Server.startup

    async def slow(server, sockets=None):
        await asyncio.sleep(0.2)
        await start(server, sockets)

    hours = itertools.count(step=3600)
    clock = SimpleNamespace(time=lambda: next(hours), sleep=time.sleep)
    monkeypatch.setattr("uvicorn.Server.startup", slow)
    monkeypatch.setattr("gradio.http_server.time", clock)
    with gr.Blocks() as page:
        gr.Markdown("late, but here")
    launch(page, "127.0.0.1", own_port(18460))
    try:
        assert "late, but here" in get(page.local_url)
    finally:
        page.close(verbose=False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_cannot_listen_does_not_wait(taken_port):
    config = uvicorn.Config(FastAPI(), port=taken_port, log_level="critical")
    with pytest.raises(OSError, match="ended before it started"):
        PatientServer(config).run_in_thread()


def test_the_model_card_has_an_address_of_its_own(page_url):
    assert "with random weights" in get(page_url + "card")


def test_a_password_is_asked_for(service):
    from gradio_client import Client
    from gradio_client.exceptions import AuthenticationError

    with served(service, auth=("me", "secret")) as url:
        with pytest.raises(AuthenticationError):
            Client(url, verbose=False, analytics_enabled=False)
        client = Client(url, auth=("me", "secret"), verbose=False, analytics_enabled=False)
        pictures, _ = client.predict("a red heart", num_images=6, best=2, api_name="/draw")
        assert len(pictures) == 2


def test_behind_a_proxy_the_page_knows_its_path(service):
    with served(service, root_path="/dalle") as url:
        assert '/dalle"' in get(url)


ROOT_PATHS = {None: None, "/": "", "/a/b/": "/a/b", "https://a.org/dalle/": "https://a.org/dalle"}
ROOT_PATHS |= dict.fromkeys(("/dalle", "dalle", "/dalle/", "dalle/"), "/dalle")


@pytest.mark.parametrize(("path", "read"), ROOT_PATHS.items())
def test_a_root_path_may_be_none_the_root_a_whole_address_or_a_path_however_it_is_written(path, read):
    assert read_root_path(path) == read


@pytest.mark.parametrize("auth", ["me", "me:", ":secret", ""])
def test_half_a_login_is_refused(auth):
    with pytest.raises(ValueError, match="USER:PASSWORD"):
        read_auth(auth)


def test_a_password_may_hold_colons():
    assert read_auth("me:a:b") == ("me", "a:b")
    assert read_auth(None) is None


def test_a_taken_port_is_answered_with_the_next_free_one(taken_port):
    port = free_port("127.0.0.1", taken_port)
    assert taken_port < port < taken_port + 20


def test_a_page_moves_on_if_another_program_takes_its_port_before_it_starts(taken_port, monkeypatch):
    freed = iter([taken_port])  # free when asked, taken when used
    monkeypatch.setattr("demo.server.free_port", lambda *asked: next(freed, None) or free_port(*asked))
    with gr.Blocks() as page:
        gr.Markdown("here")
    launch(page, "127.0.0.1", taken_port)
    try:
        assert taken_port < page.server_port < taken_port + 20
        assert "here" in get(page.local_url)
    finally:
        page.close(verbose=False)


def test_no_free_port_is_one_line_and_exit_code_2(model_folder, taken_port, capsys, monkeypatch):
    monkeypatch.setattr("demo.server.free_port.__defaults__", (1, "--port"))
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--model", str(model_folder), "--port", str(taken_port)])
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said == (f"error: cannot listen on 127.0.0.1: port {taken_port} is taken; choose another with --port")


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [["demo", "--device", "cpu", "--model"], pytest.param(["calculator", "--page", "paper"], marks=pytest.mark.slow)],
)
def test_ctrl_c_ends_a_page_as_it_ends_every_command(command, model_folder):
    folder = [str(model_folder)] if command[-1] == "--model" else []
    port = ["--port", str(own_port(18960))]
    process = start([*PROGRAM, *command, *folder, *port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while "(Ctrl+C ends it)" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "stopped\n")
        assert process.returncode == 130
    finally:
        kill_family(process)


def test_an_address_that_is_not_this_machines_is_one_line_and_exit_code_2(model_folder, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--model", str(model_folder), "--host", "192.0.2.1"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: cannot listen on 192.0.2.1, port 7860:")


def test_of_the_card_only_what_can_be_shown_is_left(tmp_path):
    assert read_card(tmp_path) == ""
    text = "---\nlicense: mit\n---\n# Emoji\n\n![drawn](pictures.png)\nSee [there](../a.md), [here](https://b.org)\n"
    (tmp_path / "README.md").write_text(text)
    assert read_card(tmp_path) == "# Emoji\n\nSee there, [here](https://b.org)"
