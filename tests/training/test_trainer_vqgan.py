"""Which VQGAN a run takes, and which held-out codes."""

import numpy as np
import pytest

from dalle_lean.cli import main
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.files import sha256_file
from dalle_lean.io.model_folder import bundled_model, check_parts
from inference.gallery import tile_sheet
from tests.tiny import tiny_vqgan
from tests.training.runs import relabelled
from training.data.heldout import heldout_rows
from training.trainer import DalleRun, train


@pytest.fixture(scope="module")
def vqgan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts") / "vqgan"
    tiny_vqgan().save(folder)
    return folder


@pytest.fixture
def decodable(shards, vqgan, tmp_path):
    """The shards, as if made by `vqgan`."""
    return relabelled(shards, tmp_path / "decodable", vqgan=VQGAN.load(vqgan).fingerprint())


def test_samples_are_drawn_beside_the_pictures_whose_captions_they_have(
    decodable, recipe, vqgan, tmp_path, monkeypatch
):
    shown = []
    monkeypatch.setattr(
        "training.run.previews.tile_sheet",
        lambda tiles, texts, **options: (
            shown.extend(zip(tiles, texts, strict=True)) or tile_sheet(tiles, texts, **options)
        ),
    )
    out = tmp_path / "out"
    run = DalleRun(decodable, out, recipe, vqgan=vqgan)
    run.run()
    assert (out / "samples" / "step-000012.png").exists()
    rows = heldout_rows(run.data.shards, recipe.data.heldout_share, recipe.data.heldout_samples)
    captions = rows.captions[:8]
    assert [text for _, text in shown] == [
        f"{kind}: {caption}" for caption in captions for kind in ("held-out", "drawn")
    ]
    decoded = run.vqgan.decode(run.heldout.image_codes[:8]).permute(0, 2, 3, 1).numpy() * 255
    for (tile, _), picture in zip(shown[::2], decoded, strict=True):
        assert abs(np.asarray(tile) - picture).max() < 1
    assert (out / "model" / "vqgan" / "config.json").exists()
    check_parts(out / "model")


def test_a_vqgan_that_did_not_make_the_codes_is_refused(shards, recipe, vqgan, tmp_path):
    with pytest.raises(ValueError, match="preprocessed with"):
        train(shards, tmp_path, recipe, vqgan=vqgan)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vqgan": "b" * 64}, f"vqgan {'b' * 64}, but .* has {'a' * 64}; preprocess both"),
        ({"image_side": 8}, "image_side 8, but .* has 4; preprocess both"),
        ({"codebook_size": 64}, "codebook_size 64, but .* has 32; preprocess both"),
    ],
)
def test_held_out_shards_of_other_codes_are_refused(shards, recipe, tmp_path, changes, message):
    heldout = relabelled(shards, tmp_path / "heldout", **changes)
    with pytest.raises(ValueError, match=message):
        train(shards, tmp_path / "out", recipe, heldout=heldout)
    assert not (tmp_path / "out").exists()


def run_command(data, out):
    with pytest.raises(SystemExit) as end:
        main(["train", str(data), str(out), "--config", "tiny", "--steps", "1", "--device", "cpu"])
    assert end.value.code == 0


def test_the_bundled_vqgan_is_taken_where_it_made_the_codes(shards, tmp_path, capsys):
    bundled = bundled_model() / "vqgan"
    run_command(relabelled(shards, tmp_path / "data", vqgan=VQGAN.load(bundled).fingerprint()), tmp_path / "out")
    assert sha256_file(tmp_path / "out/model/vqgan/config.json") == sha256_file(bundled / "config.json")
    assert list((tmp_path / "out/samples").iterdir())
    assert "warning" not in capsys.readouterr().err


def test_a_model_that_will_have_no_vqgan_is_announced_in_one_line(shards, tmp_path, capsys):
    run_command(shards, tmp_path / "out")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert "no VQGAN" in line
    assert "--vqgan" in line
    assert not (tmp_path / "out/model/vqgan").exists()
