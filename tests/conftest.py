"""Shared fixtures. Nothing in the tests reaches for the network."""

import os
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
# The threads of one operation wait for each other: on a busy machine that costs a time slice an operation.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

PEERS = ("tests/training/swarm/", "tests/notebooks/test_join.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Several pytest workers take whole files; files with peers, whose rounds are timed, follow each other."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "peers" if nodeid.startswith(PEERS) else nodeid.partition("::")[0]

    return ByFile(config, log)


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
