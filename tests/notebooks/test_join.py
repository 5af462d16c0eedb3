"""The notebook for Colab and Kaggle, run as it is in a tiny swarm."""

import ast
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("hivemind")

import nbclient
import nbformat

from tests.training.swarm.harness import Swarm
from training.swarm.settings import write_settings

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "join.ipynb"


def filled_in(**values):
    """The notebook with other values in its cell of parameters."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    [cell] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    lines = {node.targets[0].id: ast.unparse(node) for node in ast.parse(cell.source).body}
    assert set(values) <= set(lines)
    cell.source = "\n".join({**lines, **{name: f"{name} = {value!r}" for name, value in values.items()}}.values())
    return notebook


def run(notebook, folder, timeout_s):
    """Execute it with this environment's programs; the outputs by cell."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    nbclient.NotebookClient(
        notebook, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return {
        cell.id: "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def test_the_notebook_is_valid_and_holds_no_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


def test_the_notebook_asks_for_the_address_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="fill in ADDRESS"):
        run(filled_in(), tmp_path, timeout_s=60)


@pytest.mark.swarm
@pytest.mark.slow
def test_the_notebook_takes_part_in_a_run_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"])
    with Swarm(tmp_path / "run", total_steps=3, warmup_steps=1, batch_size=32) as swarm:
        swarm.start("helper")
        given = tmp_path / "given"
        given.mkdir()
        shutil.copy(tmp_path / "run" / "tokenizer.json", given)
        addresses = replace(swarm.settings.swarm, addresses=tuple(swarm.addresses))
        write_settings(given / "swarm.toml", replace(swarm.settings, swarm=addresses))
        outputs = run(
            filled_in(ADDRESS=str(given), HOURS=120 / 3600, FOLDER=str(tmp_path / "me")), tmp_path, timeout_s=150
        )
        assert "0 problems" in outputs["look"] or "all well" in outputs["look"], outputs["look"]
        assert "finished at step 3" in outputs["join"], outputs["join"]
