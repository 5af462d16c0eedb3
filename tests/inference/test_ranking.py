"""Codes to pictures and scores: the same as one by one, the same in any company, and within the memory there is."""

import dataclasses

import pytest
import torch
from PIL import Image

from benchmarks.allocations import allocated
from dalle_lean.clip.scorer import ClipScorer
from dalle_lean.images.files import to_uint8
from dalle_lean.images.vqgan import VQGAN, VQGANConfig
from dalle_lean.io.model_folder import bundled_model
from inference.ranking import all_blank, best_pictures, collect, decode_and_score, decode_batch_size, decode_bytes
from inference.request import Picture
from tests.tiny import VQGAN_CONFIG, tiny_vqgan

PROMPT = "a red heart"


@pytest.fixture(scope="module")
def vqgan():
    return tiny_vqgan()


@pytest.fixture(scope="module")
def clip(model_folder):
    return ClipScorer.load(model_folder / "clip")


def some_codes(number, side=4):
    return torch.randint(0, 32, (number, side * side), generator=torch.Generator().manual_seed(0))


def ranked(*arguments, **options):
    images, scores = collect(decode_and_score(*arguments, **options))
    return [image.tobytes() for image in images], scores


def test_pictures_and_scores_are_the_decoders_and_the_scorers(vqgan, clip):
    codes = some_codes(8)
    images, scores = collect(decode_and_score(codes, PROMPT, vqgan, clip))
    pixels = vqgan.decode(codes)
    as_bytes = to_uint8(pixels).permute(0, 2, 3, 1).numpy()
    assert [image.tobytes() for image in images] == [values.tobytes() for values in as_bytes]
    assert scores == clip.score(pixels, PROMPT).tolist()


def test_in_bfloat16_pictures_look_the_same():
    vqgan, codes = VQGAN.load(bundled_model() / "vqgan"), some_codes(4, side=16)
    exact, rounded = (
        torch.cat([part.pixels for part in decode_and_score(codes, "", vqgan, bf16=bf16)]).float()
        for bf16 in (False, True)
    )
    assert not torch.equal(exact, rounded)
    assert 10 * torch.log10(255**2 / (exact - rounded).square().mean()) > 40  # dB


def test_picture_i_is_the_same_however_many_there_are(vqgan, clip):
    codes = some_codes(19)
    images, scores = ranked(codes, PROMPT, vqgan, clip)
    assert len(images) == len(scores) == 19
    for number in (1, 3, 8, 9, 16):
        assert ranked(codes[:number], PROMPT, vqgan, clip) == (images[:number], scores[:number])


def test_the_published_shape_of_vqgan_rounds_alike_in_a_batch_that_is_not_full():
    config = dataclasses.replace(VQGAN_CONFIG, channel_multipliers=(1, 1, 2, 4), attention_resolutions=(4,))
    vqgan = VQGAN(config).eval()
    codes = some_codes(11)
    assert ranked(codes, PROMPT, vqgan)[0][:3] == ranked(codes[:3], PROMPT, vqgan)[0]


def test_without_a_scorer_there_are_pictures_and_no_scores(vqgan):
    images, scores = ranked(some_codes(3), PROMPT, vqgan)
    assert (len(images), scores) == (3, None)
    assert images == ranked(some_codes(3), PROMPT, vqgan)[0]


def test_of_no_codes_there_are_no_pictures(vqgan, clip):
    assert ranked(some_codes(0), PROMPT, vqgan, clip) == ([], [])


def test_the_prompt_is_read_once_for_all_batches(vqgan, clip, monkeypatch):
    read = []
    text_features = clip.text_features
    monkeypatch.setattr(clip, "text_features", lambda captions: read.append(captions) or text_features(captions))
    first = ranked(some_codes(20), "two black cats", vqgan, clip)[1]
    ranked(some_codes(20), "a house", vqgan, clip)
    assert read == [["two black cats"], ["a house"]]
    assert ranked(some_codes(20), "two black cats", vqgan, clip)[1] == first


CONFIGS = {
    "pixels decide": (VQGAN_CONFIG, 8),
    "the published proportions": (dataclasses.replace(VQGAN_CONFIG, channel_multipliers=(1, 1, 2, 4)), 8),
    "a wide middle decides": (dataclasses.replace(VQGAN_CONFIG, channel_multipliers=(1, 8)), 32),
    "attention decides": (dataclasses.replace(VQGAN_CONFIG, channel_multipliers=(1, 1)), 32),
    "attention on the way decides": (
        dataclasses.replace(VQGAN_CONFIG, channel_multipliers=(1, 1, 1), attention_resolutions=(16,)),
        16,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("number", [2, 8])
def test_a_picture_needs_the_bytes_that_are_predicted(name, number):
    config, side = CONFIGS[name]
    vqgan, codes = VQGAN(config).eval(), some_codes(number, side)
    with torch.no_grad():
        peak, _, _ = allocated(lambda: vqgan.decode(codes))
    assert peak == pytest.approx(number * decode_bytes(config, side), rel=0.02)


def test_the_budget_halves_the_batch_and_one_picture_is_always_decoded(monkeypatch):
    published = VQGANConfig()
    assert decode_bytes(published, 32) == 4 * 128 * 256**2 * 4
    assert decode_batch_size(published, 32) == 8
    for part, size in ((1, 8), (2, 4), (4, 2), (8, 1), (16, 1)):
        monkeypatch.setattr("inference.ranking.DECODE_BUDGET_BYTES", 2**30 // part)
        assert decode_batch_size(published, 32) == size


class Cramped(VQGAN):
    """A real VQGAN on a device that has room for only so many pictures."""

    room = 2

    def pixels(self, quantized):
        self.tried.append(len(quantized))
        if len(quantized) > self.room:
            raise torch.OutOfMemoryError("no memory")
        return super().pixels(quantized)


@pytest.fixture
def cramped(vqgan):
    cramped = Cramped(VQGAN_CONFIG).eval()
    cramped.load_state_dict(vqgan.state_dict())
    cramped.tried = []
    return cramped


@pytest.mark.filterwarnings("ignore:out of memory on cpu. decoding 4")
def test_out_of_memory_halves_the_batch_and_loses_no_picture(vqgan, cramped, clip, monkeypatch):
    with pytest.warns(UserWarning, match="out of memory on cpu: decoding 2 pictures at once from here on"):
        images, scores = ranked(some_codes(5), PROMPT, cramped, clip)
    assert cramped.tried == [8, 4, 2, 2, 2]
    monkeypatch.setattr("inference.ranking.DECODE_BATCH", 2)
    assert (images, scores) == ranked(some_codes(5), PROMPT, vqgan, clip)


@pytest.mark.filterwarnings("ignore:out of memory")
def test_where_not_even_one_picture_fits_the_error_says_so(cramped):
    cramped.room = 0
    with pytest.raises(ValueError, match="no memory to decode and score one picture of 32 pixels"):
        ranked(some_codes(5), PROMPT, cramped)
    assert cramped.tried == [8, 4, 2, 1]


class Wrong:
    name = "wrong"

    def __init__(self, scores):
        self.scores = scores

    def score(self, pixels, prompt):
        return self.scores(pixels)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (lambda pixels: pixels, r"scorer wrong: scores of shape \[8, 3, 32, 32\] for 8 pictures; must be \[8\]"),
        (lambda pixels: pixels.mean(), r"scores of shape \[\]"),
        (lambda pixels: pixels.flatten(1).sum(1) / 0, "picture 0 the score inf; it must be a finite number"),
    ],
)
def test_scores_that_rank_nothing_are_refused(vqgan, scores, message):
    with pytest.raises(ValueError, match=message):
        ranked(some_codes(2), PROMPT, vqgan, Wrong(scores))


def test_wrong_codes_are_refused_before_anything_is_decoded(cramped):
    with pytest.raises(ValueError, match=r"codes: .*must be in 0\.\.31"):
        ranked(some_codes(2) + 32, PROMPT, cramped)
    assert cramped.tried == []


@pytest.mark.parametrize(
    ("scores", "best"), [([0.3, 0.9, 0.9, 0.5, 0.9, 0.1], [1, 3, 0, 5, 2, 4]), (None, [0, 1, 2, 3, 4, 5])]
)
def test_equal_pictures_come_after_all_that_differ_where_pictures_are_ranked(scores, best):
    codes = torch.tensor([[0], [7], [7], [3], [7], [5]])
    pictures = [Image.new("RGB", (1, 1))] * len(codes)
    assert [picture.index for picture in best_pictures(codes, pictures, scores, count=6)] == best
    assert [picture.index for picture in best_pictures(codes, pictures, scores, count=3, first=8)] == [
        8 + index for index in best[:3]
    ]


def picture_of(pixels):
    return Picture(Image.fromarray(pixels.numpy()), None, 0, torch.zeros(4))


def test_pictures_of_one_colour_are_blank_and_one_with_a_small_thing_is_not():
    white = 250 + torch.randint(0, 6, (32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert all_blank([picture_of(white)] * 2)
    white[0, 0] = 200  # a corner
    drawn = white.clone()
    drawn[14:18, 14:18, 2] = 90
    assert not all_blank([picture_of(white), picture_of(drawn)])
