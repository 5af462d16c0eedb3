"""Questions are of what training never saw, and only of what a caption says."""

import pytest
from PIL import Image

from inference.evaluation.attribute_accuracy import AttributeAccuracy, accuracy_on_drawings
from inference.evaluation.questions import choose_questions, num_subjects
from tests.inference.evaluation.drawings import discs, write_data


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    return choose_questions(write_data(tmp_path_factory.mktemp("data") / "emoji") / "heldout", of_each=10)


def test_each_attribute_is_asked_where_the_caption_tells_it(asked):
    assert {name: {q.prompt: q.expected for q in questions} for name, questions in asked.items()} == {
        "ground": {
            "a ball on a green ground": "green",
            "a big ball on a blue ground": "blue",
            "a ball on a red ground": "red",
            "a small ball on a red ground": "red",
        },
        "paint": {"a yellow ball on a white ground": "yellow"},
        "size": {"a big ball on a blue ground": "big", "a small ball on a red ground": "small"},
        "side": {
            "a red circle left of a blue circle": "left of",
            "a green circle to the right of a red circle": "right of",
            "a red circle and a green circle": "left of",
        },
        "binding": {"a green ball to the right of a red cube": "red, green"},
        "count": {"two green balls": "2 green"},
    }


def test_the_commonest_answer_and_the_different_subjects_are_counted(asked):
    assert {
        name: (AttributeAccuracy(questions, []).commonest_answer.hits, num_subjects(questions))
        for name, questions in asked.items()
    } == {"ground": (2, 1), "paint": (1, 1), "size": (1, 1), "side": (2, 2), "binding": (1, 1), "count": (1, 1)}


def test_the_real_drawings_are_right(asked):
    for questions in asked.values():
        assert accuracy_on_drawings(questions).value == 1


def test_a_wrong_picture_is_wrong(asked):
    swapped = discs("white", ("blue", 0.25, 0.4), ("red", 0.75, 0.4))
    red_left = next(question for question in asked["side"] if question.expected == "left of")
    assert not red_left.is_right(swapped)
    assert not any(question.is_right(discs("blue", ("red", 0.5, 0.55))) for question in asked["size"])
    assert not any(question.is_right(Image.new("RGB", (64, 64), "white")) for question in asked["paint"])
    swapped = discs("white", ("green", 0.25, 0.35), ("red", 0.75, 0.35))
    assert not any(question.is_right(swapped) for question in asked["binding"])
    for wrong in (("green", 0.5, 0.35),), (("red", 0.25, 0.35), ("red", 0.75, 0.35)):
        assert not any(question.is_right(discs("white", *wrong)) for question in asked["count"])


def test_no_more_questions_are_chosen_than_asked_for_and_always_the_same(asked, tmp_path):
    heldout = write_data(tmp_path / "emoji") / "heldout"
    few = choose_questions(heldout, of_each=2)
    numbers = {name: len(questions) for name, questions in few.items()}
    assert numbers == {"ground": 2, "paint": 1, "size": 2, "side": 2, "binding": 1, "count": 1}
    assert choose_questions(heldout, of_each=2) == few


def test_data_without_facts_has_no_questions(tmp_path):
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a cat"}\n')
    assert choose_questions(tmp_path, of_each=5) == {}
