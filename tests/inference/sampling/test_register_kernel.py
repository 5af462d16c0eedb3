"""What is combined in registers against torch."""

import pytest
import torch

from inference.sampling.load_kernels import array, kernels

numba = pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(kernels() is None, reason="numba cannot be used")


@pytest.fixture
def kernel():
    from inference.sampling import register_kernel

    return register_kernel


def called(function):
    """A function that calls an intrinsic, which only compiled functions can."""
    return numba.njit(lambda *given: function(*given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 16, 64, 93])
def test_products_are_torchs_and_those_of_a_row_do_not_depend_on_the_others(kernel, width, dtype):
    x, begun = torch.randn(kernel.GROUP, 9), torch.randn(kernel.GROUP, width)
    matrix = torch.randn(9, width + 5).to(dtype)
    together, apart = begun.clone(), begun.clone()
    numbers = array(matrix), 3, width + 5
    kernel.add_products(array(x), 0, kernel.GROUP, *numbers, array(together))
    for row in range(kernel.GROUP):
        kernel.add_products(array(x), row, 1, *numbers, array(apart))
    torch.testing.assert_close(together, begun + x @ matrix[:, 3 : 3 + width].float())
    assert torch.equal(apart, together)


@pytest.mark.parametrize("width", [1, 16, 40, 93])
def test_totals_and_the_largest_of_a_row_are_torchs(kernel, width):
    numbers, shift = -torch.rand(3, width), 0.25
    total, largest = (called(function)(array(numbers), 1) for function in (kernel.total_of, kernel.largest_of))
    squares = called(kernel.total_of_squares)(array(numbers), 1, shift)
    torch.testing.assert_close(torch.tensor(total), numbers[1].sum(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(squares), (numbers[1] - shift).square().sum(), atol=1e-5, rtol=1e-5)
    assert largest == numbers[1].max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 16, 40, 93])
def test_the_product_of_two_rows_is_torchs(kernel, width, dtype):
    x, matrix = torch.randn(3, width), torch.randn(5, width).to(dtype)
    found = called(kernel.dot)(array(x), 1, array(matrix), 4)
    torch.testing.assert_close(torch.tensor(found), x[1] @ matrix[4].float(), atol=1e-5, rtol=1e-5)
