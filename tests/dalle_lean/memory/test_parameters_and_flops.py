"""Parameters and arithmetic, held against real models and published numbers."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dalle_lean import Dalle, DalleConfig, MemoryPlan
from dalle_lean.memory.flops import forward_flop, step_flop
from dalle_lean.memory.parameters import parameter_sizes, parameters
from dalle_lean.model import products
from tests.dalle_lean.memory.variants import VARIANTS, batch


class FlopCounter(TorchDispatchMode):
    """Counts what torch itself says of each matrix product; its own counter takes no backward inside of a backward."""

    total = 0.0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        packet = operation.overloadpacket
        if packet is torch.ops.aten.addmm_:
            self.total += 2 * args[1].numel() * args[2].shape[1]
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.total += causal_pairs(args[0]) * 4
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.total += causal_pairs(args[1]) * 10
        elif packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


@pytest.fixture(autouse=True)
def torchs_products(monkeypatch):
    """torch knows no arithmetic of oneDNN's."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)


def causal_pairs(query):
    """Multiplications of the scores of query [B, H, S, d] with the keys up to each one's own."""
    batch_size, heads, length, size = query.shape
    return batch_size * heads * size * length * (length + 1) / 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_of_a_real_model_is_counted_with_its_size(variant):
    config = VARIANTS[variant]
    with torch.device("meta"):
        model = Dalle(config)
    assert sorted(parameter_sizes(config)) == sorted(parameter.numel() for parameter in model.parameters())


def test_the_papers_model_has_its_published_number_of_parameters():
    assert parameters(DalleConfig.paper()) == 125_894_244


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_is_as_much_arithmetic_as_a_real_one_does(variant):
    model = Dalle(VARIANTS[variant])
    with FlopCounter() as counter, torch.no_grad():
        model.loss(*batch(model.config, 2))
    assert counter.total == pytest.approx(forward_flop(model.config, 2).total, rel=0.02)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_is_as_much_arithmetic_as_a_real_one_does_under_every_plan(variant):
    model = Dalle(VARIANTS[variant])
    kinds = ("keep", "reversible") if model.config.reversible else ("keep", "selective", "checkpoint")
    for activations in kinds:
        for loss_tokens in (None, 8):
            plan = model.plan = MemoryPlan(activations=activations, loss_tokens=loss_tokens)
            with FlopCounter() as counter:
                model.loss(*batch(model.config, 2)).backward()
            assert counter.total == pytest.approx(step_flop(model.config, 2, plan).total, rel=0.02), plan


def test_the_papers_reversible_step_is_11_tflop_of_projections():
    """Four times 2 x 1280 tokens x 64 layers x 16.8 million weights of a block's projections."""
    flop = step_flop(DalleConfig.paper(), 1, MemoryPlan())
    assert flop.projections == 4 * 2 * 1280 * 64 * (4 * 1024**2 + 12 * 1024**2)
    assert 11.0e12 < flop.total < 11.6e12


def test_without_recomputation_a_step_is_three_forwards():
    config = dataclasses.replace(DalleConfig.paper(), reversible=False)
    plan = MemoryPlan(activations="keep", loss_tokens=None)
    assert step_flop(config, 2, plan).total == pytest.approx(3 * forward_flop(config, 2).total)
