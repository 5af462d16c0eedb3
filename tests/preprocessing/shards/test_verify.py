"""`dalle-lean shards verify`: each kind of damage is found, by name, and nothing else is."""

import json
import os
import shutil
import time

import pyarrow.parquet as pq
import pytest

from dalle_lean.io.files import sha256_file
from preprocessing.shards.files import write_shard
from preprocessing.shards.import_shards import import_shards
from preprocessing.shards.verify import find_faults
from tests.preprocessing.runs import run_command
from tests.preprocessing.shard_folders import make_rows, random_codes, write_folder
from tests.tiny import tiny_vqgan


@pytest.fixture
def folder(tmp_path, vqgan):
    """Three shards of 40 rows."""
    parts = [make_rows(random_codes(vqgan, 40, seed), seed) for seed in range(3)]
    return write_folder(tmp_path, vqgan, parts, rejected={"nsfw": 3})


def problems(folder, **options):
    return [(fault.file, fault.problem) for fault in find_faults(folder, **options)]


def rewrite(folder, name, change):
    """Change a table and write it again, the manifest made to know its new hash."""
    table = change(pq.read_table(folder / name))
    pq.write_table(table, folder / name, compression="brotli")
    content = json.loads((folder / "dataset.json").read_text())
    for shard in content["shards"]:
        if shard["file"] == name:
            shard["sha256"] = sha256_file(folder / name)
    (folder / "dataset.json").write_text(json.dumps(content))


def change_manifest(folder, **fields):
    content = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps(content | fields))


def test_a_sound_folder_has_no_faults(folder, vqgan):
    progress = []
    assert problems(folder, vqgan=vqgan, on_progress=lambda *step: progress.append(step)) == []
    assert progress[-1] == (120, 120, "")


def test_a_changed_byte_is_found(folder):
    path = folder / "shard-00001.parquet"
    content = bytearray(path.read_bytes())
    content[100] ^= 1  # in a page of the first column
    path.write_bytes(content)
    found = problems(folder)
    assert {file for file, _ in found} == {"shard-00001.parquet"}
    assert found[0][1].startswith("SHA-256 is ")


def test_a_shard_cut_short_is_found(folder):
    path = folder / "shard-00002.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    assert problems(folder) == [("shard-00002.parquet", "damaged or no shard: it does not end as a Parquet file does")]


def test_a_shard_of_zeros_without_end_is_found_without_reading_it(folder):
    os.truncate(folder / "shard-00002.parquet", 2**38)
    started_s = time.monotonic()
    assert problems(folder) == [("shard-00002.parquet", "damaged or no shard: it does not end as a Parquet file does")]
    assert time.monotonic() - started_s < 10


def test_a_shard_that_the_disk_cannot_read_is_a_fault_among_others(folder, unreadable):
    unreadable("shard-00001.parquet")
    (folder / "shard-00002.parquet").unlink()
    assert problems(folder) == [
        ("shard-00001.parquet", "damaged or no shard: [Errno 5] Input/output error"),
        ("shard-00002.parquet", "is not there"),
    ]


def test_a_shard_that_is_gone_is_found(folder):
    (folder / "shard-00000.parquet").unlink()
    assert problems(folder) == [("shard-00000.parquet", "is not there")]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda table: table.slice(0, 30), "30 rows; must be 40"),
        (lambda table: table.drop_columns(["NSFW", "url"]), "has no column NSFW, url"),
    ],
)
def test_missing_rows_and_columns_are_found(folder, change, problem):
    rewrite(folder, "shard-00001.parquet", change)
    assert problems(folder) == [("shard-00001.parquet", problem)]


def test_an_adopted_folder_needs_captions_and_codes_alone(folder, vqgan):
    for path in folder.glob("*.parquet"):
        rewrite(folder, path.name, lambda table: table.select(["caption", "code"]).replace_schema_metadata())
    (folder / "dataset.json").unlink()
    import_shards(folder, vqgan)
    assert find_faults(folder, vqgan=vqgan) == []


def test_codes_out_of_range_are_found(folder, vqgan):
    codes = random_codes(vqgan, 40)
    codes[7, 1] = vqgan.config.codebook_size
    write_shard(folder / "x.parquet", make_rows(codes))
    (folder / "x.parquet").rename(folder / "shard-00001.parquet")
    rewrite(folder, "shard-00001.parquet", lambda table: table)
    assert problems(folder) == [("shard-00001.parquet", "damaged or no shard: codes 0..64; must be in 0..63")]


def test_a_shard_of_another_vqgan_is_foreign(folder):
    other = tiny_vqgan(seed=1, codebook_size=64, picture_side=16)
    strays = make_rows(random_codes(other, 40), seed=9)
    write_shard(folder / "shard-00001.parquet", strays, vqgan=other.fingerprint())
    hashed, foreign = problems(folder)
    assert hashed[1].startswith("SHA-256 is ")
    assert foreign == ("shard-00001.parquet", f"foreign: its codes are of the VQGAN {other.fingerprint()[:12]}")


def test_files_that_the_manifest_does_not_name_are_foreign(folder):
    shutil.copy(folder / "shard-00000.parquet", folder / "shard-00007.parquet")
    (folder / "deeper").mkdir()
    shutil.copy(folder / "shard-00000.parquet", folder / "deeper" / "x.parquet")
    (folder / ".shard-00003.parquet.abc.tmp").write_bytes(b"half")
    assert problems(folder) == [
        (".shard-00003.parquet.abc.tmp", "left half written by a killed run; may be removed"),
        ("deeper/x.parquet", "foreign: dataset.json does not name it"),
        ("shard-00007.parquet", "foreign: dataset.json does not name it"),
    ]


def test_the_same_shard_under_two_names_is_found(folder):
    content = json.loads((folder / "dataset.json").read_text())
    shutil.copy(folder / "shard-00000.parquet", folder / "shard-00001.parquet")
    content["shards"][1]["sha256"] = content["shards"][0]["sha256"]
    (folder / "dataset.json").write_text(json.dumps(content))
    assert problems(folder) == [("dataset.json", "shard-00001.parquet is the same as shard-00000.parquet")]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vqgan", "0" * 64, "the codes are of the VQGAN 000000000000, not of "),
        ("codebook_size", 65, "codebook_size=65, but the VQGAN has 64 codes"),
        ("picture_side", 17, "picture_side=17, but image_side=2 codes stand for 16 pixels"),
    ],
)
def test_a_manifest_that_does_not_fit_the_vqgan_is_found(folder, vqgan, field, value, message):
    change_manifest(folder, **{field: value})
    file, problem = problems(folder, vqgan=vqgan)[0]
    assert (file, problem[: len(message)]) == ("dataset.json", message)


def test_counts_that_do_not_add_up_are_found(folder):
    change_manifest(folder, counts={"seen": 124, "kept": 120, "rejected": {"nsfw": 3}})
    assert problems(folder) == [("dataset.json", "seen=124, but 120 kept and 3 rejected")]


def test_the_command_says_that_all_is_sound(folder, vqgan_folder, capsys):
    assert run_command("shards", "verify", folder, "--vqgan", vqgan_folder) == 0
    assert "3 shards, 120 pictures, all sound" in capsys.readouterr().out


def test_the_command_lists_the_faults_and_ends_with_1(folder, capsys):
    (folder / "shard-00000.parquet").unlink()
    (folder / "shard-00002.parquet").write_bytes(b"no Parquet")
    assert run_command("shards", "verify", folder) == 1
    out = capsys.readouterr().out
    assert "shard-00000.parquet" in out
    assert "is not there" in out
    assert "2 of its files are not sound (3 shards, 120 pictures)" in out


def test_a_folder_without_a_manifest_is_a_mistake(tmp_path, capsys):
    assert run_command("shards", "verify", tmp_path) == 2
    assert "has no dataset.json" in capsys.readouterr().err


def test_a_misspelt_folder_is_missing_and_the_one_meant_is_named(tmp_path, capsys):
    (tmp_path / "shards").mkdir()
    assert run_command("shards", "verify", tmp_path / "elsewhere") == 2
    assert capsys.readouterr().err == f"error: there is no folder {tmp_path}/elsewhere; name a folder of shards\n"
    assert run_command("shards", "verify", tmp_path / "shrds") == 2
    assert f"there is no folder {tmp_path}/shrds (did you mean {tmp_path}/shards?)" in capsys.readouterr().err
