"""The fastest plan that fits into memory, and the largest batch."""

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.memory.cost import Cost, cost_of
from dalle_lean.memory.flops import step_flop
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.memory_plan import ACTIVATIONS, MemoryPlan
from dalle_lean.words import human_bytes

LOSS_TOKENS = (512, 128, 32)
CHUNK_SIZES = ((8, 1024), (4, 256), (1, 64))
"""(heads, tokens) of a chunk."""
LAUNCH_TOKENS = 8
"""Assumed cost of launching a matrix product, in rows computed in the same time."""
OFFLOAD_SHARE = 0.01
"""Assumed cost of offloading the optimizer to the host, as a share of the step."""


def candidates(config: DalleConfig, fused_attention: bool = False) -> list[MemoryPlan]:
    """The plans to try: ever leaner activations, chunks, gradients in place; each with and without offload."""
    *kept, leanest = ACTIVATIONS[config.reversible]
    first = MemoryPlan(loss_tokens=None, fused_attention=fused_attention)
    plans = [dataclasses.replace(first, activations=name) for name in (*kept, leanest)]
    plans += [dataclasses.replace(plan, loss_tokens=LOSS_TOKENS[0]) for plan in plans]
    one_sample = dataclasses.replace(first, activations=leanest, loss_tokens=LOSS_TOKENS[0], samples=1)
    plans.append(one_sample)
    for loss_tokens, (heads, tokens) in zip(LOSS_TOKENS, CHUNK_SIZES, strict=True):
        chunks = dataclasses.replace(one_sample, attention_heads=heads, feed_forward_tokens=tokens)
        plans.append(dataclasses.replace(chunks, loss_tokens=loss_tokens))
    plans += [dataclasses.replace(plan, grads_in_place=True) for plan in plans]
    return [dataclasses.replace(plan, offload_optimizer=offload) for offload in (False, True) for plan in plans]


def effort(config: DalleConfig, plan: MemoryPlan, setup: TrainingSetup) -> float:
    """Relative time of a step: its FLOP, recomputation included, plus the overhead of small chunks and offloading."""
    flop = step_flop(config, setup.batch, plan, plan.fuses_attention(config, setup.device, setup.compute_bytes))
    tokens = config.sequence_len * setup.batch
    at_once, groups = tokens, 1.0
    if plan.recomputes(config):
        at_once = min(tokens, (plan.samples or setup.batch) * config.sequence_len, plan.feed_forward_tokens or tokens)
        groups = max(1.0, config.num_heads / (plan.attention_heads or config.num_heads))
    branches = flop.projections * (1 + LAUNCH_TOKENS / at_once)
    attention = flop.attention * (1 + LAUNCH_TOKENS * groups / config.sequence_len)
    output = flop.output * (1 + LAUNCH_TOKENS / min(plan.loss_tokens or tokens, tokens))
    in_place = 1 + 1e-6 * plan.grads_in_place  # among equals, prefer gradients that hooks can see
    return (branches + attention + output) * in_place * (1 + OFFLOAD_SHARE * plan.offload_optimizer)


def fastest_plan(
    config: DalleConfig, setup: TrainingSetup, budget_bytes: float, *, fused_attention: bool = False
) -> MemoryPlan:
    """The plan of least effort among `candidates` whose peak on the device is at most `budget_bytes`.

    Raises:
        ValueError: none fits; says how much the leanest needs and which batch would fit.
    """
    masters = setup.is_lamb and setup.weight_bytes < 4
    plans = [dataclasses.replace(plan, master_weights=masters) for plan in candidates(config, fused_attention)]
    plans.sort(key=lambda plan: effort(config, plan, setup))
    if setup.compute_dtype == "float16":  # its gradient scales need branches that are recomputed
        plans = [plan for plan in plans if plan.recomputes(config)]
    return first_that_fits(plans, partial(cost_of, config), setup, budget_bytes)


def first_that_fits(
    plans: Sequence[MemoryPlan],
    cost: Callable[[MemoryPlan, TrainingSetup], Cost],
    setup: TrainingSetup,
    budget_bytes: float,
    of: str = "",
) -> MemoryPlan:
    """The first plan whose peak on the device is at most `budget_bytes`; ValueError, as of `fastest_plan`, if none is.

    of: names the model at the start of the error message.
    """
    peaks = [cost(plan, setup).peak_bytes for plan in plans]
    for plan, peak in zip(plans, peaks, strict=True):
        if peak <= budget_bytes:
            return plan
    least = min(peaks)
    plan = plans[peaks.index(least)]
    batch = largest_batch(lambda size: cost(plan, dataclasses.replace(setup, batch=size)).peak_bytes, budget_bytes)
    advice = f"batch {batch} would fit" if batch else "not even a batch of 1 fits: take a smaller model"
    raise UserError(
        f"{of}batch {setup.batch} needs at least {human_bytes(least)} of the {human_bytes(budget_bytes)} allowed, with "
        f"{describe(plan)}; {advice}"
    )


def for_budget(config: DalleConfig, batch: int, budget_bytes: float, **setup: Any) -> MemoryPlan:
    """`fastest_plan` for a TrainingSetup of this batch and these other fields; also MemoryPlan.for_budget. Raises
    ValueError as it does."""
    return fastest_plan(config, TrainingSetup(batch=batch, **setup), budget_bytes)


MemoryPlan.for_budget = staticmethod(for_budget)


def largest_batch(peak_of: Callable[[int], int], budget_bytes: float) -> int:
    """The largest batch whose peak fits, 0 if none does; `peak_of` must be monotonic in the batch."""
    too_large = 1
    while peak_of(too_large) <= budget_bytes:
        too_large *= 2
    return bisect_right(range(1, too_large), budget_bytes, lo=too_large // 2, key=peak_of)


def describe(plan: MemoryPlan) -> str:
    """The plan's activations and the fields that differ from their defaults, in the syntax of `parse_plan`."""
    fields = {field.name: (getattr(plan, field.name), field.default) for field in dataclasses.fields(MemoryPlan)}
    activations = plan.activations or "leanest"
    others = (f"{k}={str(v).lower()}" for k, (v, d) in fields.items() if v != d and k != "activations")
    return ",".join([activations, *others])


def parse_plan(text: str) -> MemoryPlan:
    """A plan from "reversible,samples=1,loss_tokens=128": activations ("leanest" chooses them by the config), then
    fields of MemoryPlan; "none" is None. ValueError names what is wrong."""
    activations, *others = text.split(",")
    values: dict[str, object] = {"activations": None if activations == "leanest" else activations}
    known = {field.name for field in dataclasses.fields(MemoryPlan)} - {"activations"}
    words = {"none": None, "true": True, "false": False}
    for part in others:
        name, _, value = part.partition("=")
        if name not in known:
            raise UserError(f"plan {text!r}: unknown field {name!r}; must be one of {', '.join(sorted(known))}")
        values[name] = words[value.lower()] if value.lower() in words else int(value) if value.isdecimal() else value
    return MemoryPlan(**values)  # type: ignore[arg-type]


def parse_bytes(text: str) -> float:
    """12GB, 512MB, 8GiB or a number of bytes from 2^20, below 2^60; ValueError for anything else."""
    units = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
    digits = text.strip().lower().rstrip("kmgtib ")
    unit = text.strip().lower()[len(digits) :].strip()
    try:
        count = float(digits) * units[unit]
    except (ValueError, KeyError):
        raise UserError(f"{text!r} is not an amount of memory: write it like 12GB, 512MB or 8GiB") from None
    if not 0 < count < 2**60:
        raise UserError(f"{text!r}: an amount of memory must be above 0 and below 1 EiB")
    if unit == "" and count < 2**20:
        raise UserError(f"{text!r} means {count:g} bytes; did you mean {count:g}GB?")
    return count
