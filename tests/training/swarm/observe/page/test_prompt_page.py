"""The prompt page behind the run's page."""

import http.server
import shutil
import threading
import urllib.request

import pytest

pytest.importorskip("hivemind")
pytest.importorskip("gradio")

from types import SimpleNamespace

from tests.inference.tiny_model import save_tiny_model
from tests.serving import serving
from tests.training.swarm.harness import wait_for
from tests.training.swarm.observe.page.simulated import checkpoint
from training.swarm.observe.page import prompt_page as pages
from training.swarm.observe.page.prompt_page import PromptPage
from training.swarm.observe.page.server import served

READY_S = 240


class Echo(http.server.BaseHTTPRequestHandler):
    """Echoes the request in two chunks; the second waits for `may_end`."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        first = f"{self.command} {self.path} {self.headers['Host']} {self.headers['Accept-Encoding']} ".encode() + body
        self.send_response(201)
        self.send_header("X-Own", "kept")
        self.send_header("Content-Length", str(len(first) + 3))
        self.end_headers()
        self.wfile.write(first)
        self.wfile.flush()
        assert self.server.may_end.wait(60)
        self.wfile.write(b"end")

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def behind(tmp_path):
    """A server in place of the prompt page, and the address of the run's page in front of it."""
    echo = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    echo.may_end = threading.Event()
    started = SimpleNamespace()
    (tmp_path / "page").mkdir()
    with serving(echo) as started.url, served(tmp_path / "page", "127.0.0.1:0", started) as url:
        yield echo, started, url


def test_visitors_are_passed_on_and_pieces_arrive_as_they_come(behind):
    echo, _, url = behind
    request = urllib.request.Request(
        f"{url}draw/a%20b?x=1", data=b"a red heart", headers={"Accept-Encoding": "identity"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        expected = f"POST /a%20b?x=1 {url.split('/')[2]} identity a red heart".encode()
        assert answer.read(len(expected)) == expected  # before the second piece is sent
        echo.may_end.set()
        assert answer.read() == b"end"
        assert (answer.status, answer.headers["X-Own"]) == (201, "kept")
        assert "Content-Security-Policy" not in answer.headers


def test_nothing_outside_of_its_path_is_passed_on(behind):
    _, _, url = behind
    for path in ("", "drawn", "x/draw/"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url + path, timeout=60)


@pytest.mark.parametrize(("at", "code"), [(None, "503"), ("http://127.0.0.1:9", "502")])
def test_a_prompt_page_that_does_not_answer_is_an_answer(behind, at, code):
    _, started, url = behind
    started.url = at
    with pytest.raises(urllib.error.HTTPError, match=code):
        urllib.request.urlopen(f"{url}draw/", timeout=60)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A prompt page, not at the lowest priority, with its notices."""
    monkeypatch.setattr("training.swarm.observe.page.gallery.LOW_PRIORITY", ())
    notices = []
    page = PromptPage(tmp_path / "prompt-page", notices.append)
    page.notices = notices
    yield page
    page.close()


def empty_checkpoint(folder, step=100):
    """A checkpoint with which no program can draw."""
    (folder / "model").mkdir(parents=True)
    return checkpoint(folder, step)


def test_without_memory_there_is_none_and_that_is_said_once(page, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "PROGRAM_BYTES", 10**15)
    for _ in range(2):
        page.due_s = 0.0
        page.poll(checkpoint(tmp_path))
    assert page.url is None
    assert page.notices == ["no prompt page: it needs 1000000.0 GB of free memory"]


@pytest.mark.long
def test_one_that_cannot_start_is_said_once_and_tried_again_later(page, tmp_path):
    newest = empty_checkpoint(tmp_path / "empty")
    page.poll(newest)
    for _ in range(2):
        first = page.process
        first.wait(timeout=READY_S)
        page.poll(newest)
        assert page.process is first
        page.due_s = 0.0
        page.poll(newest)
        assert page.process is not first
    [notice] = page.notices
    assert notice.startswith("the prompt page on step 100 has ended: ")
    assert "config.json" in notice


def test_a_checkpoint_that_is_removed_before_it_is_read_is_said_and_the_next_one_taken_at_once(page, tmp_path):
    page.poll(checkpoint(tmp_path / "removed"))
    assert page.process is None
    page.poll(empty_checkpoint(tmp_path / "later", 200))
    assert page.process is not None
    [notice] = page.notices
    assert notice.startswith("no prompt page on step 100: ")


def test_one_that_has_ended_keeps_no_checkpoint_on_the_disk(page, tmp_path):
    page.poll(empty_checkpoint(tmp_path / "empty"))
    assert (page.folder / "model").exists()
    page.close()
    assert not (page.folder / "model").exists()


@pytest.mark.browser
@pytest.mark.timeout(600)
def test_the_newest_checkpoint_draws_in_the_browser(browser, page, tmp_path):
    (step := tmp_path / "step").mkdir()
    newest = checkpoint(save_tiny_model(step).parent)
    (tmp_path / "page").mkdir()
    page.poll(newest)
    shutil.rmtree(newest.folder)  # by the donor, while the page starts
    wait_for(lambda: page.url, READY_S, "the prompt page")
    with served(tmp_path / "page", "127.0.0.1:0", page) as url:
        view = browser.new_page()
        view.set_default_timeout(1000 * READY_S)
        asked, errors = [], []
        view.on("request", lambda request: asked.append(request.url))
        view.on("pageerror", lambda error: errors.append(str(error)))
        view.goto(f"{url}draw/?prompt=a+red+heart")
        view.locator("#gallery img").first.wait_for()
        assert errors == []
        assert [at for at in asked if not at.startswith((f"{url}draw/", "data:", "blob:"))] == []
        view.close()
    assert page.notices == []
