"""What the shards hold: the codes of every usable picture, and everything else counted."""

import json

import numpy as np
import torch
from PIL import Image

from dalle_lean.io.files import sha256_file
from preprocessing.encoding.encode import preprocess
from preprocessing.encoding.filters import Rules
from preprocessing.shards.manifest import read_dataset_info
from preprocessing.sources import open_source
from tests.preprocessing.runs import add_lines, contents
from tests.preprocessing.shard_folders import stored_rows


def test_the_codes_are_those_of_each_picture_encoded_by_itself(discs, vqgan, tmp_path):
    info = preprocess(open_source(discs, 8), tmp_path / "out", vqgan, batch_size=3)
    streamed = list(stored_rows(tmp_path / "out"))
    assert info.num_codes == 4
    assert len(streamed) == 30
    for index, row in enumerate(streamed):
        image = Image.open(discs / f"{index:03d}.png")
        left = (image.width - 24) // 2
        image = image.crop((left, 0, left + 24, 24)).resize((16, 16), Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
        assert row["codes"].tolist() == vqgan.encode(pixels)[0].tolist()
        assert row["caption"].endswith(f"disc, number {index}")
        assert row["key"] == f"{index:03d}.png"


def test_everything_seen_is_kept_or_rejected_for_a_reason_and_named(discs, vqgan, tmp_path):
    whole = (discs / "000.png").read_bytes()
    (discs / "cut.png").write_bytes(whole[: len(whole) // 2])
    (discs / "text.png").write_text("no picture")
    Image.new("RGB", (61, 30)).save(discs / "wide.png")
    Image.new("RGB", (300, 300)).save(discs / "large.png")
    add_lines(
        discs,
        {"file_name": "cut.png", "text": "a cut picture"},
        {"file_name": "text.png", "text": "a text"},
        {"file_name": "gone.png", "text": "a missing picture"},
        {"file_name": "wide.png", "text": "a wide picture"},
        {"file_name": "large.png", "text": "a large picture"},
        {"file_name": "000.png", "text": "ab"},
        {"file_name": "000.png"},
        {"file_name": "000.png", "text": "a disc", "NSFW": "UNSURE"},
        {"file_name": "000.png", "text": "a disc", "original_width": 0},
        {"file_name": "000.png", "text": "a disc", "original_width": "wide"},
        {"file_name": "000.png", "text": "a disc", "original_width": 900, "original_height": 100},
        {"file_name": "000.png", "text": "a last disc", "NSFW": "UNLIKELY", "url": "http://x", "original_width": 30.0},
    )
    info = preprocess(open_source(discs, 8), tmp_path / "out", vqgan, max_pixels=50_000, explain=True)
    assert info.counts.seen == 42
    assert info.counts.kept == 31
    assert info.counts.rejected == {
        "aspect_ratio": 2,
        "caption_missing": 1,
        "caption_short": 1,
        "nsfw": 1,
        "picture_broken": 2,
        "picture_missing": 1,
        "size_not_positive": 2,
        "too_many_pixels": 1,
    }
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    named = {rejection["key"]: rejection["reason"] for rejection in rejected}
    assert len(rejected) == 11
    assert named["cut.png"] == named["text.png"] == "picture_broken"
    assert read_dataset_info(tmp_path / "out") == info
    assert [shard.sha256 for shard in info.shards] == [
        sha256_file(tmp_path / "out" / shard.file) for shard in info.shards
    ]
    assert list(stored_rows(tmp_path / "out"))[-1]["caption"] == "a last disc"


def test_a_part_of_which_nothing_is_kept_has_no_shard(discs, vqgan, tmp_path):
    for index in range(10, 20):
        (discs / f"{index:03d}.png").write_bytes(b"")
    info = preprocess(open_source(discs, 10), tmp_path / "out", vqgan)
    assert [shard.file for shard in info.shards] == ["shard-00000.parquet", "shard-00002.parquet"]
    assert len(list(stored_rows(tmp_path / "out"))) == 20


def test_crops_and_mirror_images_are_rows_of_their_own(vqgan, tmp_path):
    folder = tmp_path / "wide"
    folder.mkdir()
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, :16], pixels[4:12, 18:22] = (255, 0, 0), (0, 255, 0)
    Image.fromarray(pixels).save(folder / "wide.png")
    Image.fromarray(pixels[:, :16]).save(folder / "square.png")
    for name in ("wide", "square"):
        (folder / f"{name}.txt").write_text(f"a {name} picture")
    info = preprocess(open_source(folder, 8), tmp_path / "out", vqgan, crops=3, flip=True)
    rows = {row["key"]: row["codes"].tolist() for row in stored_rows(tmp_path / "out")}

    def codes(square) -> list[int]:
        return vqgan.encode(torch.from_numpy(square.copy()).permute(2, 0, 1)[None] / 255)[0].tolist()

    expected = {"square.png": codes(pixels[:, :16]), "square.png#1": codes(pixels[:, 15::-1])}
    for number, left in enumerate((0, 8, 16)):
        square = pixels[:, left : left + 16]
        expected[f"wide.png#{2 * number}" if number else "wide.png"] = codes(square)
        expected[f"wide.png#{2 * number + 1}"] = codes(square[:, ::-1])
    assert rows == expected
    assert (info.counts.kept, info.counts.further_views) == (2, 6)
    assert (info.settings["crops"], info.settings["flip"]) == (3, True)
    assert read_dataset_info(tmp_path / "out") == info


def test_copies_within_a_part_are_rejected_and_the_first_is_kept(emoji, vqgan, tmp_path):
    folder = tmp_path / "copies"
    folder.mkdir()
    picture = Image.open(emoji / "000.png").convert("RGB")
    for name, side in (("0.png", 128), ("1.png", 64), ("2.png", 96)):
        picture.resize((side, side)).save(folder / name)
        (folder / name).with_suffix(".txt").write_text("the same")
    rules = Rules(max_hash_distance=6)
    info = preprocess(open_source(folder, 2), tmp_path / "out", vqgan, rules=rules, explain=True)
    assert info.counts.rejected == {"duplicate": 1}
    assert json.loads((tmp_path / "out" / "rejected.jsonl").read_text()) == {
        "key": "1.png",
        "reason": "duplicate",
        "detail": "looks like 0.png",
    }
    assert [row["key"] for row in stored_rows(tmp_path / "out")] == ["0.png", "2.png"]


def test_reasons_are_counted_always_and_explained_when_asked(discs, vqgan, tmp_path):
    (discs / "003.png").write_bytes(b"no picture")
    plain = preprocess(open_source(discs, 8), tmp_path / "plain", vqgan)
    explained = preprocess(open_source(discs, 8), tmp_path / "explained", vqgan, explain=True)
    assert plain.counts == explained.counts
    assert plain.counts.rejected == {"picture_broken": 1}
    assert not (tmp_path / "plain" / "rejected.jsonl").exists()
    rejection = json.loads((tmp_path / "explained" / "rejected.jsonl").read_text())
    assert (rejection["key"], rejection["reason"]) == ("003.png", "picture_broken")


def test_the_number_of_workers_changes_nothing(discs, vqgan, tmp_path):
    for workers in (1, 4):
        preprocess(open_source(discs, 8), tmp_path / str(workers), vqgan, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "4")


def test_bfloat16_changes_few_codes(discs, vqgan, tmp_path):
    codes = []
    for bf16 in (False, True):
        info = preprocess(open_source(discs, 8), tmp_path / str(bf16), vqgan, bf16=bf16)
        codes.append(np.stack([row["codes"] for row in stored_rows(tmp_path / str(bf16))]))
    assert info.settings["precision"] == "bfloat16"
    assert (codes[0] == codes[1]).mean() > 0.8
