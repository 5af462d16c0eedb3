"""The learning rate over a run."""


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Linear from 0 up to `peak` at `warmup_steps`, then linear down towards 0 after `total_steps`.

    `step` counts from 1; every step of the run learns (none has a rate of exactly 0), and past the end the rate is 0.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    return peak * max(0, total_steps + 1 - step) / (total_steps + 1 - warmup_steps)
