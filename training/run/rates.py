"""Learning rates by step, counted from 1. Imports no torch: --help is fast."""

import math


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int, hold_steps: int = 0) -> float:
    """Rise linearly from 0 to `peak` at `warmup_steps`, hold it for `hold_steps`, then fall linearly to 0 at the step
    after `total_steps`, so that every step of the run learns."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    fall = total_steps + 1 - warmup_steps - hold_steps
    return peak * min(1.0, max(0, total_steps + 1 - step) / fall)


def cosine_rate(step: int, *, peak: float, warmup_share: float, total_steps: int) -> float:
    """Rise linearly to `peak`, then fall along half a cosine to 0 at the step after the last one."""
    warmup_steps = max(1, round(warmup_share * total_steps))
    if step <= warmup_steps:
        return peak * step / warmup_steps
    done = (step - warmup_steps) / (total_steps + 1 - warmup_steps)
    return peak * (1 + math.cos(math.pi * done)) / 2
