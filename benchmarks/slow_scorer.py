"""A scorer that sleeps, so that drawing takes as long as a test or a benchmark needs."""

import re
import time

import torch


class Fast:
    """Ranks by brightness."""

    name = "brightness"

    def __init__(self, device: torch.device):
        pass

    def score(self, pixels: torch.Tensor, prompt: str) -> torch.Tensor:
        """The mean value of each picture."""
        return pixels.flatten(1).mean(1)


class Slow(Fast):
    """The same, but "a red heart 0.5 s" takes half a second for each call, and a prompt "crash ..." fails."""

    def score(self, pixels: torch.Tensor, prompt: str) -> torch.Tensor:
        """The mean value of each picture."""
        if seconds := re.search(r"([\d.]+) s$", prompt):
            time.sleep(float(seconds[1]))
        if prompt.startswith("crash"):
            raise RuntimeError("out of order")
        return super().score(pixels, prompt)
