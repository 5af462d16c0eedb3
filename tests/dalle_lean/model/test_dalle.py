import re

import pytest
import torch

from dalle_lean import Dalle, DalleConfig, MemoryPlan
from tests.tiny import DALLE_FIELDS as TINY
from tests.tiny import tiny_batch as batch
from tests.tiny import tiny_dalle as tiny

VARIANTS = [
    {},
    {"reversible": False},
    {"token_shift": False, "conv_window": "corner"},
    {"tie_embeddings": False, "rotary": False},
    {"sandwich_norm": True, "shared_blocks": None},
    {"attention_pattern": ("full",), "last_attention": None, "shared_blocks": (0, 0, 1, 1, 0)},
]


def test_the_papers_model_has_125_894_244_parameters():
    model = Dalle(DalleConfig.paper(), device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == 125_894_244


@pytest.mark.parametrize("fields", VARIANTS)
def test_a_model_is_made_on_its_device_in_its_dtype(fields):
    model = Dalle(DalleConfig(**{**TINY, **fields}), device="meta", dtype=torch.bfloat16)
    tensors = [*model.parameters(), *model.buffers()]
    assert {(tensor.device.type, tensor.dtype) for tensor in tensors} == {("meta", torch.bfloat16)}


def test_tied_layers_are_one_object():
    model = tiny(num_layers=9)
    assert model.block(0) is model.block(4)
    assert model.block(1) is model.block(5)
    assert model.block(8) is not model.block(0)
    assert len({id(model.block(layer)) for layer in range(9)}) == 5
    assert "embedding.weight" not in model.state_dict()


@pytest.mark.parametrize("fields", VARIANTS)
def test_the_loss_is_the_weighted_cross_entropy_of_the_full_logits(fields):
    model, (text, codes) = tiny(**fields), batch()
    logits = model(text, codes)
    rows = torch.where(text == 0, 50 + torch.arange(6), text)
    text_nats = torch.nn.functional.cross_entropy(logits[:, :6].flatten(0, 1), rows.flatten())
    image_nats = torch.nn.functional.cross_entropy(logits[:, 6:].flatten(0, 1), (codes + 56).flatten())
    torch.testing.assert_close(model.loss(text, codes), (text_nats + 7 * image_nats) / 8)


@pytest.mark.parametrize("fields", VARIANTS)
def test_a_logit_depends_on_nothing_after_it(fields):
    model, (text, codes) = tiny(**fields), batch()
    with torch.no_grad():
        whole = model(text, codes)
        for given in (0, 1, 5, 16):
            torch.testing.assert_close(model(text, codes[:, :given]), whole[:, : 7 + given])
        torch.testing.assert_close(model(text), whole[:, :7])


def test_forbidden_logits_are_the_most_negative_finite_number():
    model, (text, codes) = tiny(), batch()
    forbidden = model(text, codes) == torch.finfo(torch.float32).min
    assert forbidden[:, :6, 56:].all()
    assert forbidden[:, 6:, :56].all()
    assert not forbidden[:, :6, :56].any()
    assert not forbidden[:, 6:, 56:].any()


def test_a_reversible_stack_keeps_no_activations():
    def kept_bytes(layers, activations):
        model, (text, codes) = tiny(num_layers=layers), batch()
        model.plan = MemoryPlan(activations=activations)
        parameters = {parameter.data_ptr() for parameter in model.parameters()}
        kept = {}

        def pack(tensor):
            if tensor.data_ptr() not in parameters:
                kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.loss(text, codes)
        return sum(kept.values())

    assert kept_bytes(13, "reversible") == kept_bytes(5, "reversible")
    assert kept_bytes(13, "keep") > 1.5 * kept_bytes(5, "keep")


@pytest.mark.parametrize(
    ("text", "codes", "words"),
    [
        (torch.full((1, 6), 50), None, "text_ids has the value 50; it must be in 0..49"),
        (torch.full((1, 6), -1), None, "text_ids has the value -1"),
        (torch.zeros(1, 6), None, "text_ids has dtype torch.float32"),
        (torch.zeros(6, dtype=torch.long), None, "text_ids has shape [6]"),
        (torch.zeros(1, 5, dtype=torch.long), None, "text_ids has 5 ids"),
        (torch.zeros(1, 6, dtype=torch.long), torch.full((1, 3), 40), "image_codes has the value 40"),
        (torch.zeros(1, 6, dtype=torch.long), torch.zeros(1, 17, dtype=torch.long), "image_codes has 17 codes"),
        (torch.zeros(0, 6, dtype=torch.long), None, "text_ids has 0 rows"),
        (torch.zeros(1, 6, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long), "they must agree"),
    ],
)
def test_wrong_inputs_are_named_with_value_and_range(text, codes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        tiny()(text, codes)


def test_the_loss_needs_all_codes():
    text, codes = batch()
    with pytest.raises(ValueError, match="15 codes"):
        tiny().loss(text, codes[:, :15])
