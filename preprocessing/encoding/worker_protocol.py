"""What a decoding process answers, as plain bytes. A picture may have taken it over: nothing of it is believed.

It tells only what pixels tell. Key, caption and label are those of the sample that was asked about.
"""

import json
import re
import struct

import numpy as np

from preprocessing.encoding.decoding import MAX_SIDE, Candidate, Decoding, Rejection
from preprocessing.sources import Sample
from preprocessing.sources.sample import json_object

KEPT, REJECTED = b"k", b"r"
HEAD = struct.Struct("<iiI?Q")
"""Width, height, views, whether there is a hash, the hash; then the pixels [views, side, side, 3]."""
MAX_DETAIL_LENGTH = 10_000
MAX_TEXT_BYTES = 2**16
"""JSON writes a character in six bytes at most."""
REASON = re.compile("[a-z_]{1,40}")


class BadAnswer(ValueError):
    """Bytes that no decoding process writes as it should."""


def to_bytes(result: Candidate | Rejection) -> bytes:
    if isinstance(result, Rejection):
        return REJECTED + json.dumps({"reason": result.reason, "detail": result.detail[:MAX_DETAIL_LENGTH]}).encode()
    head = HEAD.pack(result.width, result.height, len(result.pixels), result.hash is not None, result.hash or 0)
    return b"".join((KEPT, head, result.pixels.data))


def max_bytes(decoding: Decoding) -> int:
    """No answer is longer."""
    pixels = decoding.crops * (1 + decoding.flip) * 3 * decoding.side**2
    return len(KEPT) + max(HEAD.size + pixels, MAX_TEXT_BYTES)


def from_bytes(answer: bytes, sample: Sample, decoding: Decoding) -> Candidate | Rejection:
    """What the answer says of the sample; raises BadAnswer."""
    kind, content = answer[:1], answer[1:]
    if kind == REJECTED:
        return rejection(content, sample)
    if kind != KEPT or len(content) < HEAD.size:
        raise BadAnswer(f"{len(answer)} bytes that are no answer")
    width, height, views, hashed, hash = HEAD.unpack_from(content)
    if not (0 <= width <= MAX_SIDE and 0 <= height <= MAX_SIDE):
        raise BadAnswer(f"a picture of {width}x{height} pixels")
    if hashed != (decoding.rules.max_hash_distance is not None):
        raise BadAnswer("a perceptual hash is missing, or was not asked for")
    if not 1 <= views <= decoding.crops * (1 + decoding.flip) or views % (1 + decoding.flip):
        raise BadAnswer(f"{views} views of a picture")
    if len(content) - HEAD.size != views * 3 * decoding.side**2:
        raise BadAnswer(f"{len(content) - HEAD.size} bytes of pixels for {views} views")
    pixels = np.frombuffer(content, np.uint8, offset=HEAD.size).reshape(views, decoding.side, decoding.side, 3)
    return Candidate.of(sample, width=width, height=height, pixels=pixels, hash=hash if hashed else None)


def rejection(content: bytes, sample: Sample) -> Rejection:
    said = json_object(content) or {}
    reason, detail = said.get("reason"), said.get("detail")
    if not (isinstance(reason, str) and REASON.fullmatch(reason) and isinstance(detail, str)):
        raise BadAnswer("a rejection without a reason")
    return Rejection(sample.key, reason, detail)
