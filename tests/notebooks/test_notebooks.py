"""Every notebook is valid and published without outputs."""

import pytest

pytest.importorskip("nbclient")

import nbformat

from tests.notebooks.running import NOTEBOOKS


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_is_valid_and_holds_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
