"""docs/teach-it.md, walked at a small size: a model learns a few new pictures and keeps the rest."""

import json
import re
import shutil
from pathlib import Path

import pytest

from dalle_lean.cli import main
from dalle_lean.io.model_folder import check_parts
from inference import Generator

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
EMOJI = ROOT / "tests" / "data" / "emoji"
NUM_MINE = 12


def run(command):
    with pytest.raises(SystemExit) as end:
        main(command.split()[1:])
    assert end.value.code == 0, command


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """The guide's commands in a folder where data and model are small ones."""
    home = tmp_path_factory.mktemp("teach")
    vqgan = "--steps 4 --batch-size 8 --picture-side 32 --codebook-size 64 --channels 32 --code-width 8 --z-channels 8"
    model = home / "models" / "emoji"
    mine, train = home / "mine", home / "data" / "emoji-fillers" / "train"
    mine.mkdir()
    train.mkdir(parents=True)
    lines = [json.loads(line) for line in (EMOJI / "metadata.jsonl").read_text().splitlines()]
    for line in lines[:NUM_MINE]:
        shutil.copy(EMOJI / line["file_name"], mine)
        (mine / line["file_name"]).with_suffix(".txt").write_text("Rex the zorgle")
    for line in lines[NUM_MINE:]:
        shutil.copy(EMOJI / line["file_name"], train)
    (train / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[NUM_MINE:]))
    run(f"dalle-lean train-vqgan {train} {home}/vqgan {vqgan}")
    run(f"dalle-lean preprocess {train} {home}/first --vqgan {home}/vqgan")
    run(f"dalle-lean train {home}/first {home}/first-run --config tiny --vqgan {home}/vqgan")
    run(f"dalle-lean train-clip {train} {home}/clip --steps 2 --batch-size 16 --picture-side 32 --width 32")
    run(f"dalle-lean pack {home}/first-run/model {model} --clip {home}/clip/clip")
    small = {"--steps 1000": "--steps 3 --config tiny", "mine:40": "mine:2", " --bf16": ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        guide = (ROOT / "docs" / "teach-it.md").read_text(encoding="utf-8")
        assert all(text in guide for text in small), "the page's commands would run at full size"
        for command in re.findall(r"^    (dalle-lean .*)$", guide, flags=re.MULTILINE):
            for there, here in small.items():
                command = command.replace(there, here)
            if "dalle-lean demo" not in command:
                run(command)
    return home


def test_the_walk_ends_in_a_model_that_knows_the_new_words_and_the_old(taught):
    check_parts(taught / "runs" / "my-model")
    generator = Generator.from_folder(taught / "runs" / "my-model")
    assert not generator.unknown_words("a zorgle")
    before = Generator.from_folder(taught / "models" / "emoji")
    assert before.unknown_words("a zorgle")


def test_the_new_pictures_are_mixed_in_as_often_as_asked(taught):
    rows = {
        name: json.loads((taught / "runs" / name / "dataset.json").read_text())["counts"]["kept"]
        for name in ("mine", "emoji", "mixed")
    }
    assert rows["mixed"] == 2 * rows["mine"] + rows["emoji"]
    assert rows["mine"] == NUM_MINE


def test_the_new_model_starts_from_the_old_weights(taught):
    old, new = (
        Generator.from_folder(taught / folder).model.state_dict() for folder in ("models/emoji", "runs/my-model")
    )
    assert old.keys() == new.keys()
    change = sum(float((new[name].float() - old[name].float()).norm() ** 2) for name in old) ** 0.5
    size = sum(float(old[name].float().norm() ** 2) for name in old) ** 0.5
    assert 0 < change < 0.2 * size
