"""The kernels' own product against torch's."""

import os

import pytest
import torch
from torch.nn.functional import linear

from inference.sampling.load_kernels import array, kernels
from inference.sampling.packed_linear import PanelLinear, pack_dense

pytestmark = pytest.mark.skipif(kernels() is None, reason="numba cannot be used")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(params=DTYPES)
def layer(request):
    """A layer with a bias, by the kernels' product, and its precision."""
    weight, bias = torch.randn(96, 50), torch.randn(96)
    packed = pack_dense(weight, bias, request.param)
    if not isinstance(packed, PanelLinear):
        pytest.skip("oneDNN multiplies bfloat16 on this processor")
    return packed, request.param


@pytest.mark.parametrize("rows", [1, 3, 8, 21])
def test_it_is_torchs_product(layer, rows):
    packed, precision = layer
    x = torch.randn(rows, 50).to(DTYPES[precision])
    exact = linear(x.double(), packed.weight.to(x.dtype).double(), packed.bias.double())
    found = packed(x)
    assert found.dtype == DTYPES[precision]
    tolerance = {"fp32": 1e-5, "bf16": 2**-8}[precision]
    torch.testing.assert_close(found.double(), exact, atol=tolerance * 4, rtol=tolerance)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_the_others(layer, threads):
    packed, precision = layer
    x = torch.randn(21, 50).to(DTYPES[precision])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = packed(x)
        for first, last in ((0, 1), (3, 5), (4, 20)):
            assert torch.equal(packed(x[first:last]), together[first:last])
    finally:
        torch.set_num_threads(before)


def test_inputs_need_not_be_contiguous(layer):
    packed, precision = layer
    x = torch.randn(50, 9).to(DTYPES[precision]).T
    assert torch.equal(packed(x), packed(x.contiguous()))


@pytest.mark.parametrize("shape", [(95, 50), (96, 49)])
def test_other_shapes_are_left_to_torch(shape):
    weight = torch.randn(shape)
    packed = pack_dense(weight, None, "fp32")
    assert not isinstance(packed, PanelLinear)
    x = torch.randn(3, shape[1])
    torch.testing.assert_close(packed(x), x @ weight.T)


def test_after_a_fork_torch_multiplies(layer):
    """GNU OpenMP ends a process that uses it after its parent has used it."""
    packed, precision = layer
    x = torch.randn(9, 50).to(DTYPES[precision])
    expected = packed(x)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            code = 0 if torch.allclose(packed(x), expected, atol=0.05, rtol=2**-7) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_panels_hold_each_weight_once():
    weight = torch.randn(64, 6)
    panels = kernels().to_panels(weight)
    assert panels.size == weight.numel()
    width = panels.shape[2]
    assert (panels[1, 5] == array(weight)[width : 2 * width, 5]).all()
