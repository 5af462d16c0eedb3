import json
import pickle
import random
import tarfile
import tracemalloc

import fsspec
import pytest

from preprocessing.sources import open_source, tar
from preprocessing.sources.tar import TarShards
from tests.preprocessing.shards_of_pictures import problems, read_all, tar_bytes, tar_members

BLOCK = 512


@pytest.fixture
def write(tmp_path):
    """Write one tar and read its samples."""

    def write_and_read(content: bytes):
        (tmp_path / "00000.tar").write_bytes(content)
        return list(TarShards([str(tmp_path / "00000.tar")]).samples(0))

    return write_and_read


def picture(row) -> tuple[str, bytes]:
    return f"{row['key']}.jpg", row["jpg"]


def test_the_samples_of_img2dataset_are_read_whole(rows, write):
    samples = write(tar_bytes(tar_members(rows)))
    assert [sample.key for sample in samples] == [row["key"] for row in rows]
    assert [sample.caption for sample in samples] == [row["caption"] for row in rows]
    assert [sample.picture for sample in samples] == [row["jpg"] for row in rows]
    assert samples[3].metadata == {name: rows[3][name] for name in ("NSFW", "url", "original_width", "original_height")}
    assert not any(sample.problem for sample in samples)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names_are_read_in_every_format(rows, write, format):
    key = "a/" * 40 + "b" * 90 if format == tarfile.USTAR_FORMAT else "ö/" + "猫" * 150
    members = [("./", b"")] + [(f"{key}{name[9:]}", content) for name, content in tar_members(rows[:1])]
    (sample,) = write(tar_bytes(members[1:], format))
    assert (sample.key, sample.picture) == (key, rows[0]["jpg"])


def test_the_files_of_a_sample_come_in_any_order(rows, write):
    order = random.Random(0)
    members = []
    for row in rows:
        three = tar_members([row])
        order.shuffle(three)
        members += three
    assert write(tar_bytes(members)) == write(tar_bytes(tar_members(rows)))


def test_a_caption_comes_from_the_json_before_the_text_and_from_either_alone(rows, write):
    name, jpg = picture(rows[0])
    json_file, text_file = (f"{rows[0]['key']}.json", b'{"caption": "from json"}'), (f"{rows[0]['key']}.txt", b"text")
    assert [sample.caption for sample in write(tar_bytes([(name, jpg), text_file, json_file]))] == ["from json"]
    assert [sample.caption for sample in write(tar_bytes([(name, jpg), json_file]))] == ["from json"]
    assert [sample.caption for sample in write(tar_bytes([(name, jpg), text_file]))] == ["text"]
    assert [sample.caption for sample in write(tar_bytes([(name, jpg)]))] == [None]


def test_a_caption_of_any_language_keeps_its_bytes(write, rows):
    caption = "Ein Kätzchen 猫 \u200d कुत्ता\n👩\u200d🚀"
    (sample,) = write(tar_bytes([picture(rows[0]), (f"{rows[0]['key']}.txt", caption.encode())]))
    assert sample.caption.encode() == caption.encode()


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([("7.txt", b"a cat"), ("7.json", b"{}")], "picture_missing"),
        ([("7.cls", b"3")], "picture_missing"),
        ([("7.jpg", b"jpeg"), ("7.json", b"{")], "metadata_broken"),
        ([("7.jpg", b"jpeg"), ("7.json", b"[]")], "metadata_broken"),
        ([("7.jpg", b"jpeg"), ("7.json", b"[" * 100_000)], "metadata_broken"),
        ([("7.jpg", b"x" * 5000)], "file_too_large"),
        ([("7.jpg", b"jpeg"), ("7.json", b"{}" + b" " * 300_000)], "metadata_broken"),
    ],
)
def test_a_sample_that_is_no_use_is_counted_and_the_next_is_read(rows, write, monkeypatch, members, problem):
    monkeypatch.setattr(tar, "LIMITS", {"picture": 4500, "text": 2000, "json": 200_000})
    neighbour = tar_members(rows)
    small = [(name, content[:100] if name.endswith(".jpg") else content) for name, content in neighbour[:3]]
    samples = write(tar_bytes([*members, *small]))
    assert problems(samples) == [problem, None]
    assert samples[0].key == "7"


def test_directories_links_and_hidden_files_are_no_samples(rows, write, tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as file:
        for name, kind in (("dir", tarfile.DIRTYPE), ("1.jpg", tarfile.SYMTYPE), ("2.jpg", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            file.addfile(info)
    links = (tmp_path / "x.tar").read_bytes()
    end = -(-links.index(bytes(2 * BLOCK)) // BLOCK) * BLOCK
    hidden = tar_bytes([("._000000000.jpg", b"resource"), ("a/.hidden.jpg", b"hidden"), *tar_members(rows[:2])])
    assert [sample.key for sample in write(links[:end] + hidden)] == [row["key"] for row in rows[:2]]


def test_a_hidden_file_between_two_of_a_sample_does_not_part_them(rows, write):
    members = [
        part for name, content in tar_members(rows[:2]) for part in ((f"._{name}", b"resource"), (name, content))
    ]
    assert problems(write(tar_bytes(members))) == [None, None]


def test_tars_joined_one_behind_the_other_are_read_to_the_end(rows, write):
    content = tar_bytes(tar_members(rows[:5])) + tar_bytes(tar_members(rows[5:]))
    assert [sample.key for sample in write(content)] == [row["key"] for row in rows]


def test_a_truncated_tar_keeps_what_came_before_and_counts_the_damage(rows, write):
    content = tar_bytes(tar_members(rows))
    whole = write(content)
    place = content.index(rows[8]["jpg"])
    samples = write(content[: place + len(rows[8]["jpg"]) // 2])
    assert samples[:8] == whole[:8]
    assert problems(samples[8:]) == ["tar_broken"]


def test_a_tar_cut_between_two_files_is_counted_too(rows, write):
    content = tar_bytes(tar_members(rows))
    end = content.rindex(b"}") // BLOCK * BLOCK + BLOCK
    assert not any(content[end:])
    assert problems(write(content[:end]))[-2:] == [None, "tar_broken"]
    assert problems(write(content[: end + BLOCK]))[-2:] == [None, None]


def test_behind_a_damaged_header_reading_goes_on_at_the_next(rows, write):
    content = bytearray(tar_bytes(tar_members(rows)))
    whole = write(bytes(content))
    header = content.index(b"000000004.jpg\0")
    content[header + 3] ^= 1
    samples = write(bytes(content))
    assert problems(samples).count("tar_broken") == 1
    assert [sample for sample in samples if sample.problem is None] == [*whole[:4], *whole[5:]]
    assert problems(sample for sample in samples if sample.key == "000000004") == ["picture_missing"]


@pytest.mark.parametrize("content", [b"", b"no tar", b"x" * 5000, bytes(100)])
def test_what_is_no_tar_is_one_broken_tar(write, content):
    assert problems(write(content)) == ["tar_broken"]


def test_a_length_that_lies_reads_nothing_large(rows, write, monkeypatch):
    info = tarfile.TarInfo("1.jpg")
    info.size = 2**40
    lying = info.tobuf(tarfile.GNU_FORMAT)
    samples = write(lying + tar_bytes(tar_members(rows[:1])))
    assert problems(samples) == ["tar_broken", None]
    extension = tarfile.TarInfo("x")
    extension.type, extension.size = tarfile.XHDTYPE, 13
    negative = extension.tobuf() + b"13 size=-512\n".ljust(BLOCK, b"\0") + tarfile.TarInfo("2.jpg").tobuf()
    samples = write(negative + tar_bytes(tar_members(rows[:1])))
    assert problems(samples) == ["tar_broken", None]


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_an_extended_header_of_many_megabytes_is_damage_and_stays_out_of_memory(rows, write, kind):
    extension = tarfile.TarInfo("x")
    extension.type, extension.size = kind, 2**23
    content = extension.tobuf() + bytes(2**23) + tar_bytes(tar_members(rows[:1]))
    tracemalloc.start()
    samples = write(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert problems(samples) == ["tar_broken", None]
    assert peak < 2**22


def test_each_tar_is_a_part_named_after_it(rows, tmp_path):
    for number in range(3):
        (tmp_path / f"{number:05d}.tar").write_bytes(tar_bytes(tar_members(rows[number * 4 : number * 4 + 4])))
        (tmp_path / f"{number:05d}.parquet").write_bytes(b"img2dataset leaves its metadata beside the tars")
    (tmp_path / "00001_stats.json").write_text(json.dumps({"count": 10, "successes": 4}))
    source = open_source(tmp_path, 1000)
    assert source.parts == ["00000", "00001", "00002"]
    assert [source.size(part) for part in range(3)] == [None, 4, None]
    assert [sample.key for sample in source.samples(2)] == [row["key"] for row in rows[8:]]
    again = pickle.loads(pickle.dumps(source))
    assert read_all(again) == read_all(source)
    assert again.fingerprint() == source.fingerprint()


def test_a_pattern_names_tars_anywhere_fsspec_reaches(rows):
    for number in range(2):
        content = tar_bytes(tar_members(rows[number * 6 : number * 6 + 6]))
        fsspec.filesystem("memory").pipe(f"/bucket/{number:05d}.tar", content)
    for pattern in ("memory://bucket/{00000..00001}.tar", "memory://bucket/*.tar", "memory://bucket"):
        source = open_source(pattern, 1000)
        assert source.parts == ["00000", "00001"]
        assert [sample.key for sample in read_all(source)] == [row["key"] for row in rows]


def test_a_missing_tar_of_a_pattern_is_counted(rows, tmp_path):
    (tmp_path / "00001.tar").write_bytes(tar_bytes(tar_members(rows[:1])))
    source = open_source(f"{tmp_path}/{{00000..00001}}.tar", 1000)
    assert problems(read_all(source)) == ["file_missing", None]


def test_tars_of_the_same_name_have_parts_of_their_own(rows, tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "00000.tar").write_bytes(tar_bytes(tar_members(rows[:1])))
    assert open_source(f"{tmp_path}/{{a,b}}/00000.tar", 1).parts == ["00000-00000", "00001-00000"]


def test_the_fingerprint_is_that_of_the_names_and_sizes(rows, tmp_path):
    content = tar_bytes(tar_members(rows[:1]))
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "00000.tar").write_bytes(content)
    here, there = (open_source(tmp_path / folder, 1).fingerprint() for folder in ("here", "there"))
    assert here == there
    (tmp_path / "here" / "00000.tar").write_bytes(content + bytes(BLOCK))
    assert open_source(tmp_path / "here", 1).fingerprint() != here
