"""What tests of whole runs share."""

import json
from pathlib import Path

import pytest

from dalle_lean import cli


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_command(*arguments) -> int:
    with pytest.raises(SystemExit) as exit:
        cli.main([str(argument) for argument in arguments])
    return exit.value.code


def add_lines(folder: Path, *rows: dict) -> None:
    with (folder / "metadata.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


class Stop(BaseException):
    """Ends a run from inside, as Ctrl+C does."""
