"""Every coding that is compared gives the codes back."""

import numpy as np
import pytest

from benchmarks.code_samples import Sample, keep, kept_samples
from benchmarks.packing import CODINGS, measure, measure_files


@pytest.fixture
def sample():
    codes = np.random.default_rng(0).integers(0, 8192, (30, 64), dtype=np.int16)
    return Sample(codes, 8192, [f"caption {number}" for number in range(30)], 1000.0)


@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.name)
def test_every_coding_gives_the_codes_back(coding, sample):
    found = measure(coding, sample)  # which compares
    assert found.bytes_per_picture > 64 * 13 / 8 * 0.9


def test_thirteen_bits_are_thirteen_bits(sample):
    coding = next(coding for coding in CODINGS if coding.name.startswith("bits"))
    assert measure(coding, sample).bytes_per_picture == 64 * 13 / 8


def test_both_layouts_are_measured_as_files(sample):
    assert set(measure_files(sample)) == {"shard, published", "shard, packed"}


def test_kept_codes_come_back(sample, tmp_path):
    keep({"some": sample}, tmp_path)
    found = kept_samples(tmp_path)["some"]
    assert (found.codes == sample.codes).all()
    assert (found.codebook_size, found.captions, found.jpeg_bytes) == (8192, sample.captions, 1000.0)
