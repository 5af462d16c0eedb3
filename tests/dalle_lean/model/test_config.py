import dataclasses
import json
import re

import pytest

from dalle_lean import DalleConfig, MemoryPlan


def test_the_default_is_the_papers_model():
    paper = DalleConfig.paper()
    assert paper == DalleConfig()
    assert paper.layer_kinds == ("row", "column", "row", "row") * 15 + ("row", "column", "row", "conv")
    assert paper.layer_blocks == (0, 1, 2, 3) * 15 + (0, 1, 2, 4)
    assert (paper.sequence_len, paper.num_tokens) == (1280, 40548)


def test_a_config_survives_json():
    config = DalleConfig(shared_blocks=(0, 1, 0, 2), num_layers=4, attention_pattern=("row", "full"))
    assert DalleConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_untied_layers_have_a_block_each():
    assert DalleConfig(num_layers=6, shared_blocks=None).layer_blocks == (0, 1, 2, 3, 4, 5)


def test_without_a_last_kind_the_pattern_and_the_sharing_continue():
    config = DalleConfig(num_layers=6, last_attention=None)
    assert config.layer_kinds[-1] == "column"
    assert config.layer_blocks == (0, 1, 2, 3, 0, 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"hidden_size": 1.5}, "hidden_size=1.5"),
        ({"hidden_size": 66}, "hidden_size=66"),
        ({"head_size": 5}, "head_size=5"),
        ({"attention_pattern": ()}, "attention_pattern"),
        ({"attention_pattern": 3}, "attention_pattern=3"),
        ({"attention_pattern": (["row"],)}, "['row']"),
        ({"num_layers": 4097}, "num_layers=4097: must be a whole number in 1..4096"),
        ({"hidden_size": 10**9}, "hidden_size=1000000000"),
        ({"text_vocab_size": 2**24 + 1}, "text_vocab_size=16777217"),
        ({"attention_pattern": ("rows",)}, "'rows'"),
        ({"last_attention": "dense"}, "'dense'"),
        ({"conv_kernel": 4}, "conv_kernel=4"),
        ({"conv_window": "left"}, "conv_window='left'"),
        ({"shared_blocks": 0}, "shared_blocks=0"),
        ({"shared_blocks": 2, "attention_pattern": ("row", "column", "column", "row")}, "layer 2 has column attention"),
        ({"shared_blocks": (0, 1)}, "shared_blocks=(0, 1)"),
        ({"num_layers": 3, "shared_blocks": (0, 2, 0)}, "without gaps"),
        ({"num_layers": 2, "shared_blocks": (0, 10**15)}, "names a block in 0..1"),
        ({"token_shift": 1}, "token_shift=1"),
        ({"image_loss_weight": float("nan")}, "image_loss_weight=nan"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(fields, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        DalleConfig(**fields)


def test_an_unknown_field_is_named():
    with pytest.raises(ValueError, match="num_heds"):
        DalleConfig.from_dict({"num_heds": 4})


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DalleConfig().num_layers = 3


def test_a_plan_that_the_config_cannot_have_is_refused():
    plain = DalleConfig(reversible=False)
    assert MemoryPlan().activations_for(plain) == "checkpoint"
    assert MemoryPlan().activations_for(DalleConfig()) == "reversible"
    with pytest.raises(ValueError, match="not reversible takes keep, selective, checkpoint"):
        MemoryPlan(activations="reversible").activations_for(plain)
    with pytest.raises(ValueError, match="a reversible model takes keep, reversible"):
        MemoryPlan(activations="checkpoint").activations_for(DalleConfig())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"activations": "magic"}, "activations='magic'"),
        ({"samples": 0}, "samples=0"),
        ({"loss_tokens": 1.5}, "loss_tokens=1.5"),
        ({"residual_dtype": "float8"}, "residual_dtype='float8'"),
        ({"grads_in_place": 1}, "grads_in_place=1"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(fields, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        MemoryPlan(**fields)
