"""The kernels' own product against torch's."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import linear

from inference.sampling.load_kernels import array, kernels
from inference.sampling.packed_linear import PanelLinear, pack_dense
from tests.compiled_code import ROOT

pytestmark = pytest.mark.skipif(kernels() is None, reason="numba cannot be used")
INPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}
WEIGHTS = {**INPUTS, "int8": torch.int8}
# By torch, not by the kernel's own look at the processor.
HAS_INSTRUCTIONS = {
    "fp32": torch.backends.cpu.get_cpu_capability() != "DEFAULT",
    "bf16": torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported(),
    "int8": torch.cpu._is_vnni_supported(),
}


@pytest.fixture(params=INPUTS)
def layer(request):
    """A layer with a bias, by the kernels' product, and its precision."""
    torch.manual_seed(0)  # so that no number lies between two roundings
    weight, bias = torch.randn(96, 52), torch.randn(96)
    if not kernels().matmul_kernel.multiplies(weight.shape, WEIGHTS[request.param]):
        assert not HAS_INSTRUCTIONS[request.param]
        pytest.skip(f"on this processor torch multiplies {request.param}")
    packed = pack_dense(weight, bias, request.param)
    assert isinstance(packed, PanelLinear)
    return packed, request.param


def of_rows(x):
    """Each row rounded to the whole numbers up to 127, times a step of its own."""
    steps = x.abs().amax(dim=1, keepdim=True) / 127
    return (x / steps).round() * steps


@pytest.mark.parametrize("rows", [1, 3, 8, 21])
def test_it_is_torchs_product(layer, rows):
    packed, precision = layer
    x = torch.randn(rows, 52).to(INPUTS[precision])
    inputs, weight = (of_rows(x), of_rows(packed.weight)) if precision == "int8" else (x, packed.weight.to(x.dtype))
    exact = linear(inputs.double(), weight.double(), packed.bias.double())
    found = packed(x)
    assert found.dtype == INPUTS[precision]
    tolerance = 2**-8 if precision == "bf16" else 1e-5
    torch.testing.assert_close(found.double(), exact, atol=tolerance * 4, rtol=tolerance)


def test_a_row_depends_neither_on_the_others_nor_on_the_number_of_threads(layer):
    packed, precision = layer
    x = torch.randn(21, 52).to(INPUTS[precision])
    together, before = packed(x), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for first, last in ((0, 1), (3, 5), (4, 20), (0, 21)):
                assert torch.equal(packed(x[first:last]), together[first:last])
    finally:
        torch.set_num_threads(before)


def test_inputs_need_not_be_contiguous(layer):
    packed, precision = layer
    x = torch.randn(52, 9).to(INPUTS[precision]).T
    assert torch.equal(packed(x), packed(x.contiguous()))


@pytest.mark.parametrize(("precision", "shape"), [("fp32", (95, 50)), ("fp32", (96, 49)), ("int8", (96, 50))])
def test_other_shapes_are_left_to_torch(precision, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    packed = pack_dense(weight, None, precision)
    assert not isinstance(packed, PanelLinear)
    x = torch.randn(3, shape[1])
    tolerance = 1e-5 if precision == "fp32" else 0.5  # without VNNI inputs have 7 bits
    torch.testing.assert_close(packed(x), x @ weight.T, atol=tolerance, rtol=tolerance)


def test_more_products_of_bytes_than_a_sum_can_hold_are_float32s():
    ones = torch.ones(32, 70_000)
    assert torch.equal(pack_dense(ones, None, "int8")(ones[:1]), torch.full((1, 32), 70_000.0))


def test_a_row_of_zeros_gives_the_bias_in_int8():
    weight, bias = torch.randn(96, 52), torch.randn(96)
    x = torch.stack([torch.zeros(52), torch.randn(52)])
    assert torch.equal(pack_dense(weight, bias, "int8")(x)[0], bias)


def test_after_a_fork_torch_multiplies(layer):
    """GNU OpenMP ends a process that uses it after its parent has used it."""
    packed, precision = layer
    x = torch.randn(9, 52).to(INPUTS[precision])
    expected = packed(x)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            code = 0 if torch.allclose(packed(x), expected, atol=0.3, rtol=2**-7) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_bias_need_not_be_contiguous():
    weight, bias = torch.randn(96, 50), torch.randn(96, 2)[:, 0]
    x = torch.randn(3, 50)
    torch.testing.assert_close(pack_dense(weight, bias, "fp32")(x), linear(x, weight, bias))


def test_inputs_of_another_type_are_refused(layer):
    packed, precision = layer
    other = torch.float32 if precision == "bf16" else torch.bfloat16
    with pytest.raises(AssertionError, match=str(other)):
        packed(torch.randn(3, 52).to(other))


ELSEWHERE = """
import torch
from inference.sampling.load_kernels import array
from inference.sampling.matmul_kernel import FUSES, MULTIPLIES_BF16, MULTIPLIES_INT8
from inference.sampling.matmul_kernel import multiplies, multiply, to_panels, units_of
for dtype in (torch.float32, torch.bfloat16):
    x, weight, bias = torch.randn(21, 52).to(dtype), torch.randn(96, 52).to(dtype), torch.randn(96)
    if multiplies(weight.shape, dtype):
        out = torch.empty(21, 96, dtype=dtype)
        multiply(units_of(x), to_panels(weight), array(bias), array(out))
        expected = (x.float() @ weight.float().T + bias).to(dtype)
        torch.testing.assert_close(out, expected, atol=0.02, rtol=2**-7)
print(FUSES, MULTIPLIES_BF16, MULTIPLIES_INT8)
"""


@pytest.mark.long
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names processors of x86-64")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"NUMBA_CPU_NAME": "generic"}, "False False False"),
        ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"}, "True False False"),
    ],
    ids=["any x86-64", "AVX2"],
)
def test_it_is_compiled_for_what_numba_is_told(settings, said, tmp_path):
    environment = {**os.environ, **settings, "NUMBA_CACHE_DIR": str(tmp_path)}
    options = {"env": environment, "cwd": ROOT, "check": True, "capture_output": True, "text": True}
    found = subprocess.run([sys.executable, "-c", ELSEWHERE], **options)
    assert found.stdout.strip() == said
    subprocess.run([sys.executable, "-m", "pytest", "tests/inference/sampling/test_register_kernel.py"], **options)


def test_panels_hold_each_weight_once():
    weight = torch.randn(64, 6)
    panels = kernels().matmul_kernel.to_panels(weight)
    assert panels.size == weight.numel()
    width = panels.shape[2]
    assert (panels[1, 5] == array(weight)[width : 2 * width, 5]).all()
