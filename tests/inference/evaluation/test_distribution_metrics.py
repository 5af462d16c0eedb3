"""What a judge's features tell."""

import pytest
import torch
from torch.nn import functional as F

from inference.evaluation.distribution_metrics import kernel_distance, nearest


def features(count, mean=0.0, seed=0):
    return F.normalize(torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)) + mean, dim=1)


def slow_distance(first, second):
    def kernel(a, b):
        return (float(a.double() @ b.double()) + 1) ** 3

    def mean(pairs):
        values = [kernel(a, b) for a, b in pairs]
        return sum(values) / len(values)

    def within(group):
        return mean([(a, b) for i, a in enumerate(group) for j, b in enumerate(group) if i != j])

    return within(first) + within(second) - 2 * mean([(a, b) for a in first for b in second])


def test_the_distance_is_that_of_all_pairs():
    first, second = features(6), features(9, mean=0.5, seed=1)
    assert kernel_distance(first, second) == pytest.approx(slow_distance(first, second))


def test_the_distance_grows_with_the_difference_and_is_about_0_of_the_same():
    near, far = (kernel_distance(features(300), features(300, mean, seed=1)) for mean in (0.3, 1.0))
    assert abs(kernel_distance(features(300), features(300, seed=1))) < 0.1 * near
    assert near < far


def test_the_nearest_of_all_batches_is_found_with_its_similarity():
    among, asked = features(20), features(5, seed=1)
    rows, similarities = nearest(asked, among.split(6))
    found, places = (asked @ among.T).max(dim=1)
    assert rows.tolist() == places.tolist()
    assert similarities == pytest.approx(found, abs=1e-6)
    assert nearest(among[[7, 3]], among.split(6))[0].tolist() == [7, 3]
    assert nearest(asked, [])[0].tolist() == [-1] * 5
