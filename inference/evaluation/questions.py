"""Prompts that training never saw, each with what its picture must show, from a folder that `make data` writes."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from inference.evaluation.captions import drawing_path, open_drawing, read_lines, sample
from inference.evaluation.pixels import COLOURS, colour_centre, ground_colour, thing_colour, thing_size

SIDES = ("left of", "right of")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt, and what can be told of its picture by pixels alone."""

    attribute: str
    """One of ATTRIBUTES."""
    prompt: str
    expected: str
    colours: tuple[str, ...] = ()
    """Of the first and the second thing, where they are asked for their sides."""
    things: tuple[str, ...]
    """The names of what is to be seen."""
    drawing: Path
    """The real drawing of which the prompt is true."""

    def is_right(self, picture: Image.Image) -> bool:
        """Whether a picture shows what is expected."""
        return ATTRIBUTES[self.attribute].answer(self, picture) == self.expected


@dataclass(frozen=True)
class Attribute:
    """What is asked, of which lines of a listing, and how the answer is read off a picture."""

    title: str
    ask: Callable[[Mapping[str, Any]], tuple[str, tuple[str, ...]] | None]
    """A line -> (expected, colours), or None where its caption does not say."""
    answer: Callable[[Question, Image.Image], str | None]


def ask_ground(line: Mapping[str, Any]) -> tuple[str, tuple[str, ...]] | None:
    """Things on grounds with which training never saw them."""
    return (line["ground"], ()) if line["held_out"] == "ground" else None


def ask_paint(line: Mapping[str, Any]) -> tuple[str, tuple[str, ...]] | None:
    """Things in colours in which training never saw them."""
    return (line["paint"], ()) if line["held_out"] == "paint" else None


def ask_size(line: Mapping[str, Any]) -> tuple[str, tuple[str, ...]] | None:
    """Sizes that are told, of things on grounds never seen together."""
    told = line["held_out"] == "ground" and line["size"] is not None and line["size"] in line["text"].split()
    return (line["size"], ()) if told else None


def ask_side(line: Mapping[str, Any]) -> tuple[str, tuple[str, ...]] | None:
    """Two things of different named colours, never seen together, whose sides are told."""
    if line["held_out"] != "thing pair" or not any(f" {side} " in line["text"] for side in SIDES):
        return None
    if len(line["things"]) != 2:
        return None
    first, second = (thing.split()[0] for thing in line["things"])
    known = first in COLOURS and second in COLOURS and len({first, second, line["ground"]}) == 3
    return (line["place"], (first, second)) if known else None


def answer_side(question: Question, picture: Image.Image) -> str | None:
    """On which side of the second thing the first one is, by the places of their colours."""
    first, second = (colour_centre(picture, colour) for colour in question.colours)
    if first is None or second is None:
        return None
    return SIDES[0] if first[0] < second[0] else SIDES[1]


ATTRIBUTES = {
    "ground": Attribute("colour of the ground", ask_ground, lambda _question, picture: ground_colour(picture)),
    "paint": Attribute("colour of the thing", ask_paint, lambda _question, picture: thing_colour(picture)),
    "size": Attribute("size of the thing", ask_size, lambda _question, picture: thing_size(picture)),
    "side": Attribute("sides of two things", ask_side, answer_side),
}


def choose_questions(heldout: Path, of_each: int, seed: int = 0) -> dict[str, list[Question]]:
    """At most so many questions of each attribute that the data knows, with different prompts."""
    found: dict[str, dict[str, Question]] = defaultdict(dict)
    for line in read_lines(heldout):
        for name, attribute in ATTRIBUTES.items():
            asked = attribute.ask(line) if "kind" in line else None
            if asked is not None:
                expected, colours = asked
                question = Question(
                    attribute=name,
                    prompt=line["text"],
                    expected=expected,
                    colours=colours,
                    things=tuple(line["things"]),
                    drawing=drawing_path(heldout, line),
                )
                found[name].setdefault(question.prompt, question)
    return {name: sample(list(found[name].values()), of_each, f"{seed}/{name}") for name in ATTRIBUTES if found[name]}


def right(questions: Iterable[Question], pictures: Iterable[Image.Image]) -> int:
    """How many pictures show what their question expects."""
    return sum(question.is_right(picture) for question, picture in zip(questions, pictures, strict=True))


def right_on_drawings(questions: Sequence[Question]) -> int:
    """The same of the real drawings: what the judge itself can do."""
    return right(questions, (open_drawing(question.drawing) for question in questions))


def commonest(questions: Sequence[Question]) -> int:
    """How many are answered right by saying the same each time: what it is worth to look at no prompt."""
    return max(Counter(question.expected for question in questions).values())


def subjects(questions: Sequence[Question]) -> int:
    """How many different things, or pairs of them, are asked for."""
    return len({frozenset(question.things) for question in questions})
