"""Captions as people type them, with words that the picture does not show.

"Please draw my happy robot at the seaside!" should still draw the robot. Nearly all such words are made up, a new one
each time: so the model learns to pass over what it does not know, and none of them counts as learnt (see
dalle_lean.vocabulary).
"""

import re
from collections.abc import Sequence
from random import Random

from preprocessing.emoji.captions import RELATIONS, noun_phrase
from preprocessing.emoji.names import with_article

# fmt: off
ONSETS = ("b", "bl", "br", "c", "ch", "cl", "d", "f", "fl", "g", "gl", "h", "k", "l", "m", "n", "p", "r", "s", "sn",
          "t", "v", "w", "z")
VOWELS = ("a", "e", "i", "o", "u", "ee", "oo", "ai", "ou")
CODAS = ("", "", "b", "ck", "d", "g", "l", "m", "n", "nt", "p", "r", "sh", "st", "t", "x")
SUFFIXES = ("", "", "y", "er", "ed", "ing", "ish", "ful", "al", "ous", "ly")

OPENINGS = ("draw", "draw me", "please draw", "show me", "i want", "i would like", "make", "can you paint", "there is")
DETERMINERS = ("the", "the", "the", "my", "your", "this", "that", "our")
MOODS = ("sad", "smiling", "grinning", "crying", "angry")
"""Known words: they belong to faces."""
SURROUNDINGS = ("beach", "bed", "city", "desert", "field", "garden", "house", "island", "kitchen", "moon", "mountain",
                "night")
"""Known words too: they belong to the names of things."""
AROUND = ("on the {}", "in the {}", "at the {}", "to the {}", "in a {}")
PHRASES = (*AROUND, "on {}", "from {}", "with a {}", "for {}")
# fmt: on

RELATION = re.compile(f" (?=(?:{'|'.join(w for ws in RELATIONS.values() for w in ws if w not in ('and', 'with'))}) )")
HEAD = re.compile(r"(an?|the|two|three|four|\d) ")


def made_up_word(random: Random, suffixes: Sequence[str] = SUFFIXES) -> str:
    """A word that sounds English, such as "snoobish"; there are millions, so hardly any comes twice."""
    syllables = random.choice((1, 2, 2, 2)) if len(suffixes) > 1 else 2  # of the shortest there are too few
    endings = suffixes if syllables == 2 else [suffix for suffix in suffixes if suffix]
    return "".join(map(random.choice, (ONSETS, VOWELS, CODAS) * syllables)) + random.choice(endings)


def as_typed(caption: str, names: Sequence[str], random: Random) -> str:
    """`caption` with an adjective, another article, a verb, a request before it, a phrase or a mark behind it.

    Verbs are made up: "a cat glumping on a chair", and "a cat glumping a hat" with one of `names`.
    """
    first, *others = caption.split(" and ")
    others = [dressed(phrase, random) if HEAD.match(phrase) else phrase for phrase in others]
    typed = " and ".join((dressed(first, random), *others))
    if random.random() < 0.25:
        verb = f" {made_up_word(random, suffixes=('ing',))}"
        if RELATION.search(typed):
            typed = RELATION.sub(f"{verb} ", typed, count=1)
        elif not others and "," not in typed:
            typed += f"{verb} {noun_phrase(random.choice(names))}"
    if random.random() < 0.25:
        opening = random.choice((*OPENINGS, f"a {made_up_word(random)} of"))
        typed = f"{opening} {typed}"
    if random.random() < 0.3:
        known = random.random() < 0.4
        phrases, word = (AROUND, random.choice(SURROUNDINGS)) if known else (PHRASES, made_up_word(random))
        typed += " " + random.choice(phrases).format(word)
    return typed + random.choice(("", "", "", "", ".", "!"))


def dressed(phrase: str, random: Random) -> str:
    """A noun phrase with another determiner or an adjective: "a cat" becomes "the cat" or "a glumpy cat"."""
    match = HEAD.match(phrase)
    head, noun = (match[1], phrase[match.end() :]) if match else ("", phrase)
    if random.random() < 0.6:
        adjective = random.choice(MOODS) if random.random() < 0.2 and "face" not in noun else made_up_word(random)
        noun = f"{adjective} {noun}"
    if head.startswith("a") or not head:
        head = random.choice(DETERMINERS) if random.random() < 0.4 else head
    return with_article(noun) if head.startswith("a") else f"{head} {noun}".strip()
