"""What `dalle-lean preprocess` says of mistaken options."""

import re
import subprocess
import sys

import pytest

from preprocessing.shards.manifest import read_dataset_info
from tests.foreign import foreign_folder
from tests.preprocessing.runs import run_command


def test_a_folder_without_a_vqgan_is_named_in_one_line(capsys, discs, tmp_path):
    assert run_command("preprocess", discs, tmp_path / "out", "--vqgan", tmp_path / "none") == 2
    assert capsys.readouterr().err == f"error: there is no folder {tmp_path / 'none'}; name a VQGAN folder\n"


@pytest.mark.parametrize(
    ("listed", "source", "out"),
    [(True, "", ""), (True, "{0..1}.tar", ""), (False, "", ""), (False, "", "shards/new")],
)
def test_shards_among_the_pictures_are_refused_before_the_vqgan_is_loaded(capsys, discs, listed, source, out):
    for name in ("0.tar", "1.tar"):
        (discs / name).touch()
    if not listed:
        for path in (discs / "metadata.jsonl", discs / "0.tar", discs / "1.tar"):
            path.unlink()
    before = sorted(discs.iterdir())
    assert run_command("preprocess", discs / source, discs / out, "--vqgan", "/nowhere") == 2
    assert f"error: {discs / out} is in the folder of the pictures: name another" in capsys.readouterr().err
    assert sorted(discs.iterdir()) == before


def test_labels_that_laion_does_not_have_are_warned_of(capsys):
    from preprocessing.commands.preprocess import parse_labels

    assert parse_labels("UNLIKELY, UNSURE,NSFW") == ["UNLIKELY", "UNSURE", "NSFW"]
    assert parse_labels("any") is None
    assert capsys.readouterr().err == ""
    assert parse_labels("unlikely,UNSURE") == ["unlikely", "UNSURE"]
    assert capsys.readouterr().err == (
        "warning: allowed_nsfw: unlikely: not one of LAION's labels, UNLIKELY, UNSURE, NSFW\n"
    )


def test_the_progress_counts_shards_and_only_it_tells_a_speed(capfd, discs, vqgan_folder, tmp_path):
    command = "preprocess", discs, tmp_path / "out", "--vqgan", vqgan_folder, "--device", "cpu", "--workers", "1"
    assert not run_command(*command)
    said = capfd.readouterr()
    assert re.search(r"pictures/s \S+ 1 of 1 shard$", said.err.splitlines()[-1])
    assert "pictures/s" not in said.out


def test_what_names_each_rejected_picture_is_said_below_their_counts(capfd, discs, vqgan_folder, tmp_path):
    command = "--vqgan", vqgan_folder, "--device", "cpu", "--workers", "1"
    assert not run_command("preprocess", discs, tmp_path / "all", *command)
    assert "--explain" not in capfd.readouterr().out
    (discs / "003.png").write_bytes(b"no picture")
    assert not run_command("preprocess", discs, tmp_path / "out", *command)
    assert "to name each rejected picture, preprocess into a new folder with --explain" in capfd.readouterr().out
    assert not run_command("preprocess", discs, tmp_path / "explained", *command, "--explain")
    assert "rejected.jsonl names each rejected picture" in capfd.readouterr().out.replace("\n", "")


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", pytest.param("cpu,cpu", marks=pytest.mark.slow)])
def test_packages_of_the_current_folder_are_not_run_in_place_of_ours(discs, vqgan_folder, tmp_path, device):
    command = ["preprocess", str(discs), str(tmp_path / "out"), "--vqgan", str(vqgan_folder), "--device", device]
    program = [sys.executable, "-P", "-c", "from dalle_lean.cli import main; main()", *command, "--workers", "2"]
    foreign = foreign_folder(tmp_path)
    result = subprocess.run(program, cwd=foreign, capture_output=True, text=True, timeout=280, check=False)
    assert "code of the current folder" not in result.stderr
    assert result.returncode == 0, result.stderr
    assert read_dataset_info(tmp_path / "out").counts.kept == 30
