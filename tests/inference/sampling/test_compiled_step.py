"""numba's kernels against torch's operations, and what the compiled step promises."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from inference.sampling import load_kernels
from inference.sampling.load_kernels import array, kernels
from inference.sampling.packed_decoder import PackedDecoder
from tests.compiled_code import ROOT, outputs_compiled_and_cached
from tests.inference.sampling.test_kv_cache import cached, inputs, lively_dalle

numba = pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(kernels() is None, reason="numba cannot be used")


@pytest.fixture
def kernel():
    kernels().use_threads(1)
    return kernels().step_kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_geglu_is_torchs(kernel, dtype):
    up = torch.cat([torch.randn(3, 400), torch.linspace(-12, 12, 400).expand(3, -1)], dim=1).to(dtype)
    out = torch.empty(3, 400, dtype=dtype)
    kernel.geglu(array(up), array(out))
    values, gates = up.float().chunk(2, dim=1)
    torch.testing.assert_close(
        out, (values * gelu(gates)).to(dtype), atol=2e-6, rtol=2**-7 if dtype != torch.float32 else 0
    )


def test_bfloat16_is_rounded_as_torch_rounds(kernel):
    up = torch.cat([torch.randn(64, 100), torch.full((64, 100), 12.0)], dim=1)
    exact, rounded = torch.empty(64, 100), torch.empty(64, 100, dtype=torch.bfloat16)
    kernel.geglu(array(up), array(exact))
    kernel.geglu(array(up), array(rounded))
    assert torch.equal(rounded, exact.bfloat16())


def test_exponentials_are_torchs(kernel):
    x = torch.cat([torch.linspace(-87, 0, 10_000), torch.tensor([-87.5, -1000.0, -torch.inf])])
    found = torch.tensor([kernel.exponential(number) for number in x.numpy()])
    torch.testing.assert_close(found[:-3], x[:-3].exp(), atol=0, rtol=3e-7)
    assert (found[-3:] == 0).all()


@pytest.mark.parametrize("column", [0, 2])
def test_a_branch_is_added_normalised_and_shifted(kernel, column):
    stream, delta, own = torch.randn(3, 20), torch.randn(3, 20), torch.randn(1, 4, 3, 10)
    scale, weight, bias = torch.randn(3, 20).unbind(0)
    added, before, out = stream + delta * scale, own.clone(), torch.empty(3, 20)
    norm = array(weight), array(bias), np.float32(1e-5)
    kernel.add_and_prepare(array(stream), array(delta), array(scale), *norm, array(own), 0, column, array(out))
    torch.testing.assert_close(stream, added)
    h = layer_norm(added, [20], weight, bias, 1e-5)
    left = before[0, column - 1, :, 5:] if column else torch.zeros(3, 5)
    torch.testing.assert_close(out, torch.cat([before[0, column, :, :5], left, h[:, 10:]], dim=1))
    before[0, column] = h[:, :10]
    torch.testing.assert_close(own, before)


def test_steps_run_on_torchs_threads_and_do_not_depend_on_their_number(monkeypatch, kernel):
    seen, attend = [], kernel.attend
    monkeypatch.setattr(kernel, "attend", lambda *given: (seen.append(numba.get_num_threads()), attend(*given)))
    decoder = PackedDecoder(lively_dalle())
    text, codes = inputs(decoder.config, batch=9)
    threads, steps = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            steps.append(cached(decoder, text, codes))
            assert {*seen} == {min(count, numba.config.NUMBA_NUM_THREADS)}
            seen.clear()
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*steps)


THREADS = """
import torch
from inference.sampling.load_kernels import kernels
torch.set_num_threads(3)
assert kernels() is not None
print(torch.get_num_threads())
"""


def test_torch_keeps_its_number_of_threads():
    found = subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "3"


def test_after_a_fork_the_plain_step_draws():
    """A process that forks while it draws, as a notebook with a pool of processes does."""
    model = lively_dalle()
    text, codes = inputs(model.config, batch=2)
    plain = cached(PackedDecoder(model, compiled=False), text, codes)
    assert kernels() is not None
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            code = 0 if torch.equal(cached(PackedDecoder(model), text, codes), plain) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not load_kernels.forked


def test_two_threads_may_draw_at_once():
    decoder = PackedDecoder(lively_dalle())
    text, codes = inputs(decoder.config, batch=9)
    alone = cached(decoder, text, codes)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: cached(decoder, text, codes), range(4)))
    assert all(torch.equal(steps, alone) for steps in both)


def test_without_numba_the_plain_step_draws(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "inference.sampling.kernels", raising=False)
    monkeypatch.delitem(sys.modules, "dalle_lean.compiled", raising=False)
    kernels.cache_clear()
    try:
        assert kernels() is None
        model = lively_dalle()
        text, codes = inputs(model.config, batch=2)
        plain = cached(PackedDecoder(model, compiled=False), text, codes)
        assert torch.equal(cached(PackedDecoder(model), text, codes), plain)
    finally:
        kernels.cache_clear()


STEPS = """
import hashlib, torch
from inference.sampling.packed_decoder import PackedDecoder
from tests.inference.sampling.test_kv_cache import cached, inputs, lively_dalle
for precision in ("fp32", "bf16"):
    decoder = PackedDecoder(lively_dalle(), precision)
    print(hashlib.sha256(cached(decoder, *inputs(decoder.config, batch=3)).numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_steps_have_the_same_bits_compiled_as_from_the_cache(tmp_path):
    compiled_first, from_cache = outputs_compiled_and_cached(STEPS, tmp_path)
    assert compiled_first == from_cache
