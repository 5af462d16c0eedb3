"""What decoding processes answer, and what else could come from one that a picture has taken over."""

import pickle
import random

import numpy as np
import pytest

from preprocessing.encoding.decoding import Candidate, Decoding, Rejection
from preprocessing.encoding.filters import Rules
from preprocessing.encoding.worker_protocol import BadAnswer, from_bytes, json_line, max_bytes, to_bytes
from preprocessing.sources import Sample

SAMPLE = Sample(key="one", caption="a disc", metadata={"NSFW": "UNLIKELY", "url": "http://one"})
DECODING = Decoding(side=2, crops=2, flip=True)
HASHED = Decoding(side=2, rules=Rules(max_hash_distance=4))
PIXELS = bytes(4 * 2 * 2 * 3)


def kept(views: int, hash: int | None = None) -> Candidate:
    pixels = np.arange(views * 12, dtype=np.uint8).reshape(views, 2, 2, 3)
    return Candidate(sample=SAMPLE, width=40, height=30, pixels=pixels, hash=hash)


@pytest.mark.parametrize(
    ("decoding", "result"), [(DECODING, kept(2)), (DECODING, kept(4)), (HASHED, kept(1, 2**64 - 1))]
)
def test_a_picture_comes_back_with_the_sample_it_belongs_to(decoding, result):
    found = from_bytes(to_bytes(result), SAMPLE, decoding)
    assert found.pixels.tolist() == result.pixels.tolist()
    assert {**vars(found), "pixels": 0} == {**vars(result), "pixels": 0}
    assert len(to_bytes(result)) <= max_bytes(decoding)


def test_a_rejection_comes_back_and_an_endless_detail_is_cut():
    rejection = Rejection("one", "picture_broken", "bytes \udcff of \u0394")
    assert from_bytes(to_bytes(rejection), SAMPLE, DECODING).detail == "bytes ? of \u0394"
    endless = to_bytes(Rejection("one", "picture_broken", "\u0394" * 10**6))
    assert len(endless) <= max_bytes(DECODING)
    assert from_bytes(endless, SAMPLE, DECODING).reason == "picture_broken"


def head(width=40, height=30, hash=None) -> bytes:
    return json_line({"width": width, "height": height, "hash": hash})


WRONG = {
    "nothing": b"",
    "a pickle": pickle.dumps(kept(4)),
    "no head": b"\n" + PIXELS,
    "a list for a head": b"[40, 30]\n" + PIXELS,
    "no pixels": head(),
    "a pixel short": head() + PIXELS[1:],
    "a pixel more": head() + PIXELS + b"0",
    "too many views": head() + bytes(6 * 12),
    "a view without its mirror image": head() + bytes(3 * 12),
    "a negative side": head(width=-1) + PIXELS,
    "a side that is a text": head(width="40") + PIXELS,
    "a hash nobody asked for": head(hash=0) + PIXELS,
    "an empty rejection": b"{}",
    "a reason that is no word": b'{"reason": "../..", "detail": ""}',
    "a reason that is a list": b'{"reason": [], "detail": ""}',
    "no detail": b'{"reason": "picture_broken"}',
    "lists within lists": b"[" * 60_000,
    "a number without end": b'{"width": ' + b"9" * 60_000 + b"}\n" + PIXELS,
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_answer_is_refused(answer):
    with pytest.raises(BadAnswer):
        from_bytes(answer, SAMPLE, DECODING)


def test_a_hash_that_was_asked_for_must_be_there():
    with pytest.raises(BadAnswer, match="hash"):
        from_bytes(to_bytes(kept(1)), SAMPLE, HASHED)


def test_random_bytes_and_changed_answers_are_refused_or_read_and_nothing_else():
    chance = random.Random(0)
    true = [to_bytes(kept(4)), to_bytes(Rejection("one", "picture_broken", "why"))]
    for _ in range(3000):
        answer = bytearray(chance.choice([*true, chance.randbytes(chance.randrange(80))]))
        for _ in range(min(3, len(answer))):
            answer[chance.randrange(len(answer))] = chance.randrange(256)
        try:
            found = from_bytes(bytes(answer), SAMPLE, DECODING)
        except BadAnswer:
            continue
        assert found.key == "one"
        assert isinstance(found, Rejection) or found.pixels.shape in ((2, 2, 2, 3), (4, 2, 2, 3))
