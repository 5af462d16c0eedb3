"""Distances between sets of pictures, and nearest pictures, by a network's features; the Inception network.

Shapes: N and M pictures, S side in pixels, E features of length 1.
"""

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.io.safetensors_io import refuse_infinite
from dalle_lean.progress import OnBatch, uncounted
from dalle_lean.require import require

WEIGHTS = "pt_inception-2015-12-05"
WIDTH = 2048
BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Distances of sets of pictures from held-out drawings, the set "real"."""

    drawn: float  # pictures that the model drew for held-out captions
    floor: float  # other held-out drawings through the tokenizer: pictures made from codes are hardly nearer
    trained: float  # training pictures
    pictures: dict[str, int]  # number of pictures in each set, "real" included

    @classmethod
    def between(cls, features: Mapping[str, Tensor], measure: Callable[[Tensor, Tensor], float]) -> Self:
        """Measure the features [N, E] of each set of pictures; ValueError for a set of fewer than 2."""
        pictures = {name: len(found) for name, found in features.items()}
        if min(pictures.values()) < 2:
            raise UserError(f"pictures to compare: {pictures}; at least 2 of each are needed")
        real = features["real"]
        distances = {name: measure(found, real) for name, found in features.items() if name != "real"}
        return cls(pictures=pictures, **distances)


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
    means = (first.mean(dim=0) - second.mean(dim=0)).square().sum()
    return float(means + a.square().sum() + b.square().sum() - 2 * root)


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


class Inception:
    """The Inception network of Heusel et al. 2017 (arXiv 1706.08500) as torch-fidelity builds it, with TensorFlow 1's
    resizing, from the published file pt_inception-2015-12-05-6726825d.pth; ValueError if that is missing or holds
    something else."""

    def __init__(self, weights: Path, device: torch.device | str = "cpu"):
        fidelity = require("torch_fidelity", extra="evaluation")
        self.device = torch.device(device)
        # The package unpickles any file that it is given, so it gets a copy of the tensors, loaded weights-only.
        copy = io.BytesIO()
        torch.save(read_tensors(weights), copy)
        copy.seek(0)
        try:
            network = fidelity.FeatureExtractorInceptionV3("fid", [str(WIDTH)], feature_extractor_weights_path=copy)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{weights} does not hold the weights {WEIGHTS}: {reason}") from None
        self.network = network.to(self.device)

    @torch.inference_mode()
    def features(self, pixels: Tensor, on_batch: OnBatch = uncounted) -> Tensor:
        """uint8 [N, 3, S, S] -> [N, 2048] float32."""
        found = []
        for batch in pixels.split(BATCH):
            found.append(self.network(batch.to(self.device))[0])
            on_batch(len(batch))
        return torch.cat(found)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors, by name, of a torch.save file; ValueError for any other file, and if a number is not finite."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises nearly anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read as the weights {WEIGHTS}: {reason}") from None
    tensors = dict(content) if isinstance(content, dict) else {}
    if not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UserError(f"{path} does not hold the weights {WEIGHTS}: it is not a state dict")
    refuse_infinite(tensors, str(path))
    return tensors
