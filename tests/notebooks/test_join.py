"""The notebook for Colab and Kaggle, run as it is in a tiny swarm."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("hivemind")

from tests.children import start
from tests.notebooks.running import filled_in, run
from tests.training.conftest import write_shards

PROGRAMS = Path(sys.executable).parent


def options_of(**fields):
    """What the notebook's cells make of its form, its shell commands left out."""
    filled: dict[str, str] = {}
    for cell in filled_in("join.ipynb", **fields).cells:
        if cell.cell_type == "code" and not cell.source.startswith("!"):
            exec(cell.source, filled)
    return filled["OPTIONS"]


def test_the_notebook_asks_for_the_address_first():
    with pytest.raises(ValueError, match="fill in ADDRESS"):
        options_of()


def test_the_notebook_passes_every_address_the_code_and_the_data_on():
    words = shlex.split(options_of(ADDRESS="/ip4/one /ip4/two", CODE="secret", DATA="my shards"))
    assert words[:2] == ["/ip4/one", "/ip4/two"]
    assert words[words.index("--code") + 1] == "secret"
    assert words[words.index("--data") + 1] == "my shards"


@pytest.fixture
def address(tmp_path):
    """Of a tiny run of three steps that `dalle-lean host` keeps alive."""
    shards = write_shards(tmp_path / "shards")
    options = shlex.split("--config tiny --steps 3 --batch-size 32 --matchmaking-time 2 --port 0 --announce 127.0.0.1")
    command = [PROGRAMS / "dalle-lean", "host", tmp_path / "run", "--data", shards, *options]
    with (
        open(tmp_path / "errors", "w") as errors,
        start(command, stdout=subprocess.PIPE, stderr=errors, text=True) as host,
    ):
        try:
            line = next((line for line in host.stdout if "dalle-lean join" in line), "")
            assert line, (tmp_path / "errors").read_text()
            yield line.split()[2]
        finally:
            host.send_signal(signal.SIGINT)
            host.wait(180)


@pytest.mark.swarm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_takes_part_in_a_run_to_its_end(address, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{PROGRAMS}:{os.environ['PATH']}")
    outputs = run(
        filled_in("join.ipynb", ADDRESS=address, NAME="Ada", HOURS=0.1, FOLDER=str(tmp_path / "me")), tmp_path
    )
    assert "all well" in outputs["look"], outputs["look"]
    assert "finished at step 3" in outputs["join"], outputs["join"]
