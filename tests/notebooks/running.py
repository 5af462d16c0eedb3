"""Notebooks, run as they are but for their cell of parameters."""

import ast
from pathlib import Path

import nbclient
import nbformat

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def filled_in(name, **values):
    """A notebook with other values in its cell of parameters."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    [cell] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    lines = {node.targets[0].id: ast.unparse(node) for node in ast.parse(cell.source).body}
    assert set(values) <= set(lines)
    cell.source = "\n".join({**lines, **{name: f"{name} = {value!r}" for name, value in values.items()}}.values())
    return notebook


def run(notebook, folder):
    """Execute it; what each cell printed, by cell."""
    where = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=400, kernel_name="python3", resources=where).execute()
    return {
        cell.id: "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
