"""What a page makes of an address, and of a model that the engine has replaced, without an engine."""

import copy
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice

import pytest

pytest.importorskip("ray.serve", reason="pip install 'dalle-lean[serve]'")

from dalle_lean.errors import UserError
from demo.serve.client import Engine, EngineAway, RemoteService
from demo.service.drawing_service import Queued
from inference.request import Request, Settings


class Metrics(BaseHTTPRequestHandler):
    """Answers every path with text, as Prometheus exporters do."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"# HELP prompts\nprompts 3\n")

    def log_message(self, *_):
        pass


@contextmanager
def served():
    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_address_of_another_server_is_called_no_engine():
    with served() as address, pytest.raises(UserError, match=f"{address} is no engine"):
        RemoteService(address)


@pytest.mark.parametrize("address", ["http://gpu:80a0", "http://[::1"])
def test_an_address_that_is_none_is_a_users_mistake(address):
    with pytest.raises(UserError, match="--serve http"):
        RemoteService(address)


@pytest.fixture
def description(monkeypatch, description):
    """It may be changed, and a page asks for it."""
    monkeypatch.setattr(Engine, "ask", lambda self, method, path: copy.deepcopy(description))
    return description


def test_a_page_notices_a_model_of_which_only_the_guidance_has_changed(description):
    service = RemoteService("http://127.0.0.1:1")
    before = service.generator
    service.refresh()
    assert service.generator is before
    description["content"] = description["content"] | {"guidance": 3.0}
    service.refresh()
    assert service.generator.guidance == 3.0


def test_a_prompt_whose_answer_breaks_off_again_and_again_is_given_up(description, monkeypatch):
    sent = []

    def answer(self, request):
        sent.append(request)
        yield Queued(1, 1.0)
        raise EngineAway("its answer broke off")

    monkeypatch.setattr(RemoteService, "answer", answer)
    monkeypatch.setattr("demo.serve.client.RETRY_INTERVAL_S", 0.0)
    monkeypatch.setattr("demo.serve.client.MOST_BREAKS", 3)
    service = RemoteService("http://127.0.0.1:1")
    with pytest.raises(UserError, match="the engine is away: its answer broke off"):
        list(islice(service.draw(Request("a red heart", Settings())), 20))
    assert len(sent) == 3


def test_the_estimate_before_the_engine_answers_counts_guidance(description, monkeypatch):
    monkeypatch.setattr(RemoteService, "answer", lambda self, request: iter(()))
    service = RemoteService("http://127.0.0.1:1")
    plain, guided = (next(service.draw(Request("a red heart", Settings(guidance=scale)))) for scale in (1.0, 2.0))
    assert guided.seconds > plain.seconds
