"""Which words a model has learnt: those of its training captions, and how often each occurred there.

A word is a run of letters, digits and marks, with apostrophes inside it; a pictograph such as an emoji is a word by
itself. All is lower-cased and in Unicode's form NFC, as the tokenizer reads it.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self

from dalle_lean.errors import UserError, is_whole
from dalle_lean.io.files import read_format, write_json

FORMAT = "dalle_lean_vocabulary/1"
FEWEST = 5
"""What occurs less often is not learnt."""
MOST_WORDS = 50_000
MOST_CAPTIONS = 1_000_000
"""That are counted: enough to find what is seen often, few enough to stream before a run begins."""
LONGEST_WORD = 64  # characters
LONGEST_TEXT = 4000
"""Characters of a caption or prompt that are looked at; no model reads as far."""
LARGEST_BYTES = MOST_WORDS * (4 * LONGEST_WORD + 32)
LARGEST_COUNT = 2**53

# \w has no marks, without which words of many scripts fall apart at their vowels.
MARKS = "".join(char for char in map(chr, range(0x300, 0x1F000)) if unicodedata.category(char).startswith("M"))
FLAG = "[\U0001f1e6-\U0001f1ff]{2}"
PICTOGRAPH = "[\u2190-\u21ff\u2300-\u23ff\u25a0-\u27bf\u2b00-\u2bff\U0001f000-\U0001f3fa\U0001f400-\U0001faff]"
WORD = re.compile(rf"\w[\w{MARKS}]*(?:'\w[\w{MARKS}]*)*|{FLAG}|{PICTOGRAPH}")
SPELLINGS = str.maketrans({"_": " ", "\u2019": "'", "\ufe0e": None, "\ufe0f": None})
"""One for each word: the last two choose between the drawings of an emoji."""


def words_of(text: str) -> list[str]:
    """The words of a caption or prompt, in order."""
    normal = unicodedata.normalize("NFC", text[:LONGEST_TEXT]).lower()
    return WORD.findall(normal.translate(SPELLINGS))


FUNCTION_WORDS = frozenset(
    words_of(
        "a an the this that these those some and or of with for to by from as at in on is are was were be it there "
        "i me you we my your his her its our their please can could would want like draw show make paint"
    )
)
"""English ones that show nothing: nobody misses them in a picture."""

MOST_NAMED = 6
LONGEST_NAMED = 30  # characters


@dataclass(frozen=True)
class Vocabulary:
    """The words of training captions."""

    words: dict[str, int]
    """How often each occurred, the most frequent first."""
    captions: int
    """That were counted."""

    @classmethod
    def count(cls, captions: Iterable[str], before: Self | None = None) -> Self:
        """The words of the first MOST_CAPTIONS captions that occur FEWEST times or more, at most MOST_WORDS of them.

        Args:
            before: what the model had learnt already; it is added.
        """
        counted = Counter(before.words if before else {})
        number = before.captions if before else 0
        for caption in islice(captions, MOST_CAPTIONS):
            counted.update(words_of(caption))
            number += 1
        often = [(word, n) for word, n in counted.items() if n >= FEWEST and len(word) <= LONGEST_WORD]
        often.sort(key=lambda one: (-one[1], one[0]))
        return cls(dict(often[:MOST_WORDS]), number)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a vocabulary.json; ValueError for anything else, or for one above the limits of this file."""
        content = read_format(path, FORMAT, LARGEST_BYTES)
        words, captions = content.get("words"), content.get("captions")
        if not is_whole(captions, 0, LARGEST_COUNT):
            raise UserError(f"{path}: captions must be a whole number from 0")
        if not isinstance(words, dict) or len(words) > MOST_WORDS:
            raise UserError(f"{path}: words must be an object of at most {MOST_WORDS} words")
        for word, number in words.items():
            if not 1 <= len(word) <= LONGEST_WORD or not is_whole(number, 0, LARGEST_COUNT):
                raise UserError(
                    f"{path}: {word[:LONGEST_NAMED]!r} must have 1 to {LONGEST_WORD} characters and a whole number"
                )
        return cls(words, captions)

    def save(self, path: str | Path) -> None:
        """Write a vocabulary.json, atomically."""
        write_json(path, {"format": FORMAT, "captions": self.captions, "words": self.words})

    def knows(self, word: str) -> bool:
        """Whether it occurred, or another form of it: "whales" is known where "whale" is, and the other way round."""
        return any(form in self.words for form in forms(word))

    def unknown(self, prompt: str) -> list[str]:
        """The words of a prompt that the model has not learnt, in its order, each once; never function words."""
        return [word for word in content_words(prompt) if not self.knows(word)]


def content_words(prompt: str) -> list[str]:
    """The words of a prompt that say what is to be seen: all but function words, in its order, each once."""
    return [word for word in dict.fromkeys(words_of(prompt)) if word.removesuffix("'s") not in FUNCTION_WORDS]


def forms(word: str) -> list[str]:
    """An English word, its plural and what it may be the plural or the possessive of; some of them are no words."""
    word = word.removesuffix("'s")
    found = [word, word + "s"]
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        found.append(word[:-1])
        if re.search("(s|x|z|ch|sh|o)es$", word):
            found.append(word[:-2])
        if word.endswith("ies"):
            found.append(word[:-3] + "y")
        if word.endswith("ves"):
            found += [word[:-3] + "f", word[:-3] + "fe"]
    return found


def named(words: Sequence[str], quotes: tuple[str, str] = ("", "")) -> list[str]:
    """The first few words, long ones cut, and how many more there are: parts for `enumerated` that stay short."""
    before, after = quotes
    cut = (word if len(word) <= LONGEST_NAMED else word[:LONGEST_NAMED] + "…" for word in words[:MOST_NAMED])
    more = len(words) - MOST_NAMED
    return [f"{before}{word}{after}" for word in cut] + ([f"{more} more word{'s' * (more > 1)}"] if more > 0 else [])


def enumerated(parts: Sequence[str], joint: str = "and") -> str:
    """ "x", "x and y", "x, y and z"."""
    *first, last = parts
    return f"{', '.join(first)} {joint} {last}" if first else last
