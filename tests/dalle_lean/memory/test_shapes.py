"""The arithmetic for published transformers, held against one written in plain PyTorch."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from benchmarks.allocations import step_bytes
from dalle_lean import MemoryPlan
from dalle_lean.memory import TrainingSetup
from dalle_lean.memory.published_models import PRESETS, gpt
from dalle_lean.memory.shape_cost import shape_cost
from dalle_lean.memory.shapes import TransformerShape, shape_parameter_sizes
from tests.dalle_lean.memory.test_parameters_and_flops import FlopCounter, causal_pairs

SMALL = dataclasses.replace(gpt(4, 128, 4, tokens=128), vocabulary=1000)


class PlainLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class PlainGPT(nn.Module):
    def __init__(self, shape, again):
        super().__init__()
        self.again = again
        self.tokens = nn.Parameter(torch.randn(shape.vocabulary, shape.hidden) * 0.02)
        self.positions = nn.Parameter(torch.randn(shape.tokens, shape.hidden) * 0.02)
        self.layers = nn.ModuleList(PlainLayer(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)

    def loss(self, ids):
        x = nn.functional.embedding(ids, self.tokens) + self.positions
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        logits = nn.functional.linear(self.norm(x), self.tokens)
        return cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize(("compute_dtype", "batch"), [(None, 1), (None, 8), ("bfloat16", 2)])
def test_a_gpt_in_plain_pytorch_needs_what_is_predicted(batch, activations, compute_dtype):
    model = PlainGPT(SMALL, activations == "checkpoint")
    ids = torch.randint(SMALL.vocabulary, (batch, SMALL.tokens))

    def loss():
        with torch.autocast("cpu", torch.bfloat16, enabled=compute_dtype is not None):
            return model.loss(ids)

    setup = TrainingSetup(batch=batch, compute_dtype=compute_dtype, device="cpu")
    cost = shape_cost(SMALL, MemoryPlan(activations=activations), setup)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    measured = 2 * weights + step_bytes(loss, model.parameters()).peak_bytes
    predicted = dataclasses.replace(cost.device, optimizer_state=0).total
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_its_arithmetic_is_what_is_predicted_but_for_the_masked_half_of_attention(activations):
    model = PlainGPT(SMALL, activations == "checkpoint")
    with FlopCounter() as counter:
        model.loss(torch.zeros(2, SMALL.tokens, dtype=torch.long)).backward()
    cost = shape_cost(SMALL, MemoryPlan(activations=activations), TrainingSetup(batch=2))
    ours = cost.step.projections + cost.step.output
    pairs = causal_pairs(torch.empty(2, SMALL.heads, SMALL.tokens, SMALL.head_size))
    kernels = SMALL.layers * pairs * (10 + 4 * (2 if activations == "checkpoint" else 1))
    assert counter.total == pytest.approx(ours + kernels, rel=1e-3)


def test_sharing_weights_leaves_arithmetic_alone_and_divides_parameters():
    shared = dataclasses.replace(PRESETS["gpt2"], shared_blocks=3)
    own, setup = PRESETS["gpt2"], TrainingSetup()
    tables = (own.vocabulary + own.tokens) * own.hidden + 2 * own.hidden
    assert (sum(shape_parameter_sizes(own)) - tables) == 4 * (sum(shape_parameter_sizes(shared)) - tables)
    ours, theirs = (shape_cost(shape, MemoryPlan(activations="keep"), setup) for shape in (shared, own))
    assert ours.step == theirs.step
    assert ours.peak_bytes < theirs.peak_bytes


SHAPES = [name for name, model in PRESETS.items() if isinstance(model, TransformerShape)]


@pytest.mark.parametrize("name", SHAPES)
def test_checkpoints_save_memory_in_every_published_model_and_reversible_layers_more(name):
    setup, ways = TrainingSetup(batch=32), ("keep", "checkpoint", "reversible")
    kept, again, rebuilt = (shape_cost(PRESETS[name], MemoryPlan(activations=way), setup) for way in ways)
    assert rebuilt.device.activations < again.device.activations
    assert rebuilt.peak_bytes <= again.peak_bytes < kept.peak_bytes
    assert rebuilt.step.total > again.step.total > kept.step.total


def test_plans_and_lengths_that_a_shape_cannot_have_are_refused():
    with pytest.raises(ValueError, match="keep or checkpoint"):
        shape_cost(SMALL, MemoryPlan(activations="selective"), TrainingSetup())
    with pytest.raises(ValueError, match="tokens=129"):
        dataclasses.replace(SMALL, tokens=129)
    with pytest.raises(ValueError, match="shared_blocks=0"):
        dataclasses.replace(SMALL, shared_blocks=0)
