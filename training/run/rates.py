"""Learning rates by the number of a step; the first step is 1. Free of torch, for --help."""

import math


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int, hold_steps: int = 0) -> float:
    """Linear from 0 up to `peak` at `warmup_steps`, `hold_steps` at the peak, then linear down towards 0 after
    `total_steps`.

    Every step of the run learns (none has a rate of exactly 0), and past the end the rate is 0.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    fall = total_steps + 1 - warmup_steps - hold_steps
    return peak * min(1.0, max(0, total_steps + 1 - step) / fall)


def cosine_rate(step: int, *, peak: float, warmup_share: float, total_steps: int) -> float:
    """The learning rate at a step: linear up to `peak`, then half a cosine that reaches 0 after the last step."""
    warmup_steps = max(1, round(warmup_share * total_steps))
    if step <= warmup_steps:
        return peak * step / warmup_steps
    done = (step - warmup_steps) / (total_steps + 1 - warmup_steps)
    return peak * (1 + math.cos(math.pi * done)) / 2
