"""A folder whose packages have the names of ours."""

from pathlib import Path

ROOMS = ("dalle_lean", "preprocessing", "training", "inference", "demo", "benchmarks")


def foreign_folder(parent: Path) -> Path:
    """A new folder below `parent`; each of its packages ends the process that imports it."""
    folder = parent / "foreign"
    for room in ROOMS:
        (folder / room).mkdir(parents=True)
        (folder / room / "__init__.py").write_text("raise SystemExit('code of the current folder ran')\n")
    return folder
