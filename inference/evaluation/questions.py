"""Prompts, and what their pictures must show, from a folder that `make data` writes."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from inference.evaluation.captions import Line, drawing_path, read_lines, sample
from inference.evaluation.pixels import COLOURS, colour_centre, ground_colour, thing_colour, thing_count, thing_size

SIDES = ("left of", "right of")
PAINTED_COUNT = "painted-count"  # the kind of the pictures of several things in one colour
PAINTED_PAIR = "painted-pair"  # of two things, each in a colour of its own


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt, and what its picture must show."""

    prompt: str
    things: tuple[str, ...]  # names of the things in the picture
    drawing: Path  # the real drawing of this prompt


@dataclass(frozen=True, kw_only=True)
class AttributeQuestion(Question):
    """A prompt about an attribute that can be judged by pixels only."""

    attribute: str  # one of ATTRIBUTES
    expected: str

    def is_right(self, picture: Image.Image) -> bool:
        return ATTRIBUTES[self.attribute].predict(picture, self.things) == self.expected


@dataclass(frozen=True)
class Attribute:
    """An attribute, which answer a line of a listing expects, and how to read the answer off a picture."""

    title: str
    label: Callable[[Mapping[str, Any]], str | None]
    """A line -> the expected answer; None if the line is no question about it."""
    predict: Callable[[Image.Image, Sequence[str]], str | None]
    """A picture and the things in it -> its answer; None if it gives none."""


def held_out(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    """Expects the ground or paint of a line's thing if training never saw the thing with it."""
    return lambda line: line[name] if line["held_out"] == name else None


def label_paint(line: Mapping[str, Any]) -> str | None:
    """The colour of a thing that stands alone and that training never saw painted in it."""
    return None if line["kind"] == PAINTED_COUNT else held_out("paint")(line)


def label_count(line: Mapping[str, Any]) -> str | None:
    """The number and the colour of things that training never saw painted in it: "3 blue"."""
    return f"{line['count']} {line['paint']}" if line["kind"] == PAINTED_COUNT and line["held_out"] == "paint" else None


def predict_count(picture: Image.Image, _things: Sequence[str]) -> str:
    """The number of the things and the colour of all of them."""
    return f"{thing_count(picture)} {thing_colour(picture)}"


def label_size(line: Mapping[str, Any]) -> str | None:
    """The size that the caption names, of a thing on a ground on which training never saw it."""
    return line["size"] if line["held_out"] == "ground" and line["size"] in line["text"].split() else None


def label_side(line: Mapping[str, Any]) -> str | None:
    """The side of the first of two things of different named colours that training never saw together.

    Captions that tell no side, as "a red circle and a blue heart", mean the order of reading.
    """
    if line["held_out"] != "thing pair" or line["place"] not in SIDES:
        return None
    colours = thing_colours(line["things"])
    distinct = len(colours) == 2 and len({*colours, line["ground"]}) == 3
    return line["place"] if distinct and {*colours} <= {*COLOURS} else None


def predict_side(picture: Image.Image, things: Sequence[str]) -> str | None:
    """The side of the second thing on which the first one is, by the places of their colours."""
    first, second = (colour_centre(picture, colour) for colour in thing_colours(things))
    if first is None or second is None:
        return None
    return SIDES[0] if first[0] < second[0] else SIDES[1]


def label_binding(line: Mapping[str, Any]) -> str | None:
    """The colours, from left to right, of two things that training never saw together: "red, blue"."""
    if line["held_out"] != "thing pair" or line["kind"] != PAINTED_PAIR or line["place"] not in SIDES:
        return None
    return ", ".join(map(str, line["paints"] if line["place"] == SIDES[0] else line["paints"][::-1]))


def predict_binding(picture: Image.Image, _things: Sequence[str]) -> str:
    """The colours of what stands in the left and in the right half."""
    halves = ((0, 0, picture.width // 2, picture.height), (picture.width // 2, 0, picture.width, picture.height))
    return ", ".join(str(thing_colour(picture.crop(half))) for half in halves)


def thing_colours(things: Sequence[str]) -> list[str]:
    """["red circle", "blue square"] -> ["red", "blue"]."""
    return [thing.split()[0] for thing in things]


ATTRIBUTES = {
    "ground": Attribute("colour of the ground", held_out("ground"), lambda picture, _things: ground_colour(picture)),
    "paint": Attribute("colour of the thing", label_paint, lambda picture, _things: thing_colour(picture)),
    "size": Attribute("size of the thing", label_size, lambda picture, _things: thing_size(picture)),
    "side": Attribute("sides of two things", label_side, predict_side),
    "binding": Attribute("colours of two things", label_binding, predict_binding),
    "count": Attribute("number and colour of two to four things", label_count, predict_count),
}


def question_of(folder: Path, line: Line) -> Question:
    """The question of a line, with facts, of the folder's listing."""
    return Question(prompt=line["text"], things=tuple(line["things"]), drawing=drawing_path(folder, line))


def choose_questions(heldout: Path, of_each: int, seed: int = 0) -> dict[str, list[AttributeQuestion]]:
    """At most `of_each` questions, with different prompts, for each attribute in the data."""
    found: dict[str, dict[str, AttributeQuestion]] = defaultdict(dict)
    for line in read_lines(heldout):
        for name, attribute in ATTRIBUTES.items():
            expected = attribute.label(line) if "kind" in line else None
            if expected is not None:
                question = AttributeQuestion(**vars(question_of(heldout, line)), attribute=name, expected=expected)
                found[name].setdefault(question.prompt, question)
    return {name: sample(list(found[name].values()), of_each, f"{seed}/{name}") for name in ATTRIBUTES if found[name]}


def num_subjects(questions: Sequence[Question]) -> int:
    """Number of different things, or pairs of things, that the questions are about."""
    return len({frozenset(question.things) for question in questions})
