import json
import re

import pytest
import torch

from dalle_lean import Dalle, DalleConfig
from dalle_lean.convert import from_dalle_pytorch, to_dalle_pytorch
from dalle_lean.convert.files import import_dalle
from dalle_lean.io.model_folder import pack_model
from tests import golden_data as golden
from tests.tiny import DALLE_FIELDS, tiny_vqgan

NAME = "dalle_tiny_shift_conv14"


@pytest.mark.parametrize("name", golden.DALLE_FIXTURES)
def test_the_round_trip_keeps_every_published_key_and_value(name):
    published = golden.state_dict(name)
    back = to_dalle_pytorch(from_dalle_pytorch(published, golden.config(name)), golden.generation(name))
    assert set(back) == set(published)
    for key, value in published.items():
        assert torch.equal(back[key], value), key


@pytest.mark.parametrize("generation", ["fork", "1.4"])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize(
    "fields", [{"token_shift": True}, {"token_shift": False}, {"reversible": False}, {"tie_embeddings": False}]
)
def test_every_generation_of_names_loads(generation, prefix, fields):
    model = Dalle(DalleConfig(**DALLE_FIELDS, **fields))
    loaded = from_dalle_pytorch(to_dalle_pytorch(model, generation, prefix), model.config)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def test_files_without_aliases_load_too():
    published = golden.state_dict(NAME)
    for alias in golden.facts(NAME)["aliases"]:
        del published[alias]
    from_dalle_pytorch(published, golden.config(NAME))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda s: s.pop("to_logits.0.bias"), "to_logits.0.bias is missing"),
        (lambda s: s.update({"visual.weight": torch.zeros(1)}), "visual.weight does not belong"),
        (lambda s: s.update({"to_logits.0.bias": torch.zeros(3)}), "to_logits.0.bias has shape [3]"),
        (
            lambda s: s.update({"text_emb.linear.bias": s["text_emb.linear.bias"] + 1}),
            "text_emb.linear.bias differs from to_logits.1.bias",
        ),
        (lambda s: s.update({"transformer.pos_emb": s["transformer.pos_emb"] + 1}), "transformer.pos_emb is not"),
        (
            lambda s: s.update({"transformer.layers.blocks.9.f.net.scale": torch.zeros(1, 1, 64)}),
            "transformer.layers.blocks.9.f.net.scale does not belong",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_by_key(spoil, words):
    published = golden.state_dict(NAME)
    published = {key: published[key] for key in [*golden.facts(NAME)["state_dict_key_order"], *published]}
    spoil(published)
    with pytest.raises(ValueError, match=re.escape(words)):
        from_dalle_pytorch(published, golden.config(NAME))


def test_a_layers_missing_weights_are_named_as_published():
    published = golden.state_dict(NAME)
    gone = "transformer.layers.blocks.8.f.net.fn.fn.fn.to_out.0.bias"
    del published[gone]
    with pytest.raises(ValueError, match=re.escape(f"{gone} is missing")):
        from_dalle_pytorch(published, golden.config(NAME))


@pytest.mark.parametrize(
    "field", [{"pixelfly_rank": 4, "pixelfly_block_size": 4}, {"ffn_gated": False}, {"ffn_activation": "silu"}]
)
def test_what_the_published_formats_cannot_hold_is_refused(field):
    shape = {"text_vocab_size": 16, "image_vocab_size": 16, "text_len": 4, "image_side": 4, "num_layers": 2}
    config = DalleConfig(**shape, hidden_size=32, num_heads=2, head_size=16, **field)
    with pytest.raises(ValueError, match=f"{next(iter(field))}=.*the published formats only have"):
        to_dalle_pytorch(Dalle(config))


def test_an_imported_model_takes_its_vqgan_with_another_decoder(tmp_path):
    model, vqgan = Dalle(DalleConfig(**DALLE_FIELDS)), tiny_vqgan(codebook_size=40)
    vqgan.save(tmp_path / "vqgan")
    torch.save(to_dalle_pytorch(model), tmp_path / "weights.pt")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    import_dalle(tmp_path / "weights.pt", tmp_path / "model", tmp_path / "config.json", vqgan=tmp_path / "vqgan")
    vqgan.decoder.load_state_dict(tiny_vqgan(codebook_size=40, seed=1).decoder.state_dict())
    vqgan.save(tmp_path / "other decoder")
    pack_model(tmp_path / "model", tmp_path / "packed", vqgan=tmp_path / "other decoder")
    packed = tmp_path / "packed" / "vqgan" / "config.json"
    assert packed.read_bytes() == (tmp_path / "other decoder" / "config.json").read_bytes()
