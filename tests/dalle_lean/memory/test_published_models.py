"""Published transformers have their published sizes."""

import pytest

from dalle_lean.memory.parameters import parameters
from dalle_lean.memory.published_models import PRESETS
from dalle_lean.memory.shapes import shape_parameter_sizes

# What the published checkpoints hold, each tied tensor once.
PUBLISHED = {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-j": 6_050_882_784,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_exactly_the_published_parameters(name):
    assert sum(shape_parameter_sizes(PRESETS[name])) == PUBLISHED[name]


def test_gpt_3_has_about_175_billion():
    assert sum(shape_parameter_sizes(PRESETS["gpt3"])) == pytest.approx(175e9, rel=0.003)


def test_openais_dall_e_has_about_12_billion():
    assert parameters(PRESETS["dalle-12b"]) == pytest.approx(12e9, rel=0.02)


def test_every_preset_is_held_against_what_was_published():
    assert set(PRESETS) == {*PUBLISHED, "gpt3", "dalle-12b"}
