"""Groups of codes that have the same neighbours: what stands beside a code tells its group well."""

import numpy as np
from numpy.typing import NDArray

SAMPLED_CODES = 2**20
ROUNDS = 6
PRIOR = 50.0
"""Neighbours that every group is taken to have seen beside its own, spread as all codes are."""
LOG_STEPS = 256


def group_codes(codes: NDArray[np.integer], codebook_size: int, num_groups: int) -> NDArray[np.uint8]:
    """codes [R, h, w] -> the group 0..num_groups-1 of each code [codebook_size].

    k-means over the codes, in the distance that counts bits (Kullback-Leibler) between what stands right, left, above
    and below; the centres start at the most frequent codes. Whole numbers are added up, so that the same codes give the
    same groups however the machine adds.
    """
    sample = codes[:: -(-codes.size // SAMPLED_CODES)]
    first, second, times = neighbours(sample, codebook_size)
    seen = np.bincount(first, weights=times, minlength=codebook_size)
    frequent = np.argsort(-seen, kind="stable")[: 4 * num_groups : 4]
    group = np.full(codebook_size, num_groups)
    group[frequent] = np.arange(len(frequent))
    prior = PRIOR * seen / max(seen.sum(), 1)
    for _ in range(ROUNDS):
        cells = group[first] * codebook_size + second
        beside = np.bincount(cells, weights=times, minlength=(num_groups + 1) * codebook_size)
        centres = beside.reshape(-1, codebook_size)[:num_groups] + prior
        shares = centres / np.maximum(centres.sum(axis=1, keepdims=True), 1e-30)
        logs = np.round(LOG_STEPS * np.log2(np.maximum(shares, 1e-30)))
        fit = [np.bincount(first, weights=times * log[second], minlength=codebook_size) for log in logs]
        group = np.argmax(fit, axis=0)
    return group.astype(np.uint8)


def neighbours(
    codes: NDArray[np.integer], codebook_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Every two codes that stand side by side or one above the other, in both orders, and how often they do."""
    codes = codes.astype(np.int64)
    pairs = [(codes[:, :, :-1], codes[:, :, 1:]), (codes[:, :-1], codes[:, 1:])]
    both = [(a * codebook_size + b).ravel() for pair in pairs for a, b in (pair, pair[::-1])]
    cells, times = np.unique(np.concatenate(both), return_counts=True)
    return cells // codebook_size, cells % codebook_size, times
