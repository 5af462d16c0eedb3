"""Finds pictures that look alike, such as resized and recompressed copies, by a perceptual hash.

The hash ignores colour: pictures that differ in nothing else may count as copies.
"""

from collections import defaultdict
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

HASH_BITS = 64
SIDE = 32
GRID = 8
COSINES = np.cos(np.pi / SIDE * (np.arange(SIDE) + 0.5) * np.arange(1, GRID + 1)[:, None])
"""[8, 32]: rows 1 to 8 of the cosine transform over 32 points. Row 0, the mean, says nothing about shapes."""


def perceptual_hash(pixels: NDArray[np.uint8]) -> int:
    """64 bits that hardly change when a picture is resized, recompressed or made slightly brighter or darker.

    `pixels` is [side, side, 3], RGB. The bits tell which of the 8x8 lowest frequencies of the grey picture at 32x32 lie
    above their median (pHash: Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions", 2010; here
    without the frequencies that are constant along a side).
    """
    grey = Image.fromarray(pixels).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    spectrum = (COSINES @ np.asarray(grey, dtype=np.float64) @ COSINES.T).ravel()
    bits = spectrum.round(6) > np.median(spectrum).round(6)  # the last digits differ between processors
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


class NearDuplicates:
    """The hashes seen so far, searched within a Hamming distance. Two hashes that differ in at most d bits agree in at
    least one of d + 1 bands of bits, so only the hashes that share a band are compared."""

    def __init__(self, max_distance: int):
        self.max_distance = max_distance
        edges = [HASH_BITS * band // (max_distance + 1) for band in range(max_distance + 2)]
        self.bands = [(low, (1 << (high - low)) - 1) for low, high in pairwise(edges)]
        self.keys: dict[int, str] = {}
        self.hashes: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    def earlier(self, picture_hash: int, key: str) -> str | None:
        """The key of an earlier picture that looks like this one; if there is none, remembers this one."""
        places = [(band, picture_hash >> low & mask) for band, (low, mask) in enumerate(self.bands)]
        for place in places:
            for other in self.hashes.get(place, ()):
                if (picture_hash ^ other).bit_count() <= self.max_distance:
                    return self.keys[other]
        self.keys[picture_hash] = key
        for place in places:
            self.hashes[place].append(picture_hash)
        return None
