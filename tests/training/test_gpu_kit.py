"""The kit for a lent GPU: what travels, what is run there and what comes back."""

import io
import json
import random
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import typer

from dalle_lean.cli import build_app
from preprocessing.emoji.sets import read_drawings, read_things
from preprocessing.emoji.slim import slim
from tests.preprocessing.emoji.packages import write_packages
from training.gpu_kit import piece
from training.gpu_kit.pack import ROOMS, archive, files_of, is_used, room_files, write_kit
from training.recipe import load_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def parts(tmp_path):
    """Sources, packages and drawings of a few bytes."""
    folders = {name: tmp_path / name for name in ("sources", "site", "drawings")}
    for name, folder in folders.items():
        (folder / "dalle_lean").mkdir(parents=True)
        (folder / "dalle_lean" / f"{name}.py").write_text("a = 1\n")
    return folders


def test_the_kit_holds_three_archives_and_the_script(parts, tmp_path):
    sizes = write_kit(tmp_path / "kit", **parts)
    assert set(sizes) == {"source.tar.xz", "packages.tar.xz", "drawings.tar.xz", "piece.py"}
    with tarfile.open(tmp_path / "kit" / "source.tar.xz") as tar:
        assert tar.getnames() == ["dalle_lean/sources.py"]


def test_a_kit_above_its_limit_is_refused_with_what_is_largest(parts, tmp_path):
    (parts["drawings"] / "icons.json").write_bytes(random.Random(0).randbytes(200_000))
    with pytest.raises(ValueError, match=r"more than 0\.1; the largest: drawings\.tar\.xz 0\.2 MB"):
        write_kit(tmp_path / "kit", **parts, limit_bytes=100_000)
    assert not (tmp_path / "kit").exists()


def test_a_folder_that_is_there_is_not_replaced(parts, tmp_path):
    (tmp_path / "kit").mkdir()
    with pytest.raises(ValueError, match="is there already"):
        write_kit(tmp_path / "kit", **parts)


def test_the_sources_hold_recipes_and_the_rooms_alone():
    names = room_files(ROOT)
    assert {"training/recipes/emoji128-gpu.toml", "dalle_lean/cli.py", "preprocessing/emoji/__main__.py"} <= set(names)
    assert {name.split("/")[0] for name in names} == set(ROOMS)


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("pyarrow/libarrow.so.2600", True),
        ("pyarrow/libarrow_python.so.2600", True),
        ("pyarrow/libarrow_python.so.2600.1.0", False),
        ("pyarrow/libarrow_flight.so.2600", False),
        ("numpy/_core/tests/test_api.py", False),
        ("torchvision/_C.so", False),
        ("torchvision/transforms/functional.py", True),
    ],
)
def test_files_that_no_piece_opens_stay_at_home(name, used):
    assert is_used(name) == used


def test_packed_and_unpacked_packages_draw_the_same_drawings(tmp_path):
    packages = write_packages(tmp_path / "node_modules")
    slim(packages, tmp_path / "slim")
    archive(tmp_path / "drawings.tar.xz", tmp_path / "slim", files_of(tmp_path / "slim"), preset=1)
    with tarfile.open(tmp_path / "drawings.tar.xz") as tar:
        tar.extractall(tmp_path / "again", filter="data")

    def drawings(folder):
        return read_drawings(folder, read_things(folder / "emojibase-data", Counter()), Counter())

    assert drawings(tmp_path / "again") == drawings(packages)


@pytest.mark.parametrize("name", list(piece.MINUTES))
@pytest.mark.parametrize("trial", [False, True])
def test_every_command_of_a_piece_is_one_that_the_program_knows(name, trial, tmp_path):
    commands = [
        [*piece.training(name, tmp_path, tmp_path, tmp_path, 9, trial=trial), "--max-minutes", "3.5"],
        *piece.preparing(tmp_path, tmp_path),
    ]
    commands = [[*command, "--device", "cpu"] for command in commands] + piece.finishing(name, tmp_path)
    for word, *options in commands:
        command = typer.main.get_command(build_app(word)).commands[word]
        command.make_context(word, options)


def test_batches_are_counted_as_they_are_trained():
    assert piece.VQGAN[piece.VQGAN.index("--batch-size") + 1] == str(piece.BATCH["vqgan"])
    assert piece.CLIP[piece.CLIP.index("--batch-size") + 1] == str(piece.BATCH["clip"])
    assert load_recipe("emoji128-gpu").data.batch_size == piece.BATCH["decoder"]


def test_the_gpus_recipe_has_the_model_of_the_cpus():
    assert load_recipe("emoji128-gpu").model == load_recipe("emoji128").model


def test_steps_are_those_that_fit_at_the_pace_of_the_trials_end(tmp_path):
    lines = [{"step": 50, "pictures_per_s": 10.0}, {"step": 100, "pictures_per_s": 640.0}, {"step": 100, "psnr": 20.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert piece.fitting_steps(tmp_path / "metrics.jsonl", 64, minutes=2) == 1200
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="too short"):
        piece.fitting_steps(tmp_path / "metrics.jsonl", 64, minutes=2)


def test_results_come_back_in_parts_below_the_limit_and_are_whole_again(tmp_path):
    content = random.Random(0).randbytes(10_000)
    with tarfile.open(tmp_path / "vqgan.tar", "w") as tar:
        entry = tarfile.TarInfo("vqgan/model.safetensors")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    (tmp_path / "results").mkdir()
    parts = piece.write_parts(tmp_path / "vqgan.tar", tmp_path / "results", part_bytes=3000)
    assert 1 < len(parts) <= piece.MAX_PARTS
    assert all(part.stat().st_size <= 3000 for part in parts)
    (tmp_path / "run").mkdir()
    piece.join_parts(tmp_path / "results", tmp_path / "run")
    assert (tmp_path / "run/vqgan/model.safetensors").read_bytes() == content
    with pytest.raises(ValueError, match="more than"):
        piece.write_parts(tmp_path / "vqgan.tar", tmp_path / "results", part_bytes=1000)


def test_a_piece_needs_nothing_but_the_standard_library():
    script = "import sys; sys.path.insert(0, sys.argv[1]); import piece; print('torch' in sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", script, str(ROOT / "training" / "gpu_kit")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
