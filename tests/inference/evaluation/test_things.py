"""A classifier that learnt from other drawings tells which thing a picture shows."""

import json

import pytest
import torch
from PIL import Image

from dalle_lean.cli import main
from dalle_lean.thing_classifier import ThingClassifier
from inference.evaluation.asking import Answer, Attributes
from inference.evaluation.questions import Question
from inference.evaluation.shares import Share
from inference.evaluation.things import competing, first_of, recognise
from tests.inference.evaluation.drawings import discs, write_data

COLOURS = {"strawberry": "red", "frog": "green", "whale": "blue"}


class ByColour(ThingClassifier):
    """Knows a strawberry, a frog and a whale by their colours."""

    def __init__(self):
        super().__init__([*COLOURS, "owl"], 32)

    def scores_of_pixels(self, pixels, batch_size=64):
        middle = pixels[:, :, 12:20, 12:20].float().mean(dim=(2, 3))
        return torch.cat([middle, torch.zeros(len(pixels), 1)], dim=1)


def question(thing, folder, *others):
    colour = COLOURS.get(thing, "yellow")
    drawing = folder / f"{thing}.png"
    discs("white", (colour, 0.5, 0.5)).save(drawing)
    return Question(attribute="ground", prompt=f"a {thing}", expected="white", things=(thing, *others), drawing=drawing)


def drawn(colour):
    picture = discs("white", (colour, 0.3, 0.4))
    return Answer({1: picture}, (picture,), (picture,))


def attribute(questions, answers):
    return Attributes(questions, answers, {}, Share(0, 1), Share(0, 1))


def test_the_right_thing_is_counted_of_pictures_and_of_real_drawings(tmp_path):
    questions = [question(thing, tmp_path) for thing in ("strawberry", "frog", "whale")]
    found = recognise(ByColour(), [attribute(questions, [drawn("red"), drawn("red"), drawn("blue")])], [1])
    assert found.by_best_of == {1: Share(2, 3)}
    assert found.on_drawings == Share(3, 3)
    assert (found.compete, found.left_out) == (4, 0)


def test_a_prompt_counts_once_and_pairs_and_unknown_things_do_not(tmp_path):
    one, unknown, pair = (
        question("frog", tmp_path),
        question("dragon", tmp_path),
        question("whale", tmp_path, "owl"),
    )
    asked = attribute([one, unknown, pair], [drawn("green")] * 3)
    found = recognise(ByColour(), [asked, attribute([one], [drawn("red")])], [1])
    assert found.by_best_of == {1: Share(1, 1)}
    assert found.left_out == 1


def test_a_classifier_of_none_of_the_things_is_refused(tmp_path):
    asked = attribute([question("dragon", tmp_path)], [drawn("red")])
    with pytest.raises(ValueError, match="knows none of the things that 1 prompts are about"):
        recognise(ByColour(), [asked], [1])


def test_200_things_compete_and_the_seed_chooses_the_others():
    things = [str(number) for number in range(500)]
    chosen = competing(["7", "7", "3"], things, seed=0)
    assert len(chosen) == len({*chosen}) == 200
    assert {"3", "7"} <= {*chosen} <= {*things}
    assert chosen == competing(["3", "7"], things, seed=0) != competing(["3", "7"], things, seed=1)
    assert sorted(competing(things[:300], things, seed=0)) == sorted(things[:300])


def test_only_things_that_compete_can_come_first():
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.1, 0.9, 0.5]])
    assert first_of(scores, torch.tensor([2, 0]), torch.tensor([2, 0])).tolist() == [True, False]


def test_the_command_tells_what_the_classifier_sees(model_folder, tmp_path, capsys):
    data = write_data(tmp_path / "emoji")
    torch.manual_seed(0)
    ThingClassifier(["ball", "cube"], 32).save(tmp_path / "classifier")
    few = "--questions 2 --captions 4 --pictures 8 --best-of 1 --curve-questions 0 --grid 0 --nearest-among 0"
    arguments = [str(model_folder), "--data", str(data), "--out", str(tmp_path / "report"), *few.split()]
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *arguments, "--classifier", str(tmp_path / "classifier")])
    assert ended.value.code == 0
    found = json.loads((tmp_path / "report" / "report.json").read_text())["right_thing_first"]
    assert found["best_of"]["1"]["of"] == found["on_drawings"]["of"] == 4
    assert (found["among"], found["left_out"]) == (2, 0)
    assert "right thing first of 2, best of 1: " in capsys.readouterr().out
    Image.open(tmp_path / "report" / "pictures.png").verify()
