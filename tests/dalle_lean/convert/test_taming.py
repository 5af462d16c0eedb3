"""Published VQGAN checkpoints: everything that is taken, and everything that is refused by name."""

import sys

import pytest
import torch

from dalle_lean.convert.commands import convert
from dalle_lean.convert.files import read_state_dict
from dalle_lean.convert.taming import from_taming, taming_config
from dalle_lean.images.vqgan import VQGAN, VQGANConfig

DDCONFIG = {
    "double_z": False,
    "z_channels": 256,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 128,
    "ch_mult": [1, 1, 2, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [32],
    "dropout": 0.0,
}
# The `model` section of the published YAML, training's own fields included.
PUBLISHED = {
    "base_learning_rate": 4.5e-06,
    "target": "taming.models.vqgan.GumbelVQ",
    "params": {
        "kl_weight": 1e-08,
        "embed_dim": 256,
        "n_embed": 8192,
        "monitor": "val/rec_loss",
        "ddconfig": DDCONFIG,
        "lossconfig": {"target": "taming.modules.losses.vqperceptual.VQLPIPSWithDiscriminator", "params": {}},
    },
}


def small(target: str = "taming.models.vqgan.GumbelVQ", **ddconfig) -> dict:
    shape = {
        "z_channels": 32,
        "resolution": 32,
        "ch": 32,
        "ch_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "attn_resolutions": [],
    }
    return {"target": target, "params": {"embed_dim": 32, "n_embed": 16, "ddconfig": {**DDCONFIG, **shape, **ddconfig}}}


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_published_configuration_has_the_published_size():
    config = taming_config(PUBLISHED)
    assert config == VQGANConfig()
    with torch.device("meta"):
        model = VQGAN(config)
    assert count(model.encoder) == 26_345_728
    assert count(model.decoder) == 38_316_163


def test_training_weights_are_passed_over_and_the_rest_is_kept():
    config = small()
    source = VQGAN(taming_config(config))
    state = {
        **source.state_dict(),
        "loss.logvar": torch.zeros(()),
        "loss.perceptual_loss.lin0.model.1.weight": torch.zeros(1, 64, 1, 1),
        "loss.discriminator.main.0.weight": torch.zeros(64, 3, 4, 4),
    }
    assert from_taming(state, config).fingerprint() == source.fingerprint()


def test_the_plain_quantizer_has_its_own_names():
    config = small(target="taming.models.vqgan.VQModel")
    state = VQGAN(taming_config(config)).state_dict()
    assert "quantize.embedding.weight" in state
    assert from_taming(state, config).config.quantizer == "vq"
    with pytest.raises(ValueError, match=r"quantize\.embed\.weight"):
        from_taming(state, small())


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("quant_conv.bias", None, "missing key quant_conv.bias"),
        ("surprise.weight", torch.zeros(1), "unknown key surprise.weight"),
        ("lossy.weight", torch.zeros(1), "unknown key lossy.weight"),
        ("quant_conv.bias", torch.zeros(31), "key quant_conv.bias has shape"),
    ],
)
def test_a_key_that_does_not_fit_is_named(key, value, complaint):
    config = small()
    state = dict(VQGAN(taming_config(config)).state_dict())
    state.pop(key, None)
    if value is not None:
        state[key] = value
    with pytest.raises(ValueError, match=complaint):
        from_taming(state, config)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "target=None"),
        ({"target": "taming.models.vqgan.GumbelVQ"}, "missing field 'params'"),
        (small(target="taming.models.cond_transformer.Net2NetTransformer"), "target="),
        (small(double_z=True), "ddconfig.double_z=True"),
        (small(in_channels=1), "ddconfig.in_channels=1"),
        (small(attn_type="linear"), "unknown field 'attn_type'"),
    ],
)
def test_a_configuration_beyond_this_vqgan_is_refused(config, complaint):
    with pytest.raises(ValueError, match=complaint):
        taming_config(config)


@pytest.mark.parametrize("content", [b"", b"a text file\n", b"PK\x03\x04 cut off"])
def test_a_file_that_holds_no_weights_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.pt cannot be read as weights: \w+: ") as caught:
        read_state_dict(path)
    assert "\n" not in str(caught.value)


def test_a_vqgan_has_no_way_back(tmp_path):
    with pytest.raises(ValueError, match="--kind vqgan --to"):
        convert(tmp_path, tmp_path / "out.pt", kind="vqgan", to="fork")


def test_a_checkpoint_with_the_states_of_lightnings_callbacks_is_read_as_weights_alone(tmp_path, monkeypatch):
    callback = type("ModelCheckpoint", (), {"__module__": "pytorch_lightning.callbacks.model_checkpoint"})
    module = type(sys)(callback.__module__)
    module.ModelCheckpoint = callback
    with monkeypatch.context() as patch:
        for name in ("pytorch_lightning", "pytorch_lightning.callbacks"):
            patch.setitem(sys.modules, name, type(sys)(name))
        patch.setitem(sys.modules, module.__name__, module)
        content = {"callbacks": {callback: {"monitor": "val/rec_loss"}}, "state_dict": {"a.weight": torch.ones(2)}}
        torch.save(content, tmp_path / "last.ckpt")
    assert torch.equal(read_state_dict(tmp_path / "last.ckpt")["a.weight"], torch.ones(2))
