"""The precision that the prompt page draws in."""

import pytest
import torch

from inference.sampling import packed_linear
from inference.sampling.packed_linear import fastest_precision


@pytest.mark.parametrize(("avx512_bf16", "amx"), [(True, False), (False, True)])
def test_a_cpu_with_bf16_products_draws_in_bf16(monkeypatch, avx512_bf16, amx):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(packed_linear, "can_pack", lambda dtype: True)
    assert fastest_precision(torch.device("cpu")) == "bf16"
    monkeypatch.setattr(packed_linear, "can_pack", lambda dtype: dtype == torch.float32)
    assert fastest_precision(torch.device("cpu")) == "fp32"


def test_a_cpu_that_would_convert_bf16_draws_in_fp32(monkeypatch):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    assert fastest_precision(torch.device("cpu")) == "fp32"


def test_a_gpu_draws_in_bf16():
    assert fastest_precision(torch.device("cuda")) == "bf16"
