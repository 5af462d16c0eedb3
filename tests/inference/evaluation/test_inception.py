"""The distance of publications, with the user's own weights."""

import numpy as np
import pytest
import torch
import torchvision

from inference.evaluation.distribution_metrics import Inception, frechet_distance


def features(count, width=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator) @ torch.randn(width, width, generator=generator) + seed


def slow_distance(first, second):
    """As it is defined, with the root of a matrix."""
    scipy_linalg = pytest.importorskip("scipy.linalg")
    first, second = first.double().numpy(), second.double().numpy()
    one, two = (np.cov(group, rowvar=False) for group in (first, second))
    root = scipy_linalg.sqrtm(one @ two).real
    return ((first.mean(axis=0) - second.mean(axis=0)) ** 2).sum() + np.trace(one + two - 2 * root)


@pytest.mark.parametrize(("many", "more"), [(40, 70), (40, 5), (4, 3)], ids=["many", "one set small", "both small"])
def test_the_distance_is_that_of_its_definition(many, more):
    first, second = features(many), features(more, seed=1)
    assert frechet_distance(first, second) == pytest.approx(slow_distance(first, second), rel=1e-5)


def test_the_distance_of_uncorrelated_features_is_that_of_their_means_and_deviations():
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    first, second = signs * torch.tensor([1.0, 2.0]), signs * torch.tensor([3.0, 5.0]) + torch.tensor([7.0, 0.0])
    # Variances of one are 4/3 of the squares: (3 - 1)^2 and (5 - 2)^2 beside the means' 7^2.
    assert frechet_distance(first, second) == pytest.approx(49 + 4 / 3 * (2**2 + 3**2))
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-9)


def test_few_pictures_make_the_distance_larger():
    few, many = (frechet_distance(features(2 * n)[:n], features(2 * n)[n:]) for n in (5, 500))
    assert few > 3 * many > 0


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Random weights under the published names."""
    torch.manual_seed(0)
    network = torchvision.models.inception_v3(weights=None, num_classes=1008, aux_logits=False, init_weights=False)
    path = tmp_path_factory.mktemp("inception") / "inception.pth"
    torch.save(network.state_dict(), path)
    return path


@pytest.mark.slow
def test_a_file_of_weights_gives_2048_features_of_each_picture(weights):
    pixels = torch.randint(256, (3, 3, 128, 128), generator=torch.Generator().manual_seed(0)).byte()
    counted = []
    found = Inception(weights).features(pixels, counted.append)
    assert found.shape == (3, 2048)
    assert torch.isfinite(found).all()
    assert not torch.equal(found[0], found[1])
    assert sum(counted) == 3


def broken(folder, kind):
    path = folder / "inception.pth"
    content = {
        "a folder that is not there": None,
        "noise": b"noise" * 99,
        "a pickle": {"a pickled": slice(1)},
        "no tensors": [1, 2],
        "other weights": {"fc.weight": torch.zeros(2, 2)},
        "not finite": {"fc.weight": torch.full((2,), float("nan"))},
    }[kind]
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a folder that is not there", "cannot be read as the weights"),
        ("noise", "cannot be read as the weights"),
        ("a pickle", "cannot be read as the weights"),
        ("no tensors", "it is not a state dict"),
        ("other weights", "does not hold the weights pt_inception-2015-12-05"),
        ("not finite", r"fc\.weight holds numbers that are not finite"),
    ],
)
def test_a_file_of_something_else_is_named_in_one_line(tmp_path, kind, message):
    with pytest.raises(ValueError, match=rf"inception\.pth.*{message}") as told:
        Inception(broken(tmp_path, kind))
    assert "\n" not in str(told.value)
