import json
import tracemalloc

import pytest
from PIL import Image

from dalle_lean.images import files as pictures
from preprocessing.sources import folder as folder_source
from preprocessing.sources import open_source
from preprocessing.sources.files import expand_braces
from tests.preprocessing.shards_of_pictures import emoji_rows, problems, read_all, tar_members, write_parquet


def write_listing(folder, *rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / "metadata.jsonl").write_bytes(b"\n".join(lines))


@pytest.fixture
def folder(tmp_path):
    """Three pictures, one of them in a subfolder, and nothing that captions them."""
    (tmp_path / "sub").mkdir()
    for name in ("b.png", "a.JPG", "sub/c.webp"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    return tmp_path


def test_a_listing_gives_its_pictures_in_the_order_of_its_lines(folder):
    write_listing(
        folder,
        {"file_name": "sub/c.webp", "text": "a first", "url": "http://x/c", "NSFW": "UNLIKELY"},
        {"file_name": "a.JPG", "caption": "a second", "key": 17},
        {"file_name": "b.png", "text": None, "caption": "a third"},
    )
    samples = read_all(open_source(folder, 2))
    assert [(sample.key, sample.caption) for sample in samples] == [
        ("sub/c.webp", "a first"),
        ("17", "a second"),
        ("b.png", "a third"),
    ]
    assert [sample.picture for sample in samples] == [
        (folder / name).read_bytes() for name in ("sub/c.webp", "a.JPG", "b.png")
    ]
    assert samples[0].metadata["url"] == "http://x/c"
    assert samples[0].metadata["NSFW"] == "UNLIKELY"
    assert not any(sample.problem for sample in samples)


def test_texts_beside_the_pictures_are_their_captions(folder):
    (folder / "b.txt").write_text("a line\r\nand another\n", encoding="utf-8-sig")
    (folder / "sub" / "c.txt").write_bytes(b"caf\xe9 noir")
    samples = read_all(open_source(folder, 10))
    assert [(sample.key, sample.caption) for sample in samples] == [
        ("a.JPG", None),
        ("b.png", "a line and another"),
        ("sub/c.webp", "caf\N{REPLACEMENT CHARACTER} noir"),
    ]


def test_a_picture_listed_twice_has_two_captions(folder):
    write_listing(folder, *({"file_name": "b.png", "text": text} for text in ("Rex", "Rex\non a sofa")))
    samples = read_all(open_source(folder, 10))
    assert [(sample.caption, sample.picture) for sample in samples] == [
        (caption, (folder / "b.png").read_bytes()) for caption in ("Rex", "Rex\non a sofa")
    ]


@pytest.mark.parametrize("listed", [True, False])
def test_any_part_can_be_read_alone(discs, listed):
    if not listed:
        (discs / "metadata.jsonl").unlink()
    whole, cut = open_source(discs, 30), open_source(discs, 7)
    assert cut.parts == ["00000", "00001", "00002", "00003", "00004"]
    assert [cut.size(part) for part in range(5)] == [7, 7, 7, 7, 2]
    assert list(cut.samples(3)) == list(whole.samples(0))[21:28]
    assert read_all(cut) == read_all(whole)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"{", "metadata_broken"),
        (b"\xff\xfe", "metadata_broken"),
        (b"[" * 100_000, "metadata_broken"),
        (b'"a.JPG"', "metadata_broken"),
        ({"text": "no file"}, "metadata_broken"),
        ({"file_name": 3, "text": "a number"}, "metadata_broken"),
        ({"file_name": "gone.png", "text": "a cat"}, "picture_missing"),
        ({"file_name": "", "text": "a cat"}, "picture_missing"),
        ({"file_name": "sub", "text": "a folder"}, "picture_missing"),
        ({"file_name": "x" * 5000, "text": "a cat"}, "picture_unreadable"),
        ({"file_name": "b\0.png", "text": "a cat"}, "picture_missing"),
        ({"file_name": "loop.png", "text": "a cat"}, "picture_missing"),
        ({"file_name": "link.png", "text": "a cat"}, "picture_outside_folder"),
        ({"file_name": "linked/x.png", "text": "a cat"}, "picture_outside_folder"),
        ({"file_name": "../b.png", "text": "a cat"}, "picture_outside_folder"),
        ({"file_name": "/etc/hostname", "text": "a cat"}, "picture_outside_folder"),
    ],
)
def test_a_bad_line_is_passed_over_with_its_problem(folder, tmp_path_factory, row, problem):
    outside = tmp_path_factory.mktemp("outside")
    Image.new("RGB", (4, 4)).save(outside / "x.png")
    (folder / "link.png").symlink_to(outside / "x.png")
    (folder / "linked").symlink_to(outside)
    (folder / "loop.png").symlink_to("loop.png")
    write_listing(folder, {"file_name": "a.JPG", "text": "before"}, row, {"file_name": "b.png", "text": "after"})
    samples = read_all(open_source(folder, 10))
    assert problems(samples) == [None, problem, None]
    assert samples[1].picture == b""


@pytest.mark.parametrize("filling", [b"x", b" "])
def test_an_endless_line_is_not_read_whole(folder, monkeypatch, filling):
    monkeypatch.setattr(pictures, "MAX_PICTURE_BYTES", 2**16)  # as much as that is taken for any picture
    write_listing(
        folder, {"file_name": "a.JPG"}, b"[" + filling * 2**26, {"file_name": "b.png"}, {"file_name": "a.JPG"}
    )
    tracemalloc.start()
    try:
        source = open_source(folder, 1)
        samples = read_all(source)
        source.fingerprint()
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert problems(samples) == [None, "metadata_broken", None, None]
    assert samples[2].key == "b.png"


def test_a_line_of_just_the_limit_is_read_whole(folder, monkeypatch):
    line = json.dumps({"file_name": "b.png"}).encode()
    for limit, problem in ((len(line), None), (len(line) - 1, "metadata_broken")):
        monkeypatch.setattr(folder_source, "MAX_TEXT_BYTES", limit)
        write_listing(folder, line, b"{}", line)
        assert problems(read_all(open_source(folder, 1))) == [problem, "metadata_broken", problem]


@pytest.mark.parametrize("suffix", [".png", ".txt", ".json"])
def test_a_link_to_outside_the_folder_is_not_followed(folder, tmp_path_factory, suffix):
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_bytes(b'{"caption": "secret"}')
    (folder / "b").with_suffix(suffix).unlink(missing_ok=True)
    (folder / "b").with_suffix(suffix).symlink_to(secret)
    (folder / "twin.png").symlink_to("sub/c.webp")
    samples = {sample.key: sample for sample in read_all(open_source(folder, 10))}
    assert (samples["b.png"].problem, samples["b.png"].caption) == ("picture_outside_folder", None)
    assert samples["twin.png"].picture == (folder / "sub/c.webp").read_bytes()


def test_a_bad_line_is_named_by_its_number(folder):
    write_listing(folder, {"file_name": "a.JPG", "text": "before"}, b"", b"{")
    assert read_all(open_source(folder, 10))[1].key == "metadata.jsonl line 3"


def test_text_that_utf8_cannot_hold_is_mended(folder):
    write_listing(folder, b'{"file_name": "a.JPG", "text": "a \\ud800 cat", "key": "\\udc00"}')
    (sample,) = read_all(open_source(folder, 10))
    assert (sample.key, sample.caption) == ("?", "a ? cat")


def test_a_file_too_large_for_a_picture_is_not_read_whole(folder, monkeypatch):
    monkeypatch.setattr(pictures, "MAX_PICTURE_BYTES", 10)
    assert {sample.problem for sample in read_all(open_source(folder, 10))} == {"file_too_large"}


def test_the_fingerprint_tells_other_samples_and_another_order(discs):
    (discs / "metadata.jsonl").rename(discs / "listing")
    lines = (discs / "listing").read_bytes().splitlines()
    fingerprints = {open_source(discs, 7).fingerprint()}
    for listing in (lines, lines[::-1], lines[:-1]):
        (discs / "metadata.jsonl").write_bytes(b"\n".join(listing))
        fingerprints |= {open_source(discs, 7).fingerprint(), open_source(discs, 8).fingerprint()}
    assert len(fingerprints) == 4


@pytest.mark.parametrize("listed", [True, False])
def test_the_fingerprint_tells_replaced_pictures_and_captions(discs, listed):
    if not listed:
        (discs / "metadata.jsonl").unlink()
    caption, picture = discs / "000.txt", discs / "001.png"
    caption.write_text("before")
    fingerprints = [open_source(discs, 7).fingerprint() for _ in range(2)]
    picture.write_bytes(picture.read_bytes() + b"longer")
    fingerprints.append(open_source(discs, 7).fingerprint())
    caption.write_text("behind")
    fingerprints.append(open_source(discs, 7).fingerprint())
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == (2 if listed else 3)  # a listing has its own captions


def test_a_source_without_pictures_is_a_mistake(tmp_path):
    with pytest.raises(ValueError, match=r"no such folder or file; a source is a folder .* owner/name"):
        open_source(tmp_path / "gone", 10)
    with pytest.raises(ValueError, match="holds no pictures"):
        open_source(tmp_path, 10)
    (tmp_path / "metadata.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="lists no picture"):
        open_source(tmp_path, 10)


def test_held_out_pictures_are_not_swept_up_by_naming_their_parent(folder):
    for split in ("train", "heldout"):
        (folder / split).mkdir()
        write_listing(folder / split, {"file_name": "a.png", "text": "a cat"})
    with pytest.raises(ValueError, match=r"name one of \S+heldout, \S+train"):
        open_source(folder, 10)


def test_what_img2dataset_wrote_as_files_is_a_folder_with_its_metadata(emoji, tmp_path):
    rows = emoji_rows(emoji, 4)
    write_parquet(tmp_path / "00000.parquet", [{**row, "jpg": None} | {"jpg": "no bytes"} for row in rows])
    (tmp_path / "00000").mkdir()
    for name, content in tar_members(rows):
        (tmp_path / "00000" / name).write_bytes(content)
    (tmp_path / "00000" / "000000003.json").write_text("{")
    samples = read_all(open_source(tmp_path, 10))
    assert [sample.caption for sample in samples] == [row["caption"] for row in rows[:3]] + [None]
    assert problems(samples) == [None, None, None, "metadata_broken"]
    assert samples[2].metadata["NSFW"] == "UNLIKELY"
    assert samples[2].metadata["original_width"] == 514


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "no such folder or file; a source is"),
        ("/gone/00000.tar", "no such folder or file; a source is"),
        ("memory://nowhere/*.tar", "file there; a source is"),
        ("gone/{00000..00002}.rar", "file there; a source is"),
        ("gone/{0..3}.{tar,parquet}", "do not mix"),
        ("gone/{7..3}.tar", "must count upwards"),
        ("gone/{0..9999999}.tar", "must count upwards, to at most 1000000 names"),
        ("gone/{0..9999}{0..9999}.tar", "more than 1000000 names"),
    ],
)
def test_a_source_of_no_kind_is_refused_with_those_there_are(name, message):
    with pytest.raises(ValueError, match=message):
        open_source(name, 10)


def test_shards_of_codes_are_not_pictures(tmp_path):
    (tmp_path / "dataset.json").write_text("{}")
    (tmp_path / "contact_sheet.png").touch()
    with pytest.raises(ValueError, match="holds shards of codes, which are preprocessed already; a source is"):
        open_source(tmp_path, 10)


def test_pictures_beside_shards_of_codes_are_told_which_files_to_delete(tmp_path):
    for name in ("dataset.json", "a.png"):
        (tmp_path / name).touch()
    words = r"already; to preprocess its pictures, first delete dataset\.json, shard-\*\.parquet and contact_sheet\.png"
    with pytest.raises(ValueError, match=words):
        open_source(tmp_path, 10)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("{8..11}.tar", ["8.tar", "9.tar", "10.tar", "11.tar"]),
        ("{008..011}.tar", ["008.tar", "009.tar", "010.tar", "011.tar"]),
        ("{a,b}/{0..1}.tar", ["a/0.tar", "a/1.tar", "b/0.tar", "b/1.tar"]),
        ("{x}.tar", ["x.tar"]),
    ],
)
def test_braces_are_expanded_as_a_shell_does(pattern, names):
    assert expand_braces(pattern) == names
