"""The loss in chunks against the loss from all logits, and what never exists on the way."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from dalle_lean import MemoryPlan
from dalle_lean.model.loss import Section, embed, section_losses

BATCH, WIDTH, TEXT_ROWS, ROWS = 2, 6, 31, 50


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation gives back."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


class Products(TorchDispatchMode):
    """Notes the rows of each matrix product."""

    def __enter__(self):
        self.rows = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.addmm.default:
            self.rows.append(len(args[1]))
        return function(*args, **(kwargs or {}))


def inputs(text_len=5, image_len=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, text_len + image_len, WIDTH), (ROWS, WIDTH), (ROWS,)]
    tensors = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    text = torch.randint(0, TEXT_ROWS, (BATCH, text_len), generator=generator)
    image = torch.randint(0, ROWS - TEXT_ROWS, (BATCH, image_len), generator=generator)
    sections = (
        Section(slice(0, text_len), slice(0, TEXT_ROWS), text),
        Section(slice(text_len, None), slice(TEXT_ROWS, None), image),
    )
    return tensors, sections


@pytest.mark.parametrize("loss_tokens", [1, 2, 5, 100, None])
def test_chunks_give_the_cross_entropy_of_the_masked_logits(loss_tokens):
    (hidden, weight, bias), (text, image) = inputs()
    logits = linear(hidden, weight, bias)
    logits[:, :5, TEXT_ROWS:] = logits[:, 5:, :TEXT_ROWS] = torch.finfo(torch.float64).min
    slow = torch.stack(
        [
            cross_entropy(logits[:, :5].flatten(0, 1), text.targets.flatten()),
            cross_entropy(logits[:, 5:].flatten(0, 1), (image.targets + TEXT_ROWS).flatten()),
        ]
    )
    plan = MemoryPlan(loss_tokens=loss_tokens)
    fast = section_losses(hidden, weight, bias, (text, image), torch.float64, plan)
    torch.testing.assert_close(fast, slow)
    upstream = torch.tensor([0.3, 0.7], dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(fast, (hidden, weight, bias), upstream),
        torch.autograd.grad(slow, (hidden, weight, bias), upstream),
    )


def test_no_more_logits_exist_than_a_chunk_has():
    (hidden, weight, bias), sections = inputs(text_len=64, image_len=64, dtype=torch.float32)
    with LargestTensor() as largest:
        section_losses(hidden, weight, bias, sections, torch.float32, MemoryPlan(loss_tokens=4)).sum().backward()
    assert largest.numel == hidden.numel() < BATCH * 64 * TEXT_ROWS


def test_one_product_serves_the_short_captions_of_several_samples():
    (hidden, weight, bias), sections = inputs(text_len=5, image_len=9)
    with torch.no_grad(), Products() as products:
        section_losses(hidden, weight, bias, sections, torch.float64, MemoryPlan(loss_tokens=10))
    assert products.rows == [BATCH * 5, 9, 9]


@pytest.mark.parametrize("in_place", [True, False])
def test_embedding_gradients_add_up_where_ids_repeat(in_place):
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 4, 1], [0, 1, 1]])
    upstream = torch.randn(2, 3, 3, dtype=torch.float64)
    embed(ids, weight, MemoryPlan(grads_in_place=in_place)).backward(upstream)
    slow = torch.zeros(5, 3, dtype=torch.float64)
    for row, id_ in enumerate(ids.flatten()):
        slow[id_] += upstream.flatten(0, 1)[row]
    torch.testing.assert_close(weight.grad, slow)


def test_frozen_output_weights_get_no_gradient():
    (hidden, weight, bias), sections = inputs()
    weight.requires_grad_(False)
    section_losses(hidden, weight, bias, sections, torch.float64, MemoryPlan(loss_tokens=3)).sum().backward()
    assert weight.grad is None
    assert bias.grad is not None
    assert hidden.grad is not None
