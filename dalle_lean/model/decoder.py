"""Decoder: a token table, layers over residual streams that run as a MemoryPlan says, and an output layer.

Subclasses define what ids and positions mean. B batch, S positions, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dalle_lean.model.attention import Layout
from dalle_lean.model.branches import Branch
from dalle_lean.model.compute_weights import ComputeWeights
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.grad_scales import BranchScales
from dalle_lean.model.layers import Block, Layer, normalise
from dalle_lean.model.loss import Section, section_losses
from dalle_lean.model.memory_plan import MemoryPlan
from dalle_lean.model.stack import run_keeping, run_recomputing, run_selective, without_autocast


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

    def branches(self, layout: Layout, dtype: torch.dtype) -> list[Branch]:
        """The branches of all layers in order, over the positions of `layout`, for residual streams of `dtype`."""
        branches = []
        for index, (layer, kind) in enumerate(zip(self.layers, self.config.layer_kinds, strict=True)):
            assert isinstance(layer, Layer)
            block = self.block(index)
            branches.append(Branch(layer.attention, block.attention, kind, layout, dtype))
            branches.append(Branch(layer.feed_forward, block.feed_forward, None, layout, dtype))
        return branches

    def run(self, x: Tensor, layout: Layout) -> Tensor:
        """Run the layers over x [B, S, D] as the plan says -> their normalised output [B, S, D]."""
        activations, reversible = self.plan.activations_for(self.config), self.config.reversible
        recomputes = self.plan.recomputes(self.config)
        if self.scales is not None and not recomputes:
            raise ValueError(f"gradient scales with activations={activations!r}: they need checkpoint or reversible")
        branches = self.branches(layout, x.dtype)
        dtype = self._compute_dtype()  # read before autocast, which may define it, is disabled
        with without_autocast(x.device):
            if recomputes or not torch.is_grad_enabled():
                x = run_recomputing(x, branches, self.plan, dtype, reversible, self.scales)
            elif activations == "selective":
                x = run_selective(x, branches, ComputeWeights(dtype))
            else:
                x = run_keeping(x, branches, ComputeWeights(dtype), reversible)
            return normalise(self.norm, x)

    def section_losses(self, hidden: Tensor, *sections: Section) -> Tensor:
        """Mean cross-entropy in nats of each section, from the result of `run`."""
        dtype = self._compute_dtype()
        with without_autocast(hidden.device):
            return section_losses(hidden, self.output.weight, self.output.bias, sections, dtype, self.plan)

    def _compute_dtype(self) -> torch.dtype:
        """Autocast's dtype where it is enabled, else the weights'."""
        weight = self.output.weight
        if torch.is_autocast_enabled(weight.device.type):
            return torch.get_autocast_dtype(weight.device.type)
        return weight.dtype
