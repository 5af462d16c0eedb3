"""The notebook for Colab and Kaggle, run as it is in a tiny swarm."""

import ast
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("hivemind")

import nbclient
import nbformat

from tests.children import start
from tests.training.conftest import write_shards

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "join.ipynb"
PROGRAMS = Path(sys.executable).parent


def filled_in(**values):
    """The notebook with other values in its cell of parameters."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    [cell] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    lines = {node.targets[0].id: ast.unparse(node) for node in ast.parse(cell.source).body}
    assert set(values) <= set(lines)
    cell.source = "\n".join({**lines, **{name: f"{name} = {value!r}" for name, value in values.items()}}.values())
    return notebook


def run(notebook, folder):
    """Execute it; the outputs by cell."""
    where = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=400, kernel_name="python3", resources=where).execute()
    return {
        cell.id: "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def test_the_notebook_is_valid_and_holds_no_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


def test_the_notebook_asks_for_the_address_first(tmp_path):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="fill in ADDRESS"):
        run(filled_in(), tmp_path)


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
    outputs = run(filled_in(ADDRESS=address, NAME="Ada", HOURS=0.1, FOLDER=str(tmp_path / "me")), tmp_path)
    assert "all well" in outputs["look"], outputs["look"]
    assert "finished at step 3" in outputs["join"], outputs["join"]
