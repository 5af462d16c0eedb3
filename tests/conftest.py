"""Shared fixtures. Nothing in the tests reaches for the network."""

import os
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
# The threads of one operation wait for each other: on a busy machine that costs a time slice an operation.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

os.fsync = lambda descriptor: None  # no test cuts the power, and disks are slow

PEERS = ("tests/training/swarm/", "tests/notebooks/test_join.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Several pytest workers take whole files; files with peers, whose rounds are timed, follow each other."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "peers" if nodeid.startswith(PEERS) else nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.fixture
def hub_cache(monkeypatch, tmp_path):
    """The hub's cache on this machine, empty, and no network: a function that puts a file in it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def put(address, name, source):
        folder, commit = tmp_path / "hub" / f"models--{address.replace('/', '--')}", "0" * 40
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
        (folder / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        (folder / "snapshots" / commit / name).symlink_to(source)

    return put


@pytest.fixture
def s3():
    """An S3 server with a bucket, pictures."""
    from tests.storages import S3

    with S3().serving() as server:
        yield server


@pytest.fixture
def hub(tmp_path):
    """The hub's client and a hub without repositories."""
    from tests.hub import loopback_hub
    from tests.storages import HubStorage

    with loopback_hub() as hub:
        yield HubStorage(hub, tmp_path / "hub-home")


@pytest.fixture(params=["s3", "hub"])
def storage(request):
    """Each of the two."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    from docs.screenshot import FLAGS

    if shutil.which("chromium") is None:
        pytest.skip("apt-get install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """Opens a page in a browser of its own; at the end, checks that none raised an error or asked another host."""
    contexts, origins, asked, errors = [], ["data:", "blob:"], [], []

    def open_page(url, console=False, **options):
        """`console`: errors in the browser's console count too."""
        contexts.append(browser.new_context(accept_downloads=True, **options))
        contexts[-1].on("request", lambda request: asked.append(request.url))
        origins.append("/".join(url.split("/")[:3]) + "/")
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        if console:
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.set_default_timeout(120_000)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [address for address in asked if not address.startswith(tuple(origins))] == []
    assert errors == []
