"""A scorer that sleeps, so that a drawing takes as long as a test or a benchmark wants."""

import re
import time

import torch


class Fast:
    """Ranks by brightness."""

    name = "brightness"

    def __init__(self, device: torch.device):
        pass

    def score(self, pixels: torch.Tensor, prompt: str) -> torch.Tensor:
        """The mean of each picture's values."""
        return pixels.flatten(1).mean(1)


class Slow(Fast):
    """The same, but "a red heart 0.5 s" takes half a second for each eight pictures, and a crash fails."""

    def score(self, pixels: torch.Tensor, prompt: str) -> torch.Tensor:
        """The mean of each picture's values."""
        if seconds := re.search(r"([\d.]+) s$", prompt):
            time.sleep(float(seconds[1]))
        if prompt.startswith("crash"):
            raise RuntimeError("out of order")
        return super().score(pixels, prompt)
