"""Machines that share a folder: their records add up to the whole, whoever is first or last."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dalle_lean.errors import UserError
from preprocessing.encoding import encode, pipeline
from preprocessing.encoding import part_records as progress
from preprocessing.encoding.encode import preprocess
from preprocessing.encoding.filters import Rules
from preprocessing.shards.manifest import read_dataset_info
from preprocessing.sources import open_source
from tests.preprocessing.runs import Stop, contents

pytestmark = pytest.mark.usefixtures("decode_here")


def test_parts_of_which_nothing_can_be_read_are_counted_as_their_own(discs, vqgan, tmp_path):
    """A part that was killed, or is another machine's, must not take the counts of the next with it."""
    for index in (*range(6), *range(12, 18)):
        (discs / f"{index:03d}.png").unlink()
    whole = preprocess(open_source(discs, 6), tmp_path / "whole", vqgan, explain=True)
    assert whole.counts.rejected == {"picture_missing": 12}
    out = tmp_path / "out"
    assert preprocess(open_source(discs, 6), out, vqgan, explain=True, share=(1, 2)) is None
    for name in ("00000", "00002"):
        note = json.loads((out / ".progress" / f"part-{name}.json").read_text())
        assert (note["rejected"], len(note["explained"])) == ({"picture_missing": 6}, 6)
    preprocess(open_source(discs, 6), out, vqgan, explain=True)
    assert contents(out) == contents(tmp_path / "whole")


class Counted:
    """A source that counts how often it is asked for the names of its parts."""

    def __init__(self, source):
        self.source = source
        self.asked = 0

    @property
    def parts(self):
        self.asked += 1
        return self.source.parts

    def __getattr__(self, name):
        return getattr(self.source, name)


def test_the_names_of_the_parts_are_asked_for_as_often_for_many_as_for_few(discs, vqgan, tmp_path):
    few, many = Counted(open_source(discs, 15)), Counted(open_source(discs, 2))
    preprocess(few, tmp_path / "few", vqgan)
    preprocess(many, tmp_path / "many", vqgan)
    assert few.asked == many.asked


def test_shares_of_the_parts_come_to_the_whole_whoever_is_last(discs, vqgan, tmp_path):
    preprocess(open_source(discs, 4), tmp_path / "alone", vqgan)
    for number in (2, 3):
        assert preprocess(open_source(discs, 4), tmp_path / "out", vqgan, share=(number, 3)) is None
    with pytest.raises(ValueError, match="3 of 8 parts are not made yet: 00000, 00003, 00006"):
        preprocess(open_source(discs, 4), tmp_path / "out", vqgan, make=None)
    info = preprocess(open_source(discs, 4), tmp_path / "out", vqgan, share=(1, 3))
    assert info.counts.seen == 30
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_a_machine_without_gpus_gathers_what_gpus_made(discs, vqgan, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="4 of 4 parts are not made yet"):
        preprocess(open_source(discs, 8), out, vqgan, make=None)
    assert not out.exists()
    preprocess(open_source(discs, 8), tmp_path / "alone", vqgan, bf16=True)
    with monkeypatch.context() as patch:
        patch.setattr(encode, "gather", lambda job, vqgan, settings: None)  # the last files are seen late
        assert preprocess(open_source(discs, 8), out, vqgan, bf16=True) is None
    with pytest.raises(ValueError, match="crops was 1, now 2"):
        preprocess(open_source(discs, 8), out, vqgan, crops=2, make=None)
    for _ in range(2):
        preprocess(open_source(discs, 8), out, vqgan, make=None)
        assert contents(out) == contents(tmp_path / "alone")


@pytest.mark.parametrize("seconds_later", [False, True])
def test_two_that_gather_at_the_same_moment_agree(discs, vqgan, tmp_path, monkeypatch, seconds_later):
    """The other one has written dataset.json, and perhaps removed the notes, when this one begins to add up."""
    preprocess(open_source(discs, 8), tmp_path / "alone", vqgan)
    gather = progress.gather

    def gather_second(out, names):
        monkeypatch.setattr(progress, "gather", gather)
        notes = contents(out / ".progress")
        preprocess(open_source(discs, 8), out, vqgan)
        for name, note in () if seconds_later else notes.items():
            (out / ".progress").mkdir(exist_ok=True)
            (out / ".progress" / name).write_bytes(note)
        return gather(out, names)

    monkeypatch.setattr(progress, "gather", gather_second)
    info = preprocess(open_source(discs, 8), tmp_path / "out", vqgan)
    assert info.counts.seen == 30
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_machines_that_begin_together_agree_on_one_set_of_settings(tmp_path):
    with ThreadPoolExecutor(8) as machines:
        begun = [machines.submit(progress.begin, tmp_path, {"side": number % 2}) for number in range(8)]
    stays = json.loads((tmp_path / ".progress" / "settings.json").read_text())["side"]
    assert [begin.exception() is None for begin in begun] == [number % 2 == stays for number in range(8)]


def test_one_that_begins_while_another_tidies_up_takes_the_whole(discs, vqgan, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert preprocess(open_source(discs, 8), out, vqgan, share=(1, 4)) is None
    read_json = progress.read_json

    def read_late(path):
        monkeypatch.setattr(progress, "read_json", read_json)
        preprocess(open_source(discs, 8), out, vqgan)
        return read_json(path)

    monkeypatch.setattr(progress, "read_json", read_late)
    assert preprocess(open_source(discs, 8), out, vqgan) == read_dataset_info(out)
    assert not (out / ".progress").exists()


def test_one_that_writes_while_another_tidies_up_takes_the_whole(discs, vqgan, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write_shard = pipeline.write_shard

    def write_late(path, rows, **options):
        monkeypatch.setattr(pipeline, "write_shard", write_shard)
        preprocess(open_source(discs, 8), out, vqgan)
        raise FileNotFoundError(path)

    monkeypatch.setattr(pipeline, "write_shard", write_late)
    assert preprocess(open_source(discs, 8), out, vqgan) == read_dataset_info(out)
    assert not (out / ".progress").exists()


def test_one_that_adds_up_after_another_found_nothing_usable_says_so(discs, vqgan, tmp_path, monkeypatch):
    out = tmp_path / "out"
    gather = progress.gather

    def gather_late(out, names):
        monkeypatch.setattr(progress, "gather", gather)
        with pytest.raises(UserError, match="no picture of the source can be used"):
            preprocess(open_source(discs, 8), out, vqgan, rules=Rules(min_side=1000))
        return gather(out, names)

    monkeypatch.setattr(progress, "gather", gather_late)
    with pytest.raises(UserError, match="another machine found no picture that can be used"):
        preprocess(open_source(discs, 8), out, vqgan, rules=Rules(min_side=1000))


def test_notes_that_were_half_removed_are_not_taken_for_those_of_another_run(discs, vqgan, tmp_path, monkeypatch):
    out = tmp_path / "out"
    rmtree = shutil.rmtree

    def killed(folder, **options):
        (Path(folder) / "settings.json").unlink()
        raise Stop

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Stop):
        preprocess(open_source(discs, 8), out, vqgan, rules=Rules(min_side=1000))
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert preprocess(open_source(discs, 8), out, vqgan).counts.kept == 30
    assert not list(out.glob(".*"))


def test_only_what_this_program_left_is_tidied_up(tmp_path):
    for name in ("shard-00001.parquet", "dataset.json", "rejected.jsonl", "notes.txt"):
        (tmp_path / f".{name}.abc.tmp").touch()
    (tmp_path / ".mine.tmp").touch()
    progress.remove_leftovers(tmp_path)
    assert {*contents(tmp_path)} == {".mine.tmp", ".notes.txt.abc.tmp"}
