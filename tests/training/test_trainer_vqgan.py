"""Which VQGAN a run takes, and which held-out codes."""

import pytest
from PIL import Image

from dalle_lean.cli import main
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.files import sha256_file
from dalle_lean.io.model_folder import bundled_model, check_parts
from tests.tiny import tiny_vqgan
from tests.training.runs import relabelled
from training.trainer import train


@pytest.fixture(scope="module")
def vqgan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts") / "vqgan"
    tiny_vqgan().save(folder)
    return folder


@pytest.fixture
def decodable(shards, vqgan, tmp_path):
    """The shards, as if made by `vqgan`."""
    return relabelled(shards, tmp_path / "decodable", vqgan=VQGAN.load(vqgan).fingerprint())


def test_samples_are_drawn_below_the_pictures_whose_captions_they_have(decodable, recipe, vqgan, tmp_path):
    out = tmp_path / "out"
    train(decodable, out, recipe, vqgan=vqgan)
    with Image.open(out / "samples" / "step-000012.png") as sheet:
        assert sheet.size == (8 * 32, 2 * 32)
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
