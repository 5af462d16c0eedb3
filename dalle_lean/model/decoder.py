"""Decoder: a token table, layers over residual streams that run as a MemoryPlan says, and an output layer.

Subclasses define what ids and positions mean. B batch, S positions, D hidden size.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dalle_lean.model.branches import AttentionBranch, FeedForwardBranch, LayerBranch, SequenceContext
from dalle_lean.model.compute_weights import ComputeWeights
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.grad_scales import BranchScales
from dalle_lean.model.layers import Block, Layer, normalise
from dalle_lean.model.loss import Section, section_losses
from dalle_lean.model.memory_plan import MemoryPlan
from dalle_lean.model.stack import (
    Stack,
    run_recomputing,
    run_reversible_keeping,
    run_selective,
    run_sequential,
    without_autocast,
)


class Decoder(nn.Module):
    """The layers and the output layer of a config; its MemoryPlan can be set later."""

    def __init__(self, config: DalleConfig, plan: MemoryPlan | None = None, **factory: Any):
        super().__init__()
        self.config = config
        self.plan = plan or MemoryPlan()
        self.scales: BranchScales | None = None
        self.blocks = nn.ModuleList(Block(config, **factory) for _ in range(max(config.layer_blocks) + 1))
        self.layers = nn.ModuleList(Layer(config, layer, **factory) for layer in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, **factory)
        self.output = nn.Linear(config.hidden_size, config.num_tokens, **factory)
        if not config.tie_embeddings:
            self.embedding = nn.Embedding(config.num_tokens, config.hidden_size, **factory)

    @property
    def plan(self) -> MemoryPlan:
        """How backward is computed; ValueError on setting a plan that the config does not support."""
        return self._plan

    @plan.setter
    def plan(self, plan: MemoryPlan) -> None:
        plan.activations_for(self.config)
        self._plan = plan

    def block(self, layer: int) -> Block:
        """The block of a layer; layers that share a block return the same object."""
        block = self.blocks[self.config.layer_blocks[layer]]
        assert isinstance(block, Block)
        return block

    @property
    def table(self) -> Tensor:
        """The input embeddings of all ids, [V, D]."""
        return self.output.weight if self.config.tie_embeddings else self.embedding.weight

    def stack(self, context: SequenceContext) -> Stack:
        """The branches of all layers over the given positions."""
        stack: list[tuple[LayerBranch, LayerBranch]] = []
        for index, (layer, kind) in enumerate(zip(self.layers, self.config.layer_kinds, strict=True)):
            assert isinstance(layer, Layer)
            block = self.block(index)
            attention = AttentionBranch(layer.attention, block.attention, context, kind)
            stack.append((attention, FeedForwardBranch(layer.feed_forward, block.feed_forward, context)))
        return stack

    def run(self, x: Tensor, context: SequenceContext) -> Tensor:
        """Run the stack over x [B, S, D] as the plan says -> its normalised output [B, S, D]."""
        dtype = self._compute_dtype()  # read before autocast, which may define it, is disabled
        with without_autocast(x.device):
            return normalise(self.norm, self._run(x, self.stack(context), dtype))

    def section_losses(self, hidden: Tensor, *sections: Section) -> Tensor:
        """Mean cross-entropy in nats of each section, from the result of `run`."""
        dtype = self._compute_dtype()
        with without_autocast(hidden.device):
            return section_losses(hidden, self.output.weight, self.output.bias, sections, dtype, self.plan)

    def _run(self, x: Tensor, stack: Stack, dtype: torch.dtype) -> Tensor:
        activations, reversible = self.plan.activations_for(self.config), self.config.reversible
        recomputes = self.plan.recomputes(self.config)
        if self.scales is not None and not (recomputes and self.scales.count == 2 * self.config.num_layers):
            raise ValueError(
                f"{self.scales.count} gradient scales with activations={activations!r}: they need checkpoint or "
                f"reversible, and two for each of {self.config.num_layers} layers"
            )
        if recomputes or not torch.is_grad_enabled():
            return run_recomputing(x, stack, self.plan, dtype, reversible, self.scales)
        weights = ComputeWeights(dtype)
        runs = [(partial(attend.run, weights=weights), partial(feed.run, weights=weights)) for attend, feed in stack]
        if activations == "selective":
            return run_selective(x, runs)
        return run_reversible_keeping(x, runs) if reversible else run_sequential(x, runs)

    def _compute_dtype(self) -> torch.dtype:
        """Autocast's dtype where it is enabled, else the weights'."""
        weight = self.output.weight
        if torch.is_autocast_enabled(weight.device.type):
            return torch.get_autocast_dtype(weight.device.type)
        return weight.dtype
