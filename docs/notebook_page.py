"""Write the tutorial's notebook as a page, docs/gpt2-large.md: `python docs/notebook_page.py`."""

import json
from pathlib import Path

DOCS = Path(__file__).parent
NOTEBOOK = DOCS.parent / "notebooks/gpt2-large.ipynb"
PAGE = DOCS / "gpt2-large.md"
NOTE = f"*This is [the notebook](../notebooks/{NOTEBOOK.name}) as a page.*\n"


def page_of(notebook: Path) -> str:
    """The cells of a notebook as Markdown, without their outputs."""
    title, *cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    parts = ["".join(title["source"]), NOTE]
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(part.strip() for part in parts).replace("](../docs/", "](") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page_of(NOTEBOOK), encoding="utf-8")
