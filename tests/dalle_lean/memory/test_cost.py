"""Predicted memory is measured memory: exact bytes of live tensors at the peak of forward and backward, on the CPU."""

import dataclasses

import pytest
import torch

from benchmarks.allocations import step_bytes
from dalle_lean import Dalle, DalleConfig, MemoryPlan
from dalle_lean.memory import Bytes, TrainingSetup, cost_of
from dalle_lean.memory.cost import optimizer_state_bytes, persistent_bytes
from dalle_lean.memory.parameters import muon_sizes, parameter_sizes
from dalle_lean.memory.setup import STATISTICS
from tests.dalle_lean.memory.variants import TINY, batch
from training.run.recipe import OptimizerRecipe
from training.run.subjects import optimizer_of
from training.step.learner import build_optimizer

TOLERANCE = 0.05
TWO_STREAMS = DalleConfig(
    text_vocab_size=1000,
    text_len=48,
    image_vocab_size=512,
    image_side=14,
    hidden_size=192,
    num_layers=5,
    num_heads=4,
    head_size=48,
    shared_blocks=4,
)
ONE_STREAM = dataclasses.replace(TWO_STREAMS, reversible=False)
PIECES = {"samples": 1, "attention_heads": 2, "feed_forward_tokens": 64, "loss_tokens": 32}
WHOLE = {"loss_tokens": None}


def changed(config=TWO_STREAMS, **fields):
    return dataclasses.replace(config, **fields)


def attending(kind, **fields):
    """So little else that attention decides."""
    return changed(attention_pattern=(kind,), last_attention=None, shared_blocks=1, ffn_multiplier=1, **fields)


# name: config, fields of the plan, batch, weights' type, autocast's type
SPARSE = changed(pixelfly_rank=8, pixelfly_block_size=16, pixelfly_butterfly_size=4)
CASES = {
    "two streams, kept, batch 1": (TWO_STREAMS, {"activations": "keep", **WHOLE}, 1, "float32", None),
    "two streams, kept, batch 4": (TWO_STREAMS, {"activations": "keep", **WHOLE}, 4, "float32", None),
    "two streams, kept, bf16": (TWO_STREAMS, {"activations": "keep"}, 1, "float32", "bfloat16"),
    "reversible, batch 1": (TWO_STREAMS, WHOLE, 1, "float32", None),
    "reversible, batch 4": (TWO_STREAMS, WHOLE, 4, "float32", None),
    "reversible, bf16": (TWO_STREAMS, {}, 1, "float32", "bfloat16"),
    "reversible, logits in pieces": (TWO_STREAMS, {"loss_tokens": 32}, 4, "float32", None),
    "reversible, pieces, batch 1": (TWO_STREAMS, PIECES, 1, "float32", None),
    "reversible, pieces, batch 4": (TWO_STREAMS, PIECES, 4, "float32", None),
    "reversible, pieces, in place": (TWO_STREAMS, {**PIECES, "grads_in_place": True}, 4, "float32", None),
    "reversible, pieces, bf16": (TWO_STREAMS, PIECES, 1, "float32", "bfloat16"),
    "reversible, bf16 weights": (TWO_STREAMS, PIECES, 1, "bfloat16", None),
    "one stream, kept": (ONE_STREAM, {"activations": "keep", **WHOLE}, 4, "float32", None),
    "one stream, kept, bf16 weights": (ONE_STREAM, {"activations": "keep"}, 1, "bfloat16", None),
    "selective": (ONE_STREAM, {"activations": "selective", **WHOLE}, 4, "float32", None),
    "selective, bf16": (ONE_STREAM, {"activations": "selective"}, 1, "float32", "bfloat16"),
    "checkpoint": (ONE_STREAM, WHOLE, 4, "float32", None),
    "checkpoint, pieces, bf16": (ONE_STREAM, PIECES, 1, "float32", "bfloat16"),
    "row attention": (attending("row"), WHOLE, 3, "float32", None),
    "column attention": (attending("column"), WHOLE, 3, "float32", None),
    "convolution attention": (attending("conv"), WHOLE, 3, "float32", None),
    "full attention": (attending("full"), WHOLE, 3, "float32", None),
    "long captions": (attending("row", text_len=200, image_side=8), WHOLE, 2, "float32", None),
    "wide heads": (attending("column", head_size=96), {"attention_heads": 1}, 2, "float32", "bfloat16"),
    "nothing tied": (
        changed(tie_embeddings=False, shared_blocks=None, rotary=False, token_shift=False),
        {},
        2,
        "float32",
        None,
    ),
    "nothing tied, kept": (
        changed(ONE_STREAM, tie_embeddings=False, shared_blocks=None, rotary=False, token_shift=False),
        {"activations": "keep"},
        2,
        "float32",
        None,
    ),
    "sandwich": (changed(sandwich_norm=True), {}, 2, "float32", None),
    "ungated": (changed(ffn_gated=False), {}, 2, "float32", None),
    "gated by ReLU": (changed(ffn_activation="relu"), {}, 2, "float32", None),
    "squared ReLU": (changed(ffn_gated=False, ffn_activation="relu_squared"), WHOLE, 4, "float32", None),
    "sparse": (SPARSE, WHOLE, 4, "float32", None),
    "sparse, ReLU": (
        changed(SPARSE, pixelfly_rank=0, ffn_gated=False, ffn_activation="relu"),
        WHOLE,
        4,
        "float32",
        None,
    ),
    "sparse, in pieces": (SPARSE, PIECES, 4, "float32", None),
    "large vocabulary": (changed(text_vocab_size=12000, num_layers=2), WHOLE, 1, "float32", None),
    "large vocabulary, in pieces": (changed(text_vocab_size=12000, num_layers=2), PIECES, 1, "float32", "bfloat16"),
}


def measured_bytes(config, plan, setup):
    """Weights, gradients, and what forward and backward hold besides at their peak."""
    model = Dalle(config, plan, dtype=getattr(torch, setup.weight_dtype))
    samples = batch(config, setup.batch)
    autocast = getattr(torch, setup.compute_dtype or "bfloat16")

    def loss():
        with torch.autocast("cpu", autocast, enabled=setup.compute_dtype is not None):
            return model.loss(*samples)

    weights = sum(parameter.nbytes for parameter in model.parameters())
    return 2 * weights + step_bytes(loss, model.parameters()).peak_bytes


def predicted_bytes(config, plan, setup):
    """The same, without the optimizer."""
    return dataclasses.replace(cost_of(config, plan, setup).device, optimizer_state=0).total


@pytest.mark.parametrize("name", CASES)
def test_the_predicted_peak_is_the_measured_one(name):
    config, fields, size, weight_dtype, compute_dtype = CASES[name]
    setup = TrainingSetup(batch=size, weight_dtype=weight_dtype, compute_dtype=compute_dtype, device="cpu")
    plan = MemoryPlan(**fields)
    assert predicted_bytes(config, plan, setup) == pytest.approx(measured_bytes(config, plan, setup), rel=TOLERANCE)


SHARED_TABLES = ("qmap1", "qmap2")


@pytest.mark.parametrize("optimizer", STATISTICS)
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_the_predicted_optimizer_state_is_what_a_step_leaves(optimizer, weight_dtype):
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    config = changed(num_layers=2)
    model = Dalle(config, dtype=getattr(torch, weight_dtype))
    made = build_optimizer(model, optimizer_of(optimizer, OptimizerRecipe()), MemoryPlan())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    tensors = [
        value
        for state in made.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name not in SHARED_TABLES
    ]
    setup = TrainingSetup(optimizer=optimizer, weight_dtype=weight_dtype)
    assert optimizer_state_bytes(parameter_sizes(config), setup, muon_sizes(config)) == sum(
        tensor.nbytes for tensor in tensors
    )


def test_offloaded_statistics_and_master_weights_are_on_the_host():
    sizes, plan = parameter_sizes(TINY), MemoryPlan(master_weights=True)
    host, device = persistent_bytes(sizes, plan, TrainingSetup(weight_dtype="bfloat16"))
    assert device == Bytes(weights=2 * sum(sizes), gradients=2 * sum(sizes))
    assert host.master_weights == 4 * sum(sizes)
    assert host.optimizer_state > 2 * sum(sizes)
    assert host.transfer == 4 * max(sizes)
    on_cpu, all_of_it = persistent_bytes(sizes, plan, TrainingSetup(weight_dtype="bfloat16", device="cpu"))
    assert on_cpu == Bytes()
    assert all_of_it.optimizer_state == host.optimizer_state
    adamw_host, _ = persistent_bytes(sizes, plan, TrainingSetup(optimizer="adamw"))
    assert adamw_host == Bytes(), "only LAMB can be offloaded"


def test_the_sum_of_the_kinds_is_the_peak():
    cost = cost_of(DalleConfig.paper(), MemoryPlan(), TrainingSetup())
    assert cost.peak_bytes == sum(cost.device.by_kind().values()) == cost.to_dict()["device_bytes"]


@pytest.mark.parametrize(
    "fields",
    [{"batch": 0}, {"weight_dtype": "int8"}, {"compute_dtype": "half"}, {"optimizer": "sgd"}, {"device": "tpu"}],
)
def test_a_setup_out_of_range_is_refused_by_name(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        TrainingSetup(**fields)
