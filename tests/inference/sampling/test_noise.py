"""The hash against its published vectors, and its noise against chance."""

import pytest
import torch

from inference.sampling.noise import COUNTERS_AT_ONCE, GumbelNoise, philox_4x32

ALL_ONES = 0xFFFFFFFF
# Known answers of Random123, the authors' own implementation (Salmon et al. 2011).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def uniform_noise(seed, pictures, step, codes, device="cpu"):
    """[R, codes] of one step."""
    noise = GumbelNoise([seed] * len(pictures), list(pictures), codes, step + 1, device)
    rows, blocks = torch.arange(len(pictures), device=device), torch.arange(-(-codes // 4), device=device)
    return noise.uniform(torch.tensor(step, device=device), rows[:, None], blocks).flatten(1)[:, :codes]


def gumbel_noise(seed, pictures, step, codes, device="cpu"):
    return GumbelNoise([seed] * len(pictures), list(pictures), codes, step + 1, device).at(step)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_hash_gives_the_published_answers(counter, key, expected):
    words = philox_4x32(tuple(torch.tensor(word) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def test_a_pictures_noise_does_not_depend_on_its_batch():
    together = uniform_noise(7, range(20), step=3, codes=101)
    alone = torch.cat([uniform_noise(7, [index], step=3, codes=101) for index in range(20)])
    assert torch.equal(together, alone)


def test_uniform_noise_stays_strictly_inside_0_and_1():
    noise = uniform_noise(0, range(64), step=0, codes=8192)
    assert 0 < noise.min() < 1e-4
    assert 1 - 1e-4 < noise.max() < 1
    assert gumbel_noise(0, range(64), step=0, codes=8192).isfinite().all()


def test_uniform_noise_is_uniform():
    # Chi-squared with 255 degrees of freedom: mean 255, standard deviation 22.6.
    noise = uniform_noise(1, range(64), step=5, codes=4096).flatten()
    counts = torch.histc(noise, bins=256, min=0, max=1)
    expected = noise.numel() / 256
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 5 * 22.6


@pytest.mark.parametrize("change", ["seed", "high half of the seed", "picture", "step", "code"])
def test_neighbours_are_independent(change):
    base = uniform_noise(5, range(100), step=9, codes=2000)
    neighbour = {
        "seed": lambda: uniform_noise(6, range(100), step=9, codes=2000),
        "high half of the seed": lambda: uniform_noise(5 + 2**32, range(100), step=9, codes=2000),
        "picture": lambda: uniform_noise(5, range(1, 100 + 1), step=9, codes=2000),
        "step": lambda: uniform_noise(5, range(100), step=10, codes=2000),
        "code": lambda: base.roll(1, dims=1),
    }[change]()
    # The correlation of n independent pairs has a standard deviation of 1 / sqrt(n).
    pair = torch.stack([base.flatten(), neighbour.flatten()]).double()
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / base.numel() ** 0.5
    assert not torch.equal(base, neighbour)


def test_the_largest_of_logits_plus_noise_is_a_draw_from_them():
    share = torch.tensor([0.05, 0.15, 0.3, 0.5])
    drawn = (share.log() + gumbel_noise(2, range(40_000), step=0, codes=4)).argmax(dim=-1)
    counts = torch.bincount(drawn, minlength=4) / 40_000
    torch.testing.assert_close(counts, share, atol=5 * (0.25 / 40_000) ** 0.5, rtol=0)


def test_noise_does_not_depend_on_how_many_steps_are_hashed_at_once():
    pictures, codes, steps = range(64), 300, 40
    assert 1 < COUNTERS_AT_ONCE // (64 * 75) < steps
    together = GumbelNoise([3] * 64, pictures, codes, steps)
    for step in (*range(steps), 2, 39, 0):
        assert torch.equal(together.at(step), gumbel_noise(3, pictures, step, codes))


def test_rows_have_seeds_and_pictures_of_their_own():
    together = GumbelNoise([5, 2**63, 5], [0, 0, 2**40], codes=10, steps=1).at(0)
    for row, (seed, picture) in enumerate([(5, 0), (2**63, 0), (5, 2**40)]):
        assert torch.equal(together[row], gumbel_noise(seed, [picture], 0, 10)[0])
    assert len({tuple(row.tolist()) for row in together}) == 3


@pytest.mark.gpu
def test_noise_on_a_gpu_is_the_same():
    on_gpu = gumbel_noise(3, range(128), 17, 8192, "cuda").cpu()
    assert torch.equal(on_gpu, gumbel_noise(3, range(128), 17, 8192))
