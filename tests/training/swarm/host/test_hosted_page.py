"""The page of a real run, hosted and trained by real processes on loopback, in headless Chromium."""

import contextlib
import http.server
import math
import time
import zipfile
from functools import partial

import pytest

pytest.importorskip("gradio")

from dalle_lean import load_model
from dalle_lean.io.files import read_json, sha256_file
from tests.serving import serving
from tests.tiny import tiny_vqgan
from tests.training.conftest import write_shards
from tests.training.swarm.host.small_run import Hosted, make, until
from training.swarm.config import read_settings
from training.swarm.host.checkpoints import list_checkpoints
from training.swarm.network.addresses import free_ports
from training.swarm.network.bootstrap_service import PUBLIC
from training.swarm.observe.page.gallery import heldout_prompts, read_gallery

pytestmark = [pytest.mark.swarm, pytest.mark.browser, pytest.mark.timeout(900)]

PATIENCE_S = 360.0  # of a page that refreshes once a minute: a checkpoint, its pictures, and then the page
READY = "() => document.body.dataset.ready"
LOSS = "Bokeh.documents[0].roots()[0].renderers[0].data_source.data"


@pytest.fixture(scope="module")
def run_dir(browser, tmp_path_factory):
    """A run without end, with the VQGAN of its codes, so that its checkpoints draw; none starts without a browser."""
    folder = tmp_path_factory.mktemp("shown")
    vqgan = tiny_vqgan()
    vqgan.save(folder / "vqgan")
    shards = write_shards(folder / "shards", vqgan=vqgan.fingerprint())
    make(folder / "run", shards, steps=100_000, vqgan=folder / "vqgan")
    return folder / "run"


@pytest.fixture(scope="module")
def hosted(run_dir):
    """The run's host, which serves its page, and a trainer."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with Hosted(run_dir, "--page", "--page-address", address) as hosted:
        hosted.url = f"http://{address}/"
        until("the host", lambda: hosted.said("dalle-lean join"))
        hosted.train("trainer")
        yield hosted


def run_of(page_folder):
    """What the page's run.json says; empty before the first."""
    path = page_folder / "run.json"
    return read_json(path) if path.exists() else {}


def is_complete(run):
    """Whether a page has all that a run can have on it."""
    return (
        run
        and run["overview"]
        and run["samples_in_all"]
        and run["gallery"]["drawn"]
        and run["checkpoint"]
        and run["prompt_page"]
    )


def test_visitors_see_how_it_learns_who_gave_what_and_get_the_newest_model(running, visit, tmp_path):
    folder = running.run_dir / "watch" / "page"
    until("a complete page", lambda: is_complete(run_of(folder)), PATIENCE_S)
    page = visit(running.url, console=True)
    page.wait_for_function(READY)
    tiles = page.locator("#tiles").inner_text().split("\n")
    shown = dict(zip(tiles[::2], tiles[1::2], strict=True))
    assert (shown["Participants"], shown["Held-out loss"] != "–") == ("1", True)
    assert float(shown["Samples/s"].split()[0]) > 0
    step = int(shown["Step"].split(" of ")[0].replace(",", ""))
    assert "dalle-lean join /ip4/127.0.0.1" in page.locator("#line").inner_text()

    page.locator("#loss").scroll_into_view_if_needed()
    page.wait_for_function("() => document.getElementById('loss').firstElementChild")
    page.wait_for_function(f"() => {LOSS}.step?.length")
    steps, losses = page.evaluate(f"[[...{LOSS}.step], [...{LOSS}.loss]]")
    assert len(steps) >= 3
    assert steps == sorted(set(steps))
    assert steps[-1] >= step > 0
    assert all(0 < loss < 10 or math.isnan(loss) for loss in losses)  # at first there is none
    assert 0 < losses[-1] < 10

    assert "averaged into steps" in page.locator("#board-note").inner_text()
    assert page.locator("#board tr").count() == 2
    cells = page.locator("#board tr:nth-child(2) td")
    texts = dict(zip(page.locator("#board th").all_inner_texts(), cells.all_inner_texts(), strict=True))
    # A step's samples may be averaged just before its peers claim them.
    assert 0 < number(texts["Samples"]) <= number(texts["Claimed"]) + 32
    assert texts["Share"] == "100.0 %"
    colours = cells.evaluate_all("cells => cells.map(cell => getComputedStyle(cell).color)")
    assert colours[1] not in colours[5:]  # claims are grey

    name, sha256 = page.evaluate(
        "[document.querySelector('#download').href, document.querySelector('#sha256').innerText]"
    )
    downloaded = tmp_path / "model.zip"
    downloaded.write_bytes(page.request.get(name).body())
    assert sha256_file(downloaded) == sha256
    with zipfile.ZipFile(downloaded) as archive:
        archive.extractall(tmp_path)
    [model] = tmp_path.glob("model-step-*")
    assert page.locator("#draw").inner_text().endswith(f"dalle-lean demo --model {model.name}")
    assert load_model(model).config == read_settings(running.run_dir).model

    prompts = heldout_prompts(read_settings(running.run_dir))
    assert page.locator("#gallery th[scope=row]").all_inner_texts() == prompts
    newest = page.locator("#gallery tr td:last-child img")
    assert newest.count() == len(prompts) > 0
    see_all(page, newest)
    drawn = number(page.locator("#gallery tr:first-child th").all_inner_texts()[-1])
    assert 0 < drawn <= int(model.name.rpartition("-")[2])

    link = page.locator("#prompt-page a").evaluate("link => link.href")
    assert link == f"{running.url}draw/"
    draw = visit(f"{link}?prompt=a+red+heart")
    draw.locator("#gallery img").first.wait_for(timeout=240_000)  # it draws at the lowest priority


def see_all(page, pictures):
    """Scroll to each picture, and wait until it is shown."""
    for picture in pictures.all():
        picture.scroll_into_view_if_needed()
        page.wait_for_function("one => one.complete && one.naturalWidth > 0", arg=picture.element_handle())


def number(text):
    """A number as the page writes it, such as 1,234 or "step 1,234"."""
    return float(text.removeprefix("step ").replace(",", ""))


def files_of(run):
    """The pictures and the model that a page names."""
    pictures = [name for drawn in run["gallery"]["drawn"] for name in drawn["files"]]
    return [*pictures, *([run["checkpoint"]["file"]] if run["checkpoint"] else [])]


def check_whole(site):
    """Whatever the page names is there, whole."""
    run = run_of(site)
    for name in ("index.html", "page.css", "page.js", "bokeh.js", "bokeh-api.js", "join.ipynb", *files_of(run)):
        assert (site / name).stat().st_size > 0, name
    if run["checkpoint"]:
        assert sha256_file(site / run["checkpoint"]["file"]) == run["checkpoint"]["sha256"]
    return run


@contextlib.contextmanager
def http_server(folder):
    """Python's http.server for a folder; yields its URL, and the paths that it did not find."""
    missing = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def send_error(self, code, *arguments):
            missing.append((code, self.path))
            super().send_error(code, *arguments)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    with serving(server) as url:
        yield f"{url}/", missing


# The last, since it ends the run's host.
def test_a_host_exports_a_static_site_that_is_whole_at_every_moment_while_the_run_goes_on(running, visit, tmp_path):
    site, run_dir = tmp_path / "www" / "site", running.run_dir
    until("pictures", lambda: list_checkpoints(run_dir, print) and read_gallery(run_dir / PUBLIC).drawn, PATIENCE_S)
    running.stop()
    with Hosted(run_dir, "--export", str(site)) as hosted:
        until("the host", lambda: (site / "index.html").exists())
        hosted.train("trainer")
        first = until("a page with pictures", lambda: (run := run_of(site)) and files_of(run) and run, PATIENCE_S)
        now, due_s = first, time.monotonic() + PATIENCE_S
        while now["overview"] is None or now["overview"]["step"] <= first["checkpoint"]["step"]:
            assert time.monotonic() < due_s, f"step {first['checkpoint']['step']} is the last on the page"
            seen = check_whole(site)
            for name in files_of(now):
                assert (site / name).exists(), f"a tab opened before the refresh names {name}"
            now = seen
            time.sleep(0.05)
        with http_server(site.parent) as (url, missing):
            page = visit(f"{url}site/", console=True)
            page.wait_for_function(READY)
            for name in ("loss", "peers", "speed"):
                page.locator(f"#{name}").scroll_into_view_if_needed()
                page.wait_for_function("id => document.getElementById(id).firstElementChild", arg=name)
            see_all(page, page.locator("#gallery img"))
            with page.expect_download() as begun:
                page.locator("#download").click()
            assert sha256_file(begun.value.path()) == page.locator("#sha256").inner_text()
            assert not page.locator("#prompt-page").is_visible()  # a static site has none
            assert missing == []
    written = "".join((site / name).read_text() for name in ("index.html", "page.css", "page.js", "run.json"))
    for address in read_settings(run_dir).swarm.addresses:  # as announced: only these may name this machine
        written = written.replace(address, "")
    assert "127.0.0.1" not in written
    assert "localhost" not in written
