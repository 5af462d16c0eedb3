"""A classifier that learnt from other drawings tells which thing a picture shows."""

import json
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from dalle_lean.cli import main
from dalle_lean.images.thing_classifier import ThingClassifier
from inference.evaluation.attribute_accuracy import AttributeAccuracy
from inference.evaluation.classification import (
    HELD_OUT_PAIRS,
    choose_thing_questions,
    distractors,
    judge_things,
    ranks_first,
    single_thing_samples,
)
from inference.evaluation.eval_data import EvalConfig
from inference.evaluation.evaluate import evaluate
from inference.evaluation.prompt_sampling import Samples
from inference.evaluation.questions import AttributeQuestion
from inference.evaluation.stats import Proportion
from inference.generator import Generator
from tests.inference.evaluation.drawings import discs, write_data

COLOURS = {"strawberry": "red", "frog": "green", "whale": "blue"}


@pytest.fixture
def generator_that_must_not_draw(model_folder, monkeypatch):
    generator = Generator.from_folder(str(model_folder), "cpu")
    monkeypatch.setattr(generator, "run", lambda *_: pytest.fail("it was drawn"))
    return generator


class ByColour(ThingClassifier):
    """Knows a strawberry, a frog and a whale by their colours."""

    def __init__(self):
        super().__init__([*COLOURS, "owl"], 32)

    def scores_of_pixels(self, pixels):
        middle = pixels[:, :, 12:20, 12:20].float().mean(dim=(2, 3))
        return torch.cat([middle, torch.zeros(len(pixels), 1)], dim=1)


class Keeps:
    """A tokenizer that loses nothing."""

    config = SimpleNamespace(picture_side=64, codebook_size=8)
    quant_conv = SimpleNamespace(weight=torch.zeros(1))

    def encode(self, pixels):
        self.pixels = pixels
        return torch.zeros(len(pixels), 4, dtype=torch.int64)

    def decode(self, codes):
        return self.pixels


def question(thing, folder, *others):
    colour = COLOURS.get(thing, "yellow")
    drawing = folder / f"{thing}.png"
    discs("white", (colour, 0.5, 0.5)).save(drawing)
    facts = {"attribute": "ground", "expected": "white", "drawing": drawing}
    return AttributeQuestion(prompt=f"a {thing}", things=(thing, *others), **facts)


def judged(attributes):
    (found,) = judge_things("colours", ByColour(), Keeps(), HELD_OUT_PAIRS, single_thing_samples(attributes))
    return found


def drawn(colour):
    picture = discs("white", (colour, 0.3, 0.4))
    return Samples({1: picture}, (picture,), (picture,))


def test_the_right_thing_is_counted_of_pictures_and_of_real_drawings(tmp_path):
    questions = [question(thing, tmp_path) for thing in ("strawberry", "frog", "whale")]
    answered = {"ground": AttributeAccuracy(questions, [drawn("red"), drawn("red"), drawn("blue")])}
    found = judged(answered)
    assert found.best_of == {1: Proportion(2, 3)}
    assert found.on_drawings == found.on_reconstructions == Proportion(3, 3)
    assert (found.among, found.different_things, found.left_out) == (4, 3, 0)


def test_a_prompt_counts_once_and_pairs_and_unknown_things_do_not(tmp_path):
    one, unknown, pair = question("frog", tmp_path), question("dragon", tmp_path), question("whale", tmp_path, "owl")
    asked = AttributeAccuracy([one, unknown, pair], [drawn("green")] * 3)
    found = judged({"ground": asked, "size": AttributeAccuracy([one], [drawn("red")])})
    assert found.best_of == {1: Proportion(1, 1)}
    assert found.left_out == 1


def test_a_classifier_of_none_of_the_things_is_refused_before_anything_is_drawn(generator_that_must_not_draw, tmp_path):
    data = write_data(tmp_path / "emoji")
    few = EvalConfig(captions=4, pictures=8)
    with pytest.raises(ValueError, match="no prompt is about one thing that the classifier colours knows"):
        evaluate(generator_that_must_not_draw, data, few, classifiers={"colours": ByColour()})


def test_the_thing_competes_with_200_and_with_all_it_knows(tmp_path):
    classifier = ByColour()
    classifier.things = (*classifier.things, *map(str, range(300)))
    classifier.row_of = {thing: row for row, thing in enumerate(classifier.things)}
    classifier.scores_of_pixels = lambda pixels: torch.arange(304.0).flip(0).expand(len(pixels), -1)
    asked = {"ground": AttributeAccuracy([question("strawberry", tmp_path)], [drawn("red")])}
    found = judge_things("order", classifier, Keeps(), HELD_OUT_PAIRS, single_thing_samples(asked))
    assert [(each.among, each.best_of[1].hits) for each in found] == [(200, 1), (304, 1)]


def test_the_seed_chooses_the_others():
    things = [str(number) for number in range(500)]
    chosen = distractors("7", things, seed=0, count=199)
    assert len(chosen) == len({*chosen}) == 199
    assert "7" not in chosen
    assert chosen == distractors("7", things, seed=0, count=199) != distractors("7", things, seed=1, count=199)
    assert sorted(distractors("7", things, seed=0, count=499)) == sorted({*things} - {"7"})


def test_only_things_that_compete_are_in_the_way():
    classifier, scores = ThingClassifier(["a", "b", "c"], 32), torch.tensor([0.1, 0.9, 0.5])
    assert ranks_first(classifier, scores, "c", ["a"])
    assert not ranks_first(classifier, scores, "c", ["a", "b"])
    assert not ranks_first(classifier, torch.full((3,), torch.nan), "c", ["a"])


def test_things_seen_in_training_and_things_never_seen_are_asked_too(tmp_path):
    asked = choose_thing_questions(write_data(tmp_path / "emoji"), 2, seed=0)
    assert {name: {question.things for question in questions} for name, questions in asked.items()} == {
        "on grounds it was seen on": {("ball",)},
        "asked for with words that training hardly showed": {("ball",)},
        "never seen at all": {("cube",)},
    }
    assert [len(questions) for questions in asked.values()] == [2, 1, 1]
    assert [questions[0].prompt for questions in asked.values()][1:] == ["my happy ball", "a cube"]


def test_the_command_tells_what_the_classifier_sees(model_folder, tmp_path, capsys):
    data = write_data(tmp_path / "emoji")
    torch.manual_seed(0)
    ThingClassifier(["ball", "cube"], 32).save(tmp_path / "judge" / "classifier")
    few = "--questions 2 --captions 4 --pictures 8 --best-of 1 --curve-questions 0 --grid 0 --nearest-among 0"
    arguments = [str(model_folder), "--data", str(data), "--out", str(tmp_path / "report"), *few.split()]
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *arguments, "--classifier", str(tmp_path / "judge" / "classifier")])
    assert ended.value.code == 0
    found, seen, typed, never = json.loads((tmp_path / "report" / "report.json").read_text())["right_thing_first"]
    assert found["best_of"]["1"]["of"] == found["on_drawings"]["of"] == 4
    assert [each["best_of"]["1"]["of"] for each in (seen, typed, never)] == [2, 1, 1]
    assert (found["judge"], found["among"], found["left_out"]) == ("judge", 2, 0)
    assert f"thing {HELD_OUT_PAIRS}: right first of 2, best of 1, says judge: " in capsys.readouterr().out
    Image.open(tmp_path / "report" / "pictures.png").verify()
