from pathlib import Path

import pytest

from benchmarks.preprocessing import VariedFolder, memory, phases
from tests.tiny import tiny_vqgan

EMOJI = Path(__file__).parents[1] / "data" / "emoji"


@pytest.fixture(scope="module")
def vqgan():
    return tiny_vqgan(codebook_size=64, picture_side=16)


def test_every_phase_and_the_whole_have_a_rate(vqgan, tmp_path):
    found = phases(VariedFolder(EMOJI, 64), vqgan, tmp_path, batch_size=16, workers=1, bf16=False, turns=1)
    assert found["pictures"] == 64
    assert list(found["pictures_per_s"]) == ["read", "decode", "VQGAN alone", "write", "all together"]
    assert min(found["pictures_per_s"].values()) > 0
    assert found["pictures_per_s"]["VQGAN alone"] > found["pictures_per_s"]["all together"]
    cpu_ms = found["cpu_ms"]
    assert found["least_overhead"] == pytest.approx(cpu_ms["decoding"] / cpu_ms["VQGAN"])
    assert found["least_overhead"] > 0


def test_memory_is_watched_from_the_first_rows_to_the_last(vqgan, tmp_path):
    found = memory(VariedFolder(EMOJI, 400), vqgan, tmp_path / "out", batch_size=16, workers=1, bf16=False)
    assert found["rows"] == 400
    assert min(found["peak_mb_of_each_tenth"]) > 50


def test_repeated_pictures_are_varied():
    source = VariedFolder(EMOJI, 2500)
    samples = [sample for part in range(len(source.parts)) for sample in source.samples(part)]
    assert len(samples) == sum(map(source.size, range(len(source.parts)))) == 2500
    assert len({sample.key for sample in samples}) == 2500
    assert len({sample.caption for sample in samples}) > 2400
    assert len({sample.picture for sample in samples}) > 1500
