"""The answers of decoding processes: a line of JSON, then pixels.

They are not trusted: a malicious picture may run code there. So an answer holds only what decoding finds; key, caption
and label come from the sample that was sent.
"""

import json
import re
from typing import Any

import numpy as np

from dalle_lean.words import utf8
from preprocessing.encoding.decoding import MAX_SIDE, Candidate, Decoding, Rejection
from preprocessing.sources import Sample
from preprocessing.sources.sample import json_object

MAX_DETAIL_LENGTH = 10_000
MAX_LINE_BYTES = 2**16  # JSON writes a character in at most six bytes
REASON = re.compile("[a-z_]{1,40}")


class BadAnswer(ValueError):
    """Bytes that no healthy decoding process sends."""


def to_bytes(result: Candidate | Rejection) -> bytes:
    if isinstance(result, Rejection):
        return json_line({"reason": result.reason, "detail": result.detail[:MAX_DETAIL_LENGTH]})
    head = json_line({"width": result.width, "height": result.height, "hash": result.hash})
    return b"".join((head, result.pixels.data))


def json_line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def max_bytes(decoding: Decoding) -> int:
    """The length of the longest valid answer."""
    return MAX_LINE_BYTES + decoding.max_views * 3 * decoding.side**2


def from_bytes(answer: bytes, sample: Sample, decoding: Decoding) -> Candidate | Rejection:
    """Check and decode an answer about `sample`; raises BadAnswer."""
    line, _, content = answer.partition(b"\n")
    said = json_object(line)
    if said is None:
        raise BadAnswer(f"{len(answer)} bytes without a line of JSON")
    if "reason" in said:
        reason, detail = said["reason"], said.get("detail")
        if not (isinstance(reason, str) and REASON.fullmatch(reason) and isinstance(detail, str)):
            raise BadAnswer("a rejection without a reason")
        return Rejection(sample.key, reason, utf8(detail))
    views, rest = divmod(len(content), 3 * decoding.side**2)
    if rest or not 1 <= views <= decoding.max_views or views % (1 + decoding.flip):
        raise BadAnswer(f"{len(content)} bytes of pixels")
    hashed = decoding.rules.max_hash_distance is not None
    if not hashed and said.get("hash") is not None:
        raise BadAnswer("a perceptual hash that was not asked for")
    return Candidate(
        sample=sample,
        width=number(said, "width", MAX_SIDE),
        height=number(said, "height", MAX_SIDE),
        pixels=np.frombuffer(content, np.uint8).reshape(views, decoding.side, decoding.side, 3),
        hash=number(said, "hash", 2**64 - 1) if hashed else None,
    )


def number(said: dict[str, Any], name: str, most: int) -> int:
    value = said.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise BadAnswer(f"{name} is not a number from 0 to {most}")
    return value
