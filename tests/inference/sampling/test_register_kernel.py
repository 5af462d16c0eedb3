"""What is combined in registers against torch."""

import pytest
import torch

from inference.sampling.load_kernels import array, kernels

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(kernels() is None, reason="numba cannot be used")


@pytest.fixture
def kernel():
    from inference.sampling import register_kernel

    return register_kernel


@pytest.fixture
def called(kernel):
    """A function that calls one of the kernel's intrinsics, which only compiled functions can."""
    import numba

    def called(function):
        return numba.njit(lambda *given: function(*given))

    return called


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
def test_totals_and_the_largest_of_a_row_are_torchs(kernel, called, width):
    numbers, shift = torch.randn(3, width), 0.25
    total, squares, largest = (
        called(function)(array(numbers), 1, given)
        for function, given in ((kernel.total_of, 0), (kernel.total_of_squares, shift), (kernel.largest_of, 0))
    )
    torch.testing.assert_close(torch.tensor(total), numbers[1].sum(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(squares), (numbers[1] - shift).square().sum(), atol=1e-5, rtol=1e-5)
    assert largest == numbers[1].max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 16, 40, 93])
def test_the_product_of_two_rows_is_torchs(kernel, called, width, dtype):
    x, matrix = torch.randn(3, width), torch.randn(5, width).to(dtype)
    found = called(kernel.dot)(array(x), 1, array(matrix), 4)
    torch.testing.assert_close(torch.tensor(found), x[1] @ matrix[4].float(), atol=1e-5, rtol=1e-5)
