"""Each measure equals its slow, obvious twin."""

import math

import numpy as np
import pytest
import torch

from inference.evaluation.codes import count_bits, measure_bits
from inference.evaluation.reconstruction import reconstruct, ssim
from inference.evaluation.shares import Share


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
    assert (made.float() - 255 * expected).abs().max() <= 0.51
    assert 0 < measured.codes_used <= 1 <= measured.perplexity


def test_bits_are_the_mean_cross_entropy_of_each_picture_alone(generator):
    config = generator.model.config
    codes = torch.randint(config.image_vocab_size, (3, config.image_len), generator=torch.Generator().manual_seed(0))
    captions = ["a red circle", "a blue square", "a cat"]
    bits = measure_bits(generator, captions, codes, codes)
    alone = []
    for caption, picture in zip(captions, codes, strict=True):
        text_ids = generator.tokenizer.encode([caption], config.text_len)
        with torch.inference_mode():
            alone.append(float(generator.model.losses(text_ids, picture[None])[1]) / math.log(2))
    assert bits.model == pytest.approx(sum(alone) / 3, abs=1e-4)
    assert bits.strangers_caption > 0
    assert bits.no_caption > 0


def test_count_models_know_how_often_codes_come():
    codes = np.array([[0, 1], [0, 2]])
    everywhere = np.array([[3, 1, 0, 0]] * 2)
    expected = -np.log2([4 / 8, 2 / 8, 4 / 8, 1 / 8]).mean()
    assert count_bits(everywhere, codes) == pytest.approx(expected)


def test_a_share_stands_with_its_confidence():
    assert str(Share(9, 10)) == "90 % (9/10; 60 to 98)"
    assert str(Share(0, 0)) == "no prompts"
    low, high = Share(10, 10).interval
    assert 0.7 < low < 0.75
    assert high == 1
