"""The notebook that draws, run on the bundled model."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient")

from tests.notebooks.running import filled_in, run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_draws_ranks_and_completes(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook = filled_in("draw.ipynb", IMAGES=4, BEST=2)
    outputs = run(notebook, tmp_path)
    assert "16 x 16 codes a picture" in outputs["load"]
    assert "place 1 of 4: score " in outputs["rank"]
    assert "place 4 of 4: score " in outputs["rank"]
    assert (tmp_path / "completed" / "01.png").is_file()
    pictures = [cell.id for cell in notebook.cells if "image/png" in str(cell.get("outputs"))]
    assert pictures == ["draw", "rank", "completed"]
