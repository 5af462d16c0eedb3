"""The words that a model has learnt: those of its training captions, and how often each occurred. Which of them a
misspelt word means, and what emoji mean in these words.

A word is a run of letters, digits and marks, with apostrophes inside it; a pictograph such as an emoji is a word by
itself. Words are lower-cased and in Unicode's form NFC, as the tokenizer reads them.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Self

from dalle_lean.errors import UserError, is_whole
from dalle_lean.io.files import read_format, write_json

FORMAT = "dalle_lean_vocabulary/1"
FEWEST = 5  # words with fewer occurrences do not count as learnt
MOST_WORDS = 50_000
MOST_CAPTIONS = 1_000_000
"""Captions that are counted: enough to find all frequent words, few enough to stream before a run begins."""
LONGEST_WORD = 64  # characters
LONGEST_TEXT = 4000  # characters of a caption or prompt that are read; no model needs as many
LARGEST_BYTES = MOST_WORDS * (4 * LONGEST_WORD + 32)
LARGEST_COUNT = 2**53

# \w lacks marks, without which words of many scripts are split at their vowels.
MARKS = "".join(char for char in map(chr, range(0x300, 0x1F000)) if unicodedata.category(char).startswith("M"))
FLAG = "[\U0001f1e6-\U0001f1ff]{2}"
PICTOGRAPH = "[\u2190-\u21ff\u2300-\u23ff\u25a0-\u27bf\u2b00-\u2bff\U0001f000-\U0001f3fa\U0001f400-\U0001faff]"
WORD = re.compile(rf"\w[\w{MARKS}]*(?:'\w[\w{MARKS}]*)*|{FLAG}|{PICTOGRAPH}")
EMOJI = "[\u2600-\u27bf\u2b1b\u2b1c\u2b50\U0001f300-\U0001f3fa\U0001f400-\U0001f6ff\U0001f90c-\U0001faff]"
"""The pictographs that have a name to draw: no arrows, keys or regional letters."""
STYLED_EMOJI = re.compile(f"({EMOJI})[\ufe0e\ufe0f\u200d\U0001f3fb-\U0001f3ff]*")
PRINT = {"black", "heavy", "medium", "white"}
"""What the names of older emoji say of their print: ❤ is a "heavy black heart"."""

CLOSE = 0.8  # the share of letters that a misspelt word has in common with the right one, see difflib
SHORTEST_MISSPELT = 5  # letters; of shorter words too many are close
LIKELY = 10 * FEWEST
"""Occurrences of a word that a misspelt one may mean: rarer words are often misspelt themselves."""
SPELLINGS = str.maketrans({"_": " ", "\u2019": "'", "\ufe0e": None, "\ufe0f": None})
"""Characters to unify; the last two select a drawing style of an emoji."""


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
"""English words that name nothing to draw."""
ADDRESS_OR_TAG = re.compile(r"\w+://\S+|\bwww\.\S+|</?[a-zA-Z][^<>]*>|<!--.*?-->", re.DOTALL)
"""Parts of a prompt that name nothing to draw either: web addresses and HTML."""

MOST_NAMED = 6
LONGEST_NAMED = 30  # characters


@dataclass(frozen=True)
class Vocabulary:
    """The words of training captions."""

    words: dict[str, int]  # word -> occurrences, the most frequent first
    captions: int  # number of captions counted

    @classmethod
    def count(cls, captions: Iterable[str], before: Self | None = None) -> Self:
        """The words with FEWEST or more occurrences in the first MOST_CAPTIONS captions, at most MOST_WORDS of them.
        The counts of `before`, the vocabulary that the model had already learnt, are added."""
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
        """Read a vocabulary.json; ValueError for anything else, and beyond the limits above."""
        content = read_format(path, FORMAT, LARGEST_BYTES)
        words, captions = content.get("words"), content.get("captions")
        if not is_whole(captions, LARGEST_COUNT):
            raise UserError(f"{path}: captions must be a whole number of at least 0")
        if not isinstance(words, dict) or len(words) > MOST_WORDS:
            raise UserError(f"{path}: words must be an object of at most {MOST_WORDS} words")
        for word, number in words.items():
            if not 1 <= len(word) <= LONGEST_WORD or not word.isprintable() or not is_whole(number, LARGEST_COUNT):
                shown = word[:LONGEST_NAMED]
                said = f"must have 1 to {LONGEST_WORD} printable characters and a whole number"
                raise UserError(f"{path}: {shown!r} {said}")
        return cls(words, captions)

    def save(self, path: str | Path) -> None:
        """Write a vocabulary.json, atomically."""
        write_json(path, {"format": FORMAT, "captions": self.captions, "words": self.words})

    def unknown(self, prompt: str) -> list[str]:
        """The words of a prompt that the model has not learnt, in order, each once; never function words.

        "whales" is known if "whale" is, and vice versa.
        """
        return [word for word in content_words(prompt) if not self.knows(word)]

    def knows(self, word: str) -> bool:
        """Whether the model has learnt a word or another form of it."""
        return any(form in self.words for form in forms(word))

    def similar(self, word: str) -> str | None:
        """The learnt word that a misspelt one may mean, "elephant" for "elefant"; None if none is close."""
        word = word.removesuffix("'s")
        if len(word) < SHORTEST_MISSPELT:
            return None
        learnt = [
            other
            for other, number in self.words.items()
            if other[0] == word[0] and number >= LIKELY and abs(len(other) - len(word)) <= 1
        ]
        return next(iter(get_close_matches(word, learnt, n=1, cutoff=CLOSE)), None)

    def suggestions(self, prompt: str) -> dict[str, str]:
        """For the first MOST_NAMED unknown words of a prompt the learnt ones that they may mean if they are misspelt;
        none if all of three words or more are unknown, as in another language."""
        unknown = self.unknown(prompt)
        if 2 < len(unknown) == len(content_words(prompt)):
            return {}
        return {word: meant for word in unknown[:MOST_NAMED] if (meant := self.similar(word)) is not None}

    def spelled_out(self, prompt: str) -> str:
        """A prompt with the learnt words of their Unicode names in place of emoji that are not learnt: "🐳" is a
        "spouting whale", "🍕" is "pizza" if "slice" is not learnt. Emoji whose last word is not learnt stay."""

        def name(match: re.Match[str]) -> str:
            if match[1] in self.words:
                return match[0]
            words = unicodedata.name(match[1], "").lower().split()
            if ord(match[1]) <= 0xFFFF and words[-1] not in ("circle", "square"):
                words = [word for word in words if word not in PRINT]
            known = [word for word in words if all(map(self.knows, words_of(word)))]
            while known and known[0] in FUNCTION_WORDS:
                known.pop(0)
            return f" {' '.join(known)} " if known and known[-1] == words[-1] else match[0]

        return STYLED_EMOJI.sub(name, prompt)


def content_words(prompt: str) -> list[str]:
    """The words of a prompt that name what to draw: all but function words, addresses and tags, in order, each once."""
    words = words_of(ADDRESS_OR_TAG.sub(" ", prompt[:LONGEST_TEXT]))
    return [word for word in dict.fromkeys(words) if word.removesuffix("'s") not in FUNCTION_WORDS]


def forms(word: str) -> list[str]:
    """An English word, its plural, and the words of which it may be the plural or possessive; not all of them exist."""
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
    """The first few words, long ones cut, and the number of the others: short parts for `enumerated`."""
    before, after = quotes
    cut = (word if len(word) <= LONGEST_NAMED else word[:LONGEST_NAMED] + "…" for word in words[:MOST_NAMED])
    more = len(words) - MOST_NAMED
    return [f"{before}{word}{after}" for word in cut] + ([f"{more} more word{'s' * (more > 1)}"] if more > 0 else [])


def did_you_mean(suggestions: dict[str, str], unknown: Sequence[str], quotes: tuple[str, str] = ("", "")) -> str:
    """ "did you mean elephant?", or if several words are unknown, "did you mean elephant for elefant?"; or nothing."""
    if not suggestions:
        return ""
    before, after = quotes
    several = len(unknown) > 1
    parts = [f"{before}{meant}{after}" + f" for {before}{word}{after}" * several for word, meant in suggestions.items()]
    return f"did you mean {enumerated(parts)}?"


def enumerated(parts: Sequence[str], joint: str = "and") -> str:
    """ "x", "x and y" or "x, y and z"."""
    *first, last = parts
    return f"{', '.join(first)} {joint} {last}" if first else last
