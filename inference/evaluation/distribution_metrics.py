"""Distances between sets of pictures, and nearest pictures, by a network's features.

Shapes: N and M pictures, E features of length 1.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dalle_lean.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Distances of sets of pictures from held-out drawings, the set "real"."""

    drawn: float
    """Pictures that the model drew for held-out captions."""
    floor: float
    """Other held-out drawings through the tokenizer: pictures made from codes are hardly nearer."""
    trained: float
    """Training pictures."""
    pictures: dict[str, int]
    """Number of pictures in each set, "real" included."""

    @classmethod
    def between(cls, features: Mapping[str, Tensor], measure: Callable[[Tensor, Tensor], float]) -> Self:
        """Measure the features [N, E] of each set of pictures; ValueError for a set of fewer than 2."""
        pictures = {name: len(found) for name, found in features.items()}
        if min(pictures.values()) < 2:
            raise UserError(f"pictures to compare: {pictures}; at least 2 of each are needed")
        real = features["real"]
        return cls(
            pictures=pictures,
            **{name: measure(found, real) for name, found in features.items() if name != "real"},
        )


def kernel_distance(first: Tensor, second: Tensor) -> float:
    """Squared maximum mean discrepancy of two sets of features [N, E] and [M, E], N and M at least 2. For sets from one
    distribution it is 0 on average, so sometimes slightly negative.

    The unbiased estimate with the cubic kernel of the kernel inception distance (Binkowski et al. 2018,
    arXiv 1801.01401), for features scaled to a mean square of 1.
    """
    first, second = (features.double() for features in (first, second))  # of length 1, so no division by E

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T + 1) ** 3

    def within(features: Tensor) -> Tensor:
        among = kernel(features, features)
        count = len(features)
        return (among.sum() - among.diagonal().sum()) / (count * (count - 1))

    return float(within(first) + within(second) - 2 * kernel(first, second).mean())


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Squared Frechet distance of the normal distributions with the means and covariances of features [N, E] and
    [M, E], N and M at least 2: |m1 - m2|^2 + tr(S1 + S2 - 2 sqrt(S1 S2)). The estimate from few rows is too large.

    With S1 = A^T A and S2 = B^T B the eigenvalues of S1 S2 are those of (A B^T)(A B^T)^T, so the trace of its root is
    the sum of the singular values of A B^T, which is no larger than the rows need.
    """
    first, second = (features.double() for features in (first, second))
    a, b = deviations(first), deviations(second)
    root = torch.linalg.svdvals(a @ b.T).sum()
    return float(
        (first.mean(dim=0) - second.mean(dim=0)).square().sum() + a.square().sum() + b.square().sum() - 2 * root
    )


def deviations(features: Tensor) -> Tensor:
    """A matrix A [at most E, E] for which A^T A is the unbiased covariance of features [N, E]."""
    centred = (features - features.mean(dim=0)) / (len(features) - 1) ** 0.5
    return torch.linalg.qr(centred, mode="r").R if len(centred) > centred.shape[1] else centred


def nearest(features: Tensor, batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """For each of the features [N, E], the most similar picture among many, whose features come in batches [M, E].

    Returns rows [N], counted over all batches, and cosine similarities [N]; the first of equals. Without batches they
    are -1 and -inf.
    """
    rows = torch.full((len(features),), -1)
    similarities = torch.full((len(features),), -torch.inf)
    passed = 0
    for batch in batches:
        found, places = (part.cpu() for part in (features @ batch.T).max(dim=1))
        closer = found > similarities
        rows[closer], similarities[closer] = places[closer] + passed, found[closer]
        passed += len(batch)
    return rows, similarities
