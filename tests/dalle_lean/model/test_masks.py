import hashlib

import pytest
import torch

from dalle_lean import DalleConfig
from tests import golden_data as golden
from tests.dalle_lean.model.whole_mask import attention_mask

VERSIONS = {"1.4.2": "centred", "1.6.6": "corner"}
KINDS = {"axial_row": "row", "axial_col": "column", "conv_like": "conv"}


@pytest.mark.parametrize("key", sorted(golden.tensors("masks")))
def test_masks_are_those_measured_from_the_reference(key):
    kind, _, rest = key.partition(".")
    version, text, side = rest.rsplit(".", 2)
    config = DalleConfig(text_len=int(text[1:]), image_side=int(side[1:]), conv_window=VERSIONS[version])
    mask = attention_mask(config, KINDS[kind])
    assert torch.equal(mask[:-1, :-1], golden.tensors("masks")[key])


@pytest.mark.parametrize("key", sorted(golden.facts("masks")["paper_size_T256_f32_L1280"]))
def test_masks_at_the_papers_size_have_the_references_hash(key):
    kind, _, version = key.partition(".")
    mask = attention_mask(DalleConfig(conv_window=VERSIONS[version]), KINDS[kind])[:-1, :-1]
    reference = golden.facts("masks")["paper_size_T256_f32_L1280"][key]
    assert int(mask.sum()) == reference["allowed"]
    assert hashlib.sha256(mask.to(torch.uint8).numpy().tobytes()).hexdigest() == reference["sha256_uint8_row_major"]


def slow_mask(num_text, side, sees):
    size = num_text + side * side
    mask = torch.zeros(size, size, dtype=torch.bool)
    for query in range(size):
        for key in range(query + 1):
            row, column = divmod(query - num_text, side)
            key_row, key_column = divmod(key - num_text, side)
            mask[query, key] = key < num_text or sees(row - key_row, column - key_column)
    return mask


@pytest.mark.parametrize(
    ("kind", "window", "sees"),
    [
        ("row", "centred", lambda up, left: up == 0),
        ("column", "centred", lambda up, left: left == 0),
        ("full", "centred", lambda up, left: True),
        ("conv", "centred", lambda up, left: up <= 1 and abs(left) <= 1),
        ("conv", "corner", lambda up, left: up <= 2 and 0 <= left <= 2),
    ],
)
def test_each_mask_is_its_rule_written_out(kind, window, sees):
    config = DalleConfig(text_len=4, image_side=6, conv_kernel=3, conv_window=window)
    assert torch.equal(attention_mask(config, kind), slow_mask(5, 6, sees))
