"""The VQGAN against the golden data, and what it refuses."""

import dataclasses
import json
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

from dalle_lean.convert.taming import from_taming
from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN
from tests import golden_data as golden
from tests.tiny import VQGAN_CONFIG, tiny_vqgan


def pictures(number: int = 3, side: int = 32) -> torch.Tensor:
    return torch.rand(number, 3, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["vqgan_gumbel_tiny", "vqgan_vq_tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codes_and_reconstruction_equal_the_reference(name, dtype):
    facts, stored = golden.facts(name), golden.tensors(name)
    weights = {key.removeprefix("state_dict."): value for key, value in stored.items() if key.startswith("state_dict.")}
    params = {key: facts[key] for key in ("ddconfig", "embed_dim", "n_embed")}
    model = from_taming(weights, {"target": f"taming.models.vqgan.{facts['kind']}", "params": params}).to(dtype)

    codes = model.encode(stored["io.images"].to(dtype))
    images = model.decode(stored["io.codes"])

    assert torch.equal(codes, stored["io.codes"])
    # The reference itself is float32: its own rounding is what remains.
    torch.testing.assert_close(images, stored["io.reconstruction"].to(dtype), rtol=0, atol=1e-5)


@pytest.mark.parametrize("quantizer", ["gumbel", "vq"])
def test_each_code_is_the_best_of_the_obvious_search(quantizer):
    model = tiny_vqgan(quantizer=quantizer)
    images = pictures()
    z = model.latents(images * 2 - 1).flatten(2).transpose(1, 2)  # [N, h*w, C]
    if quantizer == "vq":
        best = torch.cdist(z, model.quantize.table).argmin(dim=-1)
    else:
        best = (z @ model.quantize.proj.weight[:, :, 0, 0].T + model.quantize.proj.bias).argmax(dim=-1)
    assert torch.equal(model.encode(images), best)


def test_encoding_draws_no_noise():
    model = tiny_vqgan(quantizer="gumbel")
    before = torch.get_rng_state()
    first, second = model.encode(pictures()), model.encode(pictures())
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_picture_sizes_pass_where_the_grid_fits():
    codes = tiny_vqgan().encode(pictures(side=48))
    assert codes.shape == (3, 36)
    assert tiny_vqgan().decode(codes).shape == (3, 3, 48, 48)


def test_decoded_pictures_stay_in_0_to_1():
    model = tiny_vqgan()
    with torch.no_grad():
        model.decoder.conv_out.weight *= 100
    images = model.decode(torch.zeros(1, 16, dtype=torch.int64))
    assert images.min() >= 0
    assert images.max() <= 1


@pytest.mark.parametrize(
    ("images", "complaint"),
    [
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "dtype torch.uint8"),
        (torch.zeros(3, 32, 32), r"shape \[3, 32, 32\]"),
        (torch.zeros(1, 1, 32, 32), r"shape \[1, 1, 32, 32\]"),
        (torch.zeros(1, 3, 32, 40), r"shape \[1, 3, 32, 40\]"),
        (torch.zeros(1, 3, 36, 36), "multiple of 8"),
        (torch.zeros(1, 3, 0, 0), "multiple of 8"),
        (torch.full((1, 3, 32, 32), -1.0), "must be in 0..1"),
        (torch.full((1, 3, 32, 32), 255.0), "must be in 0..1"),
        (torch.full((1, 3, 32, 32), float("nan")), "must be in 0..1"),
    ],
)
def test_what_is_no_picture_is_refused(images, complaint):
    with pytest.raises(ValueError, match=f"images: .*{complaint}"):
        tiny_vqgan().encode(images)


@pytest.mark.parametrize(
    ("codes", "complaint"),
    [
        (torch.zeros(1, 16), "dtype torch.float32"),
        (torch.zeros(1, 16, dtype=torch.int32), "dtype torch.int32"),
        (torch.zeros(16, dtype=torch.int64), "square"),
        (torch.zeros(1, 15, dtype=torch.int64), "square"),
        (torch.full((1, 16), 32), "must be in 0..31"),
        (torch.full((1, 16), -1), "must be in 0..31"),
    ],
)
def test_what_are_no_codes_is_refused(codes, complaint):
    with pytest.raises(ValueError, match=f"codes: .*{complaint}"):
        tiny_vqgan().decode(codes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"quantizer": "random"}, "quantizer='random'"),
        ({"codebook_size": 0}, "codebook_size=0"),
        ({"channels": 48}, "multiple of 32"),
        ({"norm_groups": 5}, "norm_groups=5"),
        ({"picture_side": 60}, "picture_side=60"),
        ({"channel_multipliers": ()}, "channel_multipliers"),
        ({"channel_multipliers": 3}, "channel_multipliers=3"),
        ({"channel_multipliers": (1, 10**9)}, "channel_multipliers=.*1000000000"),
        ({"attention_resolutions": 5}, "attention_resolutions=5"),
        ({"norm_groups": "8"}, "norm_groups='8'"),
        ({"picture_side": 10**9}, r"picture_side=1000000000: must be a whole number in 1\.\.8192"),
        ({"channels": 2**20}, "channels=1048576"),
        ({"quantizer": "gumbel", "z_channels": 16}, "z_channels=16"),
        ({"encoder_window": 6}, r"encoder_window=6: must be an even number of pixels in 8\.\.32"),
        ({"encoder_window": 9}, "encoder_window=9"),
        ({"encoder_window": "8"}, "encoder_window='8'"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(VQGAN_CONFIG, **changes)


@pytest.mark.parametrize(("window", "changed"), [(8, {5}), (16, {0, 1, 2, 4, 5, 6, 8, 9, 10}), (None, {*range(16)})])
def test_a_code_is_decided_by_its_window_alone(window, changed):
    model, images = tiny_vqgan(encoder_window=window), pictures()[:1]
    other = images.clone()
    other[..., 8:16, 8:16] = 1 - other[..., 8:16, 8:16]
    differ = (model.latents(images) - model.latents(other)).abs().amax(dim=1).flatten() > 0
    assert {*differ.nonzero().flatten().tolist()} == changed


@pytest.mark.parametrize("quantizer", ["gumbel", "vq"])
def test_equal_patches_are_encoded_once_and_have_the_codes_of_each_alone(quantizer):
    model, images = tiny_vqgan(quantizer=quantizer, encoder_window=8), pictures()
    images[:, :, 8:16] = images[:1, :, :8]  # a row of patches that each picture has, and the first one twice
    encoded = []
    model.encoder.register_forward_hook(lambda _encoder, inputs, _output: encoded.append(len(inputs[0])))
    codes = model.encode(images)
    assert encoded == [len(images) * 16 - 4 * 3]
    each = torch.cat(
        [
            model.encode(patch[None])
            for patch in images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        ]
    )
    assert torch.equal(codes, each.view_as(codes))


def test_a_single_picture_has_the_codes_that_it_has_among_others():
    model, images = tiny_vqgan(encoder_window=8), pictures()
    single = images[0].permute(1, 2, 0).contiguous().permute(2, 0, 1)[None]  # as an image file is read
    assert torch.equal(model.encode(single), model.encode(images)[:1])


@pytest.mark.parametrize("window", [None, 12])
def test_a_saved_folder_loads_as_the_same_model(window, tmp_path):
    model = tiny_vqgan(encoder_window=window)
    model.save(tmp_path)
    loaded = VQGAN.load(tmp_path)
    assert loaded.config == model.config
    assert loaded.fingerprint() == model.fingerprint()
    assert torch.equal(loaded.encode(pictures()), model.encode(pictures()))


def test_the_fingerprint_is_that_of_the_values_not_of_their_storage(tmp_path):
    model = tiny_vqgan()
    model.save(tmp_path / "rounded", dtype=torch.bfloat16)
    rounded = VQGAN.load(tmp_path / "rounded")
    rounded.save(tmp_path / "wide")
    assert VQGAN.load(tmp_path / "wide").fingerprint() == rounded.fingerprint()
    assert rounded.fingerprint() != model.fingerprint()  # rounding changed the weights, so it changed the codes
    assert tiny_vqgan(norm_groups=4).fingerprint() != model.fingerprint()


def test_a_folder_without_a_window_is_written_as_before_there_was_one():
    assert "encoder_window" not in tiny_vqgan().config.to_dict()
    assert tiny_vqgan(encoder_window=8).config.to_dict()["encoder_window"] == 8


def test_weights_that_were_swapped_are_refused(tmp_path):
    tiny_vqgan().save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["quant_conv.bias"] += 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not those that config"):
        VQGAN.load(tmp_path)


def test_a_config_that_asks_for_more_than_the_weights_have_takes_no_memory(tmp_path):
    tiny_vqgan().save(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content |= {"codebook_size": 2**20, "code_width": 2**16, "channels": 4096}
    (tmp_path / "config.json").write_text(json.dumps(content))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="has shape"):
        VQGAN.load(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="not of the format dalle_lean_vqgan"):
        VQGAN.load(tmp_path)


def test_building_prints_nothing(capsys):
    tiny_vqgan()
    assert capsys.readouterr().out == ""
