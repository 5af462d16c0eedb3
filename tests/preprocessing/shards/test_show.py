"""`dalle-lean shards show`: statistics against plain counting, and the pictures that the codes stand for."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from dalle_lean.images.files import open_picture, square_pixels
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.model_folder import bundled_model
from preprocessing.shards.contact_sheet import contact_sheet, decode_sample
from preprocessing.shards.statistics import ShardStatistics, collect_statistics
from tests.preprocessing.runs import run_command
from tests.preprocessing.shard_folders import make_rows, random_codes, stored_rows, write_folder


@pytest.fixture
def folder(tmp_path, vqgan):
    """Two shards, 100 pictures."""
    parts = [make_rows(random_codes(vqgan, 60, 0), 0), make_rows(random_codes(vqgan, 40, 1), 1)]
    return write_folder(tmp_path / "shards", vqgan, parts, rejected={"nsfw": 20, "caption_short": 5})


@pytest.fixture(scope="module")
def emoji_shards(emoji, tmp_path_factory):
    """12 real pictures encoded by the bundled VQGAN, which is float32 on the CPU; the pictures; the folder."""
    vqgan = VQGAN.load(bundled_model() / "vqgan")
    lines = [json.loads(line) for line in (emoji / "metadata.jsonl").read_text().splitlines()[:12]]
    files = [(emoji / line["file_name"]).read_bytes() for line in lines]
    pixels = np.stack([square_pixels(open_picture(file), vqgan.config.picture_side) for file in files])
    codes = vqgan.encode(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255).numpy()
    folder = write_folder(tmp_path_factory.mktemp("emoji"), vqgan, [make_rows(codes)])
    return folder, pixels


def test_statistics_are_those_of_plain_counting(folder, vqgan):
    statistics = collect_statistics(folder, count=7, seed=0)
    rows = list(stored_rows(folder))
    used = Counter(int(code) for row in rows for code in row["codes"])
    assert {code: count for code, count in enumerate(statistics.code_counts) if count} == used
    total = used.total()
    bits = -sum(count / total * np.log2(count / total) for count in used.values())
    lengths = sorted(len(row["caption"]) for row in rows)
    assert sorted(statistics.caption_lengths.elements()) == lengths
    assert statistics.caption_length(0.5) == lengths[49]
    assert (statistics.caption_length(0), statistics.caption_length(1)) == (lengths[0], lengths[-1])
    facts = dict(statistics.facts())
    assert facts["codebook used"] == f"{len(used) / 64:.1%}, perplexity {2**bits:,.1f}"
    assert facts["pictures kept"] == "100 of 125 (80.0%)"
    assert facts["rejected: nsfw"] == "20 (16.0%)"


def test_the_rows_shown_are_drawn_by_seed_from_all_shards(folder):
    keys = [collect_statistics(folder, count=20, seed=seed).sample.keys for seed in (0, 0, 1)]
    assert keys[0] == keys[1] != keys[2]
    assert len(set(keys[0])) == 20
    assert {key[0] for key in keys[0]} == {"0", "1"}
    assert len(collect_statistics(folder, count=1000, seed=0).sample) == 100
    by_key = {row["key"]: row for row in stored_rows(folder)}
    sample = collect_statistics(folder, count=20, seed=0).sample
    for caption, codes, key in zip(sample.captions, sample.codes, sample.keys, strict=True):
        assert (codes == by_key[key]["codes"]).all()
        assert caption == by_key[key]["caption"]


def test_the_sheet_shows_what_the_vqgan_decodes(folder, vqgan):
    statistics = collect_statistics(folder, count=10, seed=0)
    pictures = decode_sample(statistics.sample, vqgan)
    alone = vqgan.decode(torch.from_numpy(statistics.sample.codes[9:10].astype(np.int64)))[0]
    assert np.abs(np.asarray(pictures[9]) / 255 - alone.permute(1, 2, 0).numpy()).max() < 0.01
    sheet = contact_sheet("shards", statistics, pictures)
    assert sheet.width > 8 * 192
    assert sheet.height > 2 * 192
    assert np.asarray(sheet).std() > 10


def run(*arguments):
    return run_command("shards", "show", *arguments, "--device", "cpu")


def test_the_bundled_vqgan_shows_its_own_codes(emoji_shards, tmp_path, capsys):
    folder, pixels = emoji_shards
    out = tmp_path / "sheet.png"
    assert run(folder, "--out", out, "--count", 12) == 0
    assert f"{out} shows 12 pictures\n" in capsys.readouterr().out
    with Image.open(out) as sheet:
        shown = np.asarray(sheet.convert("RGB"))
    # Somewhere on the sheet, enlarged, stands each picture: the first one in the first place.
    top = shown.shape[0] - 2 * (192 + 16 + 3 * 17 + 8)
    first = np.asarray(Image.fromarray(shown[top : top + 192, 16 : 16 + 192]).resize(pixels.shape[1:3]), dtype=float)
    errors = [np.abs(first - picture).mean() for picture in pixels.astype(float)]
    assert int(np.argmin(errors)) == 0
    assert errors[0] < 30


def test_a_sheet_of_some_pictures_says_of_how_many(folder, vqgan_folder, tmp_path, capsys, monkeypatch):
    told, shown = [], ShardStatistics.shown
    monkeypatch.setattr(ShardStatistics, "shown", lambda one: told.append(shown(one)) or told[-1])
    assert run(folder, "--vqgan", vqgan_folder, "--out", tmp_path / "sheet.png") == 0
    assert "sheet.png shows 32 of 100 pictures, drawn at random\n" in capsys.readouterr().out
    assert told == ["32 of 100 pictures, drawn at random"] * 2  # on the sheet, and in the line


def test_the_same_call_draws_the_same_bytes(folder, vqgan_folder, tmp_path):
    for name in ("a.png", "b.png"):
        assert run(folder, "--vqgan", vqgan_folder, "--out", tmp_path / name) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_codes_of_an_unknown_vqgan_are_not_shown(folder, capsys):
    assert run(folder) == 2
    assert "name the one that made them with --vqgan" in capsys.readouterr().err
    assert not (folder / "contact_sheet.png").exists()


def test_a_damaged_shard_is_a_mistake_that_names_it(folder, vqgan_folder, capsys):
    (folder / "shard-00001.parquet").write_bytes(b"no Parquet")
    assert run(folder, "--vqgan", vqgan_folder) == 2
    assert "shard-00001.parquet is damaged or no shard" in capsys.readouterr().err
