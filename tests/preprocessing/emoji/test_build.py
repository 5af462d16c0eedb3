"""The command that builds the picture set, and the small set that tests read."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

import pytest
from PIL import Image

from dalle_lean.io.files import sha256_file
from preprocessing.emoji.build import write_pictures
from preprocessing.emoji.heldout import hold_out
from preprocessing.emoji.plan import plan_training
from preprocessing.emoji.render import sprite
from preprocessing.emoji.sets import BUNDLED_SET, CODE_POINT_SETS, read_drawings, read_things
from tests.children import start

SMALL = Path(__file__).parents[2] / "data" / "emoji"


def build(packages, out, *options):
    command = [sys.executable, "-m", "preprocessing.emoji", str(out), "--packages", str(packages), *options]
    return subprocess.run([*command, "--side", "16", "--processes", "2"], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(emoji_packages, tmp_path_factory):
    out = tmp_path_factory.mktemp("built") / "emoji"
    result = build(emoji_packages, out)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="module")
def first_pictures(emoji_packages):
    dropped = Counter()
    drawings = read_drawings(emoji_packages, read_things(emoji_packages / "emojibase-data", dropped), dropped)

    def plan(seed):
        return plan_training(drawings, hold_out(drawings), seed)[:100]

    return plan


def digests(folder):
    return {path.name: sha256_file(path) for path in folder.iterdir()}


def test_one_seed_writes_the_same_bytes_and_another_writes_others(first_pictures, tmp_path):
    for name, seed, processes in (("once", 0, 1), ("again", 0, 2), ("other", 1, 1)):
        pictures = first_pictures(seed)
        sprites = {placed.drawing: sprite(placed.drawing, 16) for picture in pictures for placed in picture.placed}
        with get_context("spawn").Pool(processes) as pool:
            assert sum(1 for _ in write_pictures(pictures, sprites, tmp_path / name, 16, pool)) == 100
    assert digests(tmp_path / "once") == digests(tmp_path / "again")
    assert digests(tmp_path / "once") != digests(tmp_path / "other")


def test_the_set_reads_as_an_image_folder(built):
    datasets = pytest.importorskip("datasets")
    data = datasets.load_dataset("imagefolder", data_dir=str(built / "heldout"), cache_dir=str(built.parent / "cache"))
    pictures = data["train"]
    assert len(pictures) == len((built / "heldout" / "metadata.jsonl").read_text().splitlines())
    assert pictures[0]["image"].size == (16, 16)
    assert {"text", "kind", "things", "sets", "count", "ground", "size", "place", "held_out"} <= set(
        pictures.column_names
    )


def test_what_is_held_out_is_listed_and_what_is_left_out_is_counted(built):
    listed = json.loads((built / "heldout.json").read_text())
    train = (built / "train" / "metadata.jsonl").read_text()
    assert listed["concepts"]
    assert not any(json.dumps(name) in train for name in listed["concepts"])
    assert listed["counts"]["left_out"]["flag"] == 1
    assert listed["counts"]["left_out"]["skin-tone variant"] == 5
    assert sum(listed["counts"]["train"].values()) == len(train.splitlines())


def test_a_judges_set_shows_every_thing_from_the_sets_named_and_no_other(emoji_packages, tmp_path):
    silent = CODE_POINT_SETS[1]  # tells no code points
    out = tmp_path / "judge"
    result = build(emoji_packages, out, "--sets", silent, "--only-pairs-held-out")
    assert result.returncode == 0, result.stderr
    listed = json.loads((out / "heldout.json").read_text())
    assert not any(listed[name] for name in ("concepts", "drawings", "grounds", "paints"))
    assert set(listed["counts"]["held_out"]) == {"thing pair"}
    rows = [json.loads(line) for line in (out / "train" / "metadata.jsonl").read_text().splitlines()]
    assert {name for row in rows for name in row["sets"]} == {silent}
    assert {path.stem for path in (out / "LICENSES").iterdir()} == {silent, "emojibase"}


def test_a_set_that_is_not_installed_is_one_line_and_exit_code_2(emoji_packages, tmp_path):
    result = build(emoji_packages, tmp_path / "out", "--sets", "noto,nowhere")
    assert result.returncode == 2
    assert "@iconify-json/nowhere; install it with npm" in " ".join(result.stderr.split())


def test_licences_stand_beside_the_pictures(built):
    text = (built / "LICENSES" / f"{BUNDLED_SET}.txt").read_text()
    assert "A hand" in text
    assert "SPDX: CC0-1.0" in text
    assert "1.2.3" in text
    assert "The whole text of a licence." in (built / "LICENSES" / "emojibase.txt").read_text()


def test_a_folder_that_holds_something_else_is_left_alone(emoji_packages, tmp_path):
    (tmp_path / "letter.txt").write_text("mine")
    result = build(emoji_packages, tmp_path)
    assert result.returncode == 2
    assert "holds something else" in result.stderr
    assert "Traceback" not in result.stderr
    assert (tmp_path / "letter.txt").read_text() == "mine"


def test_the_folder_in_which_it_runs_is_not_replaced(emoji_packages, tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    monkeypatch.chdir(tmp_path / "set")
    result = build(emoji_packages, ".")
    assert result.returncode == 2
    assert "set is or holds the current folder, which cannot be replaced" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["set"]


def test_missing_packages_are_one_line_and_exit_code_2(tmp_path):
    result = build(tmp_path / "nowhere", tmp_path / "out")
    assert result.returncode == 2
    assert "groups.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_small_set_is_noto_alone_with_its_licence():
    rows = [json.loads(line) for line in (SMALL / "metadata.jsonl").read_text().splitlines()]
    assert len(rows) == 200
    assert {name for row in rows for name in row["sets"]} == {"noto"}
    assert {row["kind"] for row in rows} == {"plain", "scene", "pair"}
    assert {path.name for path in SMALL.glob("*.png")} == {row["file_name"] for row in rows}
    assert all(Image.open(SMALL / row["file_name"]).size == (96, 96) for row in rows)
    assert "Apache License" in (SMALL / "LICENSE").read_text()
    assert sum(path.stat().st_size for path in SMALL.iterdir()) < 1_500_000


@pytest.mark.slow
def test_ctrl_c_ends_it_in_a_line_and_leaves_what_was_there(emoji_packages, tmp_path):
    out = tmp_path / "emoji"
    command = [sys.executable, "-m", "preprocessing.emoji", str(out), "--packages", str(emoji_packages)]
    process = start(
        [*command, "--side", "1024", "--processes", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and not list(tmp_path.glob("emoji.unfinished/*/*.png")):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert "interrupted" in told.splitlines()[-1]
    assert not out.exists()
