"""The parts that a tokenizer.json may have.

These are the parts, and the patterns, of published caption tokenizers (T5, CLIP, BERT, byte-level BPE) and of ours:
others, in a hostile file, could turn a caption into gigabytes or never finish.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from dalle_lean.errors import UserError

MAX_PARTS = 8  # in a sequence, such as one of normalizers
MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")
NORMALIZERS = (
    *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "BertNormalizer"),
    *("Precompiled", "Prepend", "Replace"),
)
PRE_TOKENIZERS = (
    *("ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation"),
    "Split",
)
# These two never run: captions are encoded without special tokens, and no ids are decoded. But loading compiles a
# decoder's patterns.
POST_PROCESSORS = ("ByteLevel", "TemplateProcessing", "RobertaProcessing", "BertProcessing")
DECODERS = ("ByteLevel", "Metaspace", "WordPiece", "BPEDecoder", "ByteFallback", "Fuse", "Strip", "Replace")
REPLACED = (
    ({"Regex": r"\s+"}, " "),  # CLIP
    ({"Regex": " {2,}"}, "▁"),  # T5
    ({"Regex": " {2,}"}, " "),
    ({"String": " "}, "▁"),
    ({"String": "``"}, '"'),
    ({"String": "''"}, '"'),
)
PREPENDED = ("▁", " ")
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d"
SPLIT_AT = (
    {"String": " "},
    {"Regex": rf"{WORDS}|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+"},  # CLIP
    {"Regex": rf"<\|startoftext\|>|<\|endoftext\|>|{WORDS}|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+"},
    {"Regex": rf"{WORDS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"},  # GPT-2
)
LONGEST_REPLACEMENT_BYTES = 64  # limit in a table of normal forms; Unicode's longest has 33


def check_parts(content: Any) -> None:
    """UserError for the first part of a tokenizer.json that is not supported."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise UserError("it has no model")
    model = content["model"]
    if model.get("type", "BPE") not in MODELS:
        raise unknown("model", model.get("type"), MODELS)
    if model.get("dropout"):
        raise UserError("model: with dropout, a caption has other ids each time; leave it out")
    for kind, known in (
        ("normalizer", NORMALIZERS),
        ("pre_tokenizer", PRE_TOKENIZERS),
        ("post_processor", POST_PROCESSORS),
        ("decoder", DECODERS),
    ):
        parts = list(flat(kind, content.get(kind)))
        if len(parts) > MAX_PARTS:
            raise UserError(f"{kind}: {len(parts)} in a sequence; at most {MAX_PARTS} are supported")
        types = [part.get("type") for part in parts]
        for part, name in zip(parts, types, strict=True):
            if name not in known:
                raise unknown(kind, name, known)
            check_pattern(kind, part)
        if kind == "normalizer" and any(types.count(name) > 1 for name in ("Precompiled", "Prepend")):
            raise UserError("normalizer: Precompiled and Prepend are supported only once each")


def flat(kind: str, part: Any) -> Iterator[dict[str, Any]]:
    """The parts of a sequence and of sequences in it; none if there is no part."""
    if part is None:
        return
    if not isinstance(part, dict):
        raise UserError(f"{kind}: it must be an object")
    if part.get("type") != "Sequence":
        yield part
        return
    names = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
    parts = part.get(names.get(kind, "decoders"))
    if not isinstance(parts, list):
        raise UserError(f"{kind}: a sequence without its parts")
    for each in parts:
        yield from flat(kind, each)


def check_pattern(kind: str, part: dict[str, Any]) -> None:
    """UserError for a pattern, a replacement or a table that is not supported."""
    name, pattern = part["type"], part.get("pattern")
    literal = isinstance(pattern, dict) and set(pattern) == {"String"}  # no regular expression
    if name == "Replace" and not (kind == "decoder" and literal) and (pattern, part.get("content")) not in REPLACED:
        raise UserError(f"{kind}: it replaces {shown(pattern)} by {shown(part.get('content'))}, which is not supported")
    if name == "Split" and pattern not in SPLIT_AT:
        raise UserError(f"{kind}: it splits at {shown(pattern)}, which is not supported")
    if name == "Prepend" and part.get("prepend") not in PREPENDED:
        raise UserError(f"{kind}: it prepends {shown(part.get('prepend'))}, which is not supported")
    if name == "Precompiled":
        check_table(part.get("precompiled_charsmap"))


def check_table(table: Any) -> None:
    """UserError unless this is a sentencepiece table of normal forms, none longer than LONGEST_REPLACEMENT_BYTES. The
    table has 4 bytes with the length of a trie, the trie, and strings that end with a zero byte."""
    try:
        content = base64.b64decode(table, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise UserError("normalizer: precompiled_charsmap is not base64") from None
    size = int.from_bytes(content[:4], "little")
    if not size or size % 4 or 4 + size > len(content):
        raise UserError("normalizer: precompiled_charsmap is damaged")
    if max(map(len, content[4 + size :].split(b"\0"))) > LONGEST_REPLACEMENT_BYTES:
        raise UserError(f"normalizer: precompiled_charsmap has forms of more than {LONGEST_REPLACEMENT_BYTES} bytes")


def unknown(kind: str, name: Any, known: tuple[str, ...]) -> UserError:
    return UserError(f"{kind}: type {shown(name)} is not supported, only {', '.join(known)}")


def shown(value: Any) -> str:
    """A value from a file, cut for one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
