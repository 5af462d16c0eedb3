"""bf16 is computed in float32 on a CPU without instructions for it, and only there."""

import logging

import pytest
import torch
from torch import nn

from dalle_lean import precision
from dalle_lean.precision import autocast, effective_precision


@pytest.fixture
def cpu(monkeypatch):
    """A CPU of the wanted kind."""

    def choose(has_bf16):
        monkeypatch.setattr(precision, "onednn_multiplies_bf16", lambda: has_bf16)
        precision._cpu_can_use_bf16.cache_clear()

    yield choose
    precision._cpu_can_use_bf16.cache_clear()


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_products_are_in_bf16_where_the_cpu_has_it(cpu, has_bf16, dtype):
    cpu(has_bf16)
    with autocast("cpu", "bf16"):
        assert nn.Linear(8, 8)(torch.ones(2, 8)).dtype == dtype


@pytest.mark.parametrize("name", ["fp32", "bf16-weights"])
def test_other_precisions_do_not_ask_for_autocast(cpu, name):
    cpu(True)
    with autocast("cpu", name):
        assert nn.Linear(8, 8)(torch.ones(2, 8)).dtype == torch.float32


def test_a_cpu_without_bf16_is_reported_once(cpu, caplog):
    cpu(False)
    with caplog.at_level(logging.WARNING):
        assert effective_precision("cpu", "bf16") == "fp32"
        assert effective_precision("cpu", "bf16") == "fp32"
    assert len(caplog.messages) == 1
    assert "no fast bfloat16" in caplog.text


def test_a_gpu_is_asked_for_bf16_whatever_the_cpu_has(cpu):
    cpu(False)
    assert effective_precision("cuda", "bf16") == "bf16"
