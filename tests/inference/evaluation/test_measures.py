"""Each measure equals its slow, obvious twin."""

import itertools
import math

import numpy as np
import pytest
import torch

from inference.evaluation.bits_per_code import count_bits, derangement, measure_bits, smoothed
from inference.evaluation.reconstruction import encode, reconstruct, ssim


def slow_ssim(x, y):
    """Of two pictures of lightness [H, W], window by window."""
    places = np.arange(11) - 5
    line = np.exp(-(places**2) / (2 * 1.5**2))
    window = np.outer(line, line) / line.sum() ** 2
    found = []
    for row in range(x.shape[0] - 10):
        for column in range(x.shape[1] - 10):
            a, b = x[row : row + 11, column : column + 11], y[row : row + 11, column : column + 11]
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a, var_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
            both = (window * (a - mean_a) * (b - mean_b)).sum()
            light = (2 * mean_a * mean_b + 1e-4) / (mean_a**2 + mean_b**2 + 1e-4)
            found.append(light * (2 * both + 9e-4) / (var_a + var_b + 9e-4))
    return np.mean(found)


def test_ssim_is_that_of_every_window():
    generator = torch.Generator().manual_seed(0)
    first = torch.rand(2, 3, 16, 20, generator=generator)
    second = (first + 0.2 * torch.randn(first.shape, generator=generator)).clamp(0, 1)
    luma = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    for a, b, found in zip(first, second, ssim(first, second), strict=True):
        expected = slow_ssim((a * luma).sum(0).double().numpy(), (b * luma).sum(0).double().numpy())
        assert float(found) == pytest.approx(expected, abs=1e-4)
    assert ssim(first, first) == pytest.approx(torch.ones(2))


def test_a_reconstruction_is_measured_against_its_picture(generator):
    pixels = torch.randint(256, (5, 3, *[generator.picture_side] * 2), generator=torch.Generator().manual_seed(0))
    measured, codes, made = reconstruct(generator.vqgan, pixels.byte())
    with torch.inference_mode():
        expected = generator.vqgan.decode(generator.vqgan.encode(pixels.float() / 255)).clamp(0, 1)
    error = float((expected - pixels.float() / 255).double().square().mean())
    assert measured.psnr_db == pytest.approx(-10 * math.log10(error), abs=1e-3)
    assert codes.shape == (5, generator.model.config.image_len)
    assert torch.equal(encode(generator.vqgan, pixels.byte()), codes)
    assert (made.float() - 255 * expected).abs().max() <= 0.51
    assert 0 < measured.codes_used <= 1 <= measured.perplexity


def test_bits_are_the_mean_cross_entropy_of_each_picture_alone(generator):
    config = generator.model.config
    codes = torch.randint(config.image_vocab_size, (3, config.image_len), generator=torch.Generator().manual_seed(0))
    captions = ["a red circle", "a blue square", "a cat"]
    bits = measure_bits(generator, captions, codes, codes)

    def mean_alone(captions):
        text_ids = generator.tokenizer.encode(captions, config.text_len)
        return mean_of_ids(text_ids)

    def mean_of_ids(text_ids):
        with torch.inference_mode():
            losses = [generator.model.losses(text_ids[row : row + 1], codes[row : row + 1])[1] for row in range(3)]
        return float(sum(losses)) / 3 / math.log(2)

    assert bits.model == pytest.approx(mean_alone(captions), abs=1e-4)
    assert bits.no_caption == pytest.approx(mean_of_ids(torch.zeros(3, config.text_len, dtype=torch.long)), abs=1e-4)
    others = [mean_alone(list(order)) for order in itertools.permutations(captions) if list(order) != captions]
    assert min(abs(bits.strangers_caption - other) for other in others) < 1e-4
    assert abs(bits.strangers_caption - bits.model) > 1e-3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kinds", [[0, 1], [0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 2], [0, 1, 0, 1, 0, 1], [*range(40)] * 2])
def test_a_strangers_caption_is_never_ones_own(kinds, seed):
    text_ids = torch.tensor(kinds)[:, None].repeat(1, 3)
    order = derangement(text_ids, torch.Generator().manual_seed(seed))
    assert sorted(order.tolist()) == list(range(len(kinds)))
    assert not (text_ids[order] == text_ids).all(dim=1).any()


def test_where_most_captions_are_the_same_as_few_as_possible_keep_theirs():
    text_ids = torch.tensor([0, 0, 1, 0, 2, 0, 0])[:, None]
    order = derangement(text_ids, torch.Generator().manual_seed(0))
    assert sorted(order.tolist()) == list(range(7))
    assert (text_ids[order] == text_ids).sum() == 3  # five rows for whom only two others are there
    assert derangement(text_ids[:1], torch.Generator()).tolist() == [0]


def test_whose_caption_is_a_strangers_is_chosen_by_the_seed():
    text_ids = torch.arange(50)[:, None]
    orders = [derangement(text_ids, torch.Generator().manual_seed(seed)).tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_bits_under_a_strangers_caption_are_all_under_another_caption(generator):
    config = generator.model.config
    noise = torch.Generator().manual_seed(0)
    first, second = torch.randint(config.image_vocab_size, (2, 1, config.image_len), generator=noise)
    captions = ["a red circle"] * 3 + ["a blue square"] * 3
    codes = torch.cat([first] * 3 + [second] * 3)
    crossed = measure_bits(generator, captions[::-1], codes, codes).model
    bits = measure_bits(generator, captions, codes, codes)
    assert abs(bits.model - crossed) > 1e-3
    assert bits.strangers_caption == pytest.approx(crossed, abs=1e-4)


def test_count_models_know_how_often_codes_come():
    probabilities = smoothed(np.array([[3, 1, 0, 0]]), np.full(4, 1 / 4))
    assert probabilities == pytest.approx(np.array([[4, 2, 1, 1]]) / 8)
    codes = np.array([[0, 1], [0, 2]])
    expected = -np.log2([1 / 2, 1 / 4, 1 / 2, 1 / 8]).mean()
    assert count_bits(np.tile(probabilities, (2, 1)), codes) == pytest.approx(expected)


def test_a_place_where_little_was_seen_has_the_counts_of_all_places():
    prior = np.array([0.5, 0.25, 0.125, 0.125])
    found = smoothed(np.array([[0, 0, 0, 0], [0, 0, 0, 4]]), prior)
    assert found == pytest.approx(np.array([prior, (prior + np.eye(4)[3]) / 2]))


def test_count_models_of_a_generator_are_of_the_training_codes(generator):
    config = generator.model.config
    train = torch.zeros(8, config.image_len, dtype=torch.long)
    train[:, 0] = 1
    codes = torch.zeros(2, config.image_len, dtype=torch.long)
    codes[:, 0] = 1
    bits = measure_bits(generator, ["a", "b"], codes, train)
    size, seen = config.image_vocab_size, 8 * config.image_len
    zero, one = (8 * (config.image_len - 1) + 1) / (seen + size), (8 + 1) / (seen + size)
    expected = -(math.log2(one) + (config.image_len - 1) * math.log2(zero)) / config.image_len
    assert bits.counts == pytest.approx(expected)
    assert bits.counts_by_place < bits.counts
