"""The child that draws with dalle-pytorch 1.6.6; benchmarks/reference.py makes an interpreter that can run it.

Its DALLE.generate_images draws a few codes in the middle of the picture, in two ways:

- shipped: use_cache=True as it is. `forward_with_cond_scale` drops the cache without guidance, so every code costs a
  pass over the whole sequence so far.
- mended: that method passes the cache on, which then keeps the keys and values of the sequence so far. The convolution
  layer still recomputes all of it from its cached inputs.

Both have optimize_for_inference=True, which makes row and column attention dense, with a mask. It is the faster form,
and the only one with a correct cache: without it, all these layers store their inputs under one key.
"""

import copy
import time
from contextlib import suppress
from typing import Any

import torch
from dalle_pytorch import DALLE, DiscreteVAE
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.child_process import open_task, requests
from benchmarks.worker_dalle_pytorch import load_weights


class TimingDone(Exception):
    """Ends a picture once enough codes have been timed."""


class FixedCodesVAE(DiscreteVAE):
    """The smallest VAE with the grid; it encodes every picture as the given codes."""

    def __init__(self, side: int, codebook: int, codes: Tensor):
        super().__init__(image_size=2 * side, num_layers=1, num_tokens=codebook, codebook_dim=1, hidden_dim=1)
        self.codes = codes

    def get_codebook_indices(self, images: Tensor) -> Tensor:
        return self.codes


class TimedDALLE(DALLE):
    """Records when each code begins, in seconds, and stops after some codes."""

    def watch(self, num_codes: int, read: dict[str, Any] | None) -> None:
        """Time `num_codes` codes: mended, from the cache `read`, or as shipped with None."""
        self.num_codes, self.read = num_codes, read
        self.begun_s: list[float] = []
        self.cache: dict[str, Any] = {}

    def forward_with_cond_scale(self, *args: Any, cond_scale: float = 1, cache: Any = None, **kwargs: Any) -> Tensor:
        if self.read is not None and not cache:
            cache.update(copy.deepcopy(self.read))
        self.cache = cache
        self.begun_s.append(time.perf_counter())
        if len(self.begun_s) > self.num_codes:
            raise TimingDone
        if self.read is not None:
            return self(*args, cache=cache, **kwargs)
        return super().forward_with_cond_scale(*args, cond_scale=cond_scale, cache=cache, **kwargs)


class ReferenceSampler:
    """The model, and the batch in task["batch"] with captions, codes that begin the pictures, and expected logits."""

    def __init__(self, task: dict[str, Any]):
        self.first, self.num_codes, self.top_k = task["first"], task["num_codes"], task["top_k"]
        batch = load_file(task["batch"])
        self.text_ids, self.codes, self.expected = batch["text_ids"], batch["image_codes"], batch["logits"]
        side = task["image_side"]
        vae = FixedCodesVAE(side, task["image_vocab_size"], self.codes)
        self.model = TimedDALLE(vae=vae, **task["arguments"], optimize_for_inference=True).eval()
        load_weights(self.model, task["weights"])
        self.picture = torch.zeros(1, vae.channels, 2 * side, 2 * side)

    @torch.no_grad()
    def start(self) -> dict[str, float]:
        """Fill a cache with the codes before the first timed one; the largest differences from the expected logits."""
        self.read: dict[str, Any] = {}
        for count in range(self.first):
            self.model(self.text_ids, self.codes[:, :count], cache=self.read)
        self.read_bytes = cache_bytes(self.read)
        cache = copy.deepcopy(self.read)
        mended = self.model(self.text_ids, self.codes[:, : self.first], cache=cache)
        shipped = self.model(self.text_ids, self.codes[:, : self.first])
        return {"shipped": self.difference(shipped), "mended": self.difference(mended)}

    def difference(self, logits: Tensor) -> float:
        """The largest difference from the expected logits of the next code."""
        return (logits[:, -1, -self.expected.shape[1] :] - self.expected).abs().max().item()

    def draw(self, way: str) -> dict[str, float]:
        """Seconds per code, and bytes of the cache: its growth per code, and its size once all are drawn."""
        model = self.model
        model.watch(self.num_codes, self.read if way == "mended" else None)
        thres = 1 - (self.top_k + 0.5) / model.total_tokens  # int((1 - thres) * tokens) is top_k
        start = {"img": self.picture, "num_init_img_tokens": self.first}
        with suppress(TimingDone):
            model.generate_images(self.text_ids, filter_thres=thres, use_cache=True, **start)
        held = cache_bytes(model.cache)
        a_code = (held - self.read_bytes) / self.num_codes if held else 0
        # The last code is never read.
        left = model.image_seq_len - self.first - self.num_codes
        seconds = (model.begun_s[-1] - model.begun_s[0]) / self.num_codes
        return {"seconds": seconds, "cache_bytes_a_code": a_code, "cache_bytes": held + left * a_code}


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors in a cache, by their shapes."""
    if isinstance(cache, Tensor):
        return cache.numel() * cache.element_size()
    values = cache.values() if isinstance(cache, dict) else cache if hasattr(cache, "__iter__") else ()
    return sum(map(cache_bytes, values))


def main() -> None:
    """Answer with the differences of the logits, then to each request, a way, with its figures."""
    task, answer = open_task()
    sampler = ReferenceSampler(task)
    answer(sampler.start())
    for way in requests():
        answer(sampler.draw(way))


if __name__ == "__main__":
    main()
