"""Captions -> token ids: a thin wrapper around the `tokenizers` package that owns the padding id."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from dalle_lean.errors import UserError, is_whole
from dalle_lean.io.files import parse, read_bytes, write_bytes
from dalle_lean.tokenizer_parts import check_parts
from dalle_lean.words import utf8

# Ids 0, 1 and 2 of a trained vocabulary. The model replaces id 0 by padding ids, so no caption may contain it.
SPECIAL_TOKENS = ("<unused>", "<pad>", "<unk>")
DEFAULT_PADDING_ID = 1
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
MOST_CHARACTERS = 2**16  # characters of a caption that are read; no model needs as many
MOST_TOKENIZER_BYTES = 2**25  # about the size of the largest published tokenizer.json
# Every byte has its own token, so that every caption can be encoded.
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256


class Tokenizer:
    """Token ids of captions, truncated or right-padded to a length.

    Captions are plain text: "<pad>" or "</s>" in one is encoded like other text, and no start or end token is added.
    """

    def __init__(self, backend: tokenizers.Tokenizer, padding_id: int = DEFAULT_PADDING_ID):
        """Take over `backend`; ValueError if `padding_id` is not one of its ids."""
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError("the tokenizer's vocabulary is empty")
        # One past the largest id: a vocabulary may have gaps, and every id must fit the model's table.
        self.vocab_size = max(vocabulary.values()) + 1
        if not is_whole(padding_id, self.vocab_size - 1):
            raise UserError(f"padding id {padding_id!r} is outside the vocabulary 0..{self.vocab_size - 1}")
        self.padding_id = padding_id
        self._backend = backend
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a `tokenizer.json`. The padding id is that of the file, else 1 (T5's `</s>`, as in the paper's run).
        ValueError if the file is not a tokenizer or its padding id is outside its vocabulary."""
        complaint = f"{path} is not a tokenizer.json"
        content = read_bytes(path, MOST_TOKENIZER_BYTES)
        try:
            text = content.decode("utf-8")
            check_parts(parse(json.loads, text, "it is not JSON"))
            with panics_as_user_errors():
                backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises bare Exception
            raise UserError(f"{complaint}: {error}") from None
        try:
            return cls(backend, backend.padding["pad_id"] if backend.padding else DEFAULT_PADDING_ID)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    @classmethod
    def train(cls, captions: Iterable[str], vocab_size: int) -> Self:
        """Learn a lower-cased byte-level BPE of at most `vocab_size` ids; the same captions give the same file.

        Few captions may yield fewer ids than asked. Padding is id 1, and id 0 is never produced.
        Source: Sennrich et al. 2016 (arXiv 1508.07909), on bytes as in GPT-2.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise UserError(f"vocab_size={vocab_size}: at least {SMALLEST_VOCABULARY} ids are needed, one per byte")
        backend = tokenizers.Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS[2]))
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        # With a space in front, a word has the same ids at the start of a caption as inside it.
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator((encodable(caption) for caption in captions), trainer)
        return cls(backend)

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json`, atomically."""
        write_bytes(path, self.to_json().encode())

    def to_json(self) -> str:
        """The text of its `tokenizer.json`, with a padding section."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.enable_padding(pad_id=self.padding_id, pad_token=copy.id_to_token(self.padding_id) or SPECIAL_TOKENS[1])
        return copy.to_str(pretty=True) + "\n"

    def encode(self, captions: Sequence[str], length: int) -> Tensor:
        """Token ids [B, length], int64 in 0..vocab_size-1, cut at `length` or padded on the right with `padding_id`."""
        if isinstance(captions, str):
            raise ValueError("captions must be a sequence of strings, not one string")
        if length < 1:
            raise ValueError(f"length={length}: must be at least 1")
        with panics_as_user_errors():
            encodings = self._backend.encode_batch_fast(list(map(encodable, captions)), add_special_tokens=False)
        found = [encoding.ids[:length] for encoding in encodings]
        counts = np.fromiter(map(len, found), np.int64, len(found))
        ids = np.full((len(found), length), self.padding_id, np.int64)
        ids[np.arange(length) < counts[:, None]] = np.fromiter(chain.from_iterable(found), np.int64, counts.sum())
        return torch.from_numpy(ids)

    def count(self, caption: str) -> int:
        """Number of ids of a caption, without padding or truncation."""
        return len(self._offsets(caption))

    def unread(self, caption: str, length: int) -> str:
        """The end of a caption that its first `length` ids do not hold, from the word on in which they end."""
        offsets = self._offsets(caption)
        if len(offsets) <= length:
            return ""
        start, _ = offsets[length]
        return caption[caption.rfind(" ", 0, start + 1) + 1 :]

    def _offsets(self, caption: str) -> list[tuple[int, int]]:
        """The first character and the one after the last of each id of a caption."""
        with panics_as_user_errors():
            return self._backend.encode(encodable(caption), add_special_tokens=False).offsets


def find_tokenizer(name: str | None) -> Path | None:
    """The tokenizer.json that `--tokenizer` names: a file, or a hub id, whose file is downloaded; None for None."""
    if name is None or Path(name).is_file():
        return None if name is None else Path(name)
    if not HUB_ID.fullmatch(name) or name.endswith(".json"):
        raise UserError(f"no tokenizer at {name}; give a tokenizer.json, or a hub id such as google-t5/t5-small")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "tokenizer.json"))
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"there is no file {name}, and no tokenizer of that name came from the hub: {reason}") from None


@contextmanager
def panics_as_user_errors() -> Iterator[None]:
    """Turn panics of the package, which is written in Rust, into UserErrors; in Python they are not Exceptions."""
    try:
        yield
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer is damaged: {panic}") from None


def encodable(caption: str) -> str:
    """The caption's first 65,536 characters; lone surrogates, which UTF-8 cannot hold, become question marks."""
    if not isinstance(caption, str):
        raise ValueError(f"a caption must be a string, not {type(caption).__name__}: {caption!r}")
    return utf8(caption[:MOST_CHARACTERS])
