"""A run's folder belongs to one process, and a folder of something else to no run."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.preprocessing.runs import run_command
from training.run.checkpoint import NAME as CHECKPOINT
from training.run.folder import is_locked, run_folder

EMOJI = Path(__file__).parents[2] / "data" / "emoji"
COMMANDS = ["train", "train-vqgan", "train-clip", "train-things"]


def refusal(word, data, out, capsys):
    """The one line with which a command ends."""
    assert run_command(word, data, out, "--steps", 1, "--device", "cpu") == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("word", COMMANDS)
def test_a_folder_of_something_else_is_left_as_it_is(word, shards, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    line = refusal(word, shards if word == "train" else EMOJI, tmp_path, capsys)
    assert f"{tmp_path} is not empty and holds no run" in line
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("word", COMMANDS)
def test_two_processes_never_train_in_one_folder(word, shards, tmp_path, capsys):
    with run_folder(tmp_path):
        line = refusal(word, shards if word == "train" else EMOJI, tmp_path, capsys)
    assert f"another process works in {tmp_path}" in line


def test_who_is_refused_is_told_which_option_names_another_folder(tmp_path):
    with run_folder(tmp_path / "run", "--out"):
        with pytest.raises(ValueError, match="end it first, or name another folder with --out"):
            run_folder(tmp_path / "run", "--out").__enter__()
        assert is_locked(tmp_path / "run")
    assert not is_locked(tmp_path / "run")
    assert not is_locked(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_run_that_never_began_leaves_no_folder(tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (64, 64)).save(data / "only.png")
    line = refusal("train-vqgan", data, tmp_path / "out", capsys)
    assert "0 pictures to train on, fewer than batch_size=16" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "kept"), [("pictures.npy", True), (None, False)])
def test_who_interrupts_a_run_keeps_the_pictures_that_it_has_decoded(tmp_path, name, kept):
    def interrupted():
        with run_folder(tmp_path / "out"):
            if name:
                (tmp_path / "out" / name).touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "out").exists() == kept


def test_what_a_killed_process_left_incomplete_is_removed(tmp_path):
    with run_folder(tmp_path):
        pass
    for folder in ("checkpoint", ".model.abc.tmp"):
        (tmp_path / folder).mkdir()
    for name in ("checkpoint/.state.pt.abc.tmp", ".model.abc.tmp/model.safetensors"):
        (tmp_path / name).touch()
    with run_folder(tmp_path):
        assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]


def test_a_killed_process_no_longer_holds_its_folder(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from training.run.folder import run_folder\n"
        "with run_folder(Path(sys.argv[1])): print('held', flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match="another process"), run_folder(tmp_path):
                pass
        finally:
            holder.send_signal(signal.SIGKILL)
    with run_folder(tmp_path):
        pass


def test_a_folder_is_a_runs_by_its_checkpoint_and_from_the_first_moment(tmp_path):
    copied = tmp_path / "copied" / CHECKPOINT
    copied.parent.mkdir(parents=True)
    copied.write_bytes(b"")
    with run_folder(tmp_path / "copied"):
        pass
    with run_folder(tmp_path / "killed at once"):
        pass
    (tmp_path / "killed at once" / "tokenizer.json").write_text("{}")
    with run_folder(tmp_path / "killed at once"):
        pass


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="is a file"), run_folder(tmp_path / "out"):
        pass
