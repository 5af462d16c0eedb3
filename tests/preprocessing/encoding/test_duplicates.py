import random
from itertools import combinations

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from dalle_lean.images.files import open_picture, square_pixels
from preprocessing.encoding.duplicates import NearDuplicates, perceptual_hash
from tests.preprocessing.shards_of_pictures import encoded

MAX_DISTANCE = 6


def hash_of(picture: bytes) -> int:
    return perceptual_hash(square_pixels(open_picture(picture), 64))


COPIES = {
    "jpeg 95": lambda image: encoded(image, "JPEG", quality=95),
    "jpeg 40": lambda image: encoded(image, "JPEG", quality=40),
    "webp": lambda image: encoded(image, "WEBP", quality=60),
    "gif": lambda image: encoded(image, "GIF"),
    "half the size": lambda image: encoded(image.resize((48, 48), Image.Resampling.BICUBIC), "PNG"),
    "twice the size": lambda image: encoded(image.resize((192, 192), Image.Resampling.BICUBIC), "PNG"),
    "brighter": lambda image: encoded(ImageEnhance.Brightness(image).enhance(0.9), "JPEG", quality=90),
}


@pytest.fixture(scope="module")
def hashes(emoji):
    return {path: hash_of(path.read_bytes()) for path in sorted(emoji.glob("*.png"))}


@pytest.mark.parametrize("copy", COPIES)
def test_copies_are_found(hashes, copy):
    missed = 0
    for path, original in hashes.items():
        again = hash_of(COPIES[copy](Image.open(path).convert("RGB")))
        missed += (again ^ original).bit_count() > MAX_DISTANCE
    assert missed <= 1


def test_different_pictures_are_not_taken_for_copies(hashes):
    assert len(hashes) == 200
    assert min((one ^ other).bit_count() for one, other in combinations(hashes.values(), 2)) > MAX_DISTANCE


def test_the_hash_has_64_bits_even_of_a_blank_picture():
    assert perceptual_hash(np.full((16, 16, 3), 255, np.uint8)) == 0
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    assert 0 < perceptual_hash(noise) < 2**64


@pytest.mark.parametrize("max_distance", [0, 1, 6, 20])
def test_what_the_bands_find_is_what_comparing_all_finds(max_distance):
    draw = random.Random(0)
    seen, index = {}, NearDuplicates(max_distance)
    centres = [draw.getrandbits(64) for _ in range(20)]
    found = 0
    for number in range(400):
        value = draw.choice(centres)
        for bit in draw.sample(range(64), draw.randrange(12)):
            value ^= 1 << bit
        near = {key for other, key in seen.items() if (value ^ other).bit_count() <= max_distance}
        match = index.earlier(value, str(number))
        assert (match in near) if near else match is None
        if match is None:
            seen[value] = str(number)
        else:
            found += 1
    assert found > 5
