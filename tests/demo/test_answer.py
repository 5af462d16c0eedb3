"""What the page says, without the page."""

import pytest

from demo.answer import answer, facts, failure
from inference.generator import Generator, Settings

SETTINGS = Settings(num_images=6, best=2, seed=1)


def test_the_last_view_shows_the_best_with_their_scores(generator):
    *_, last = answer(generator, "a red heart", SETTINGS)
    expected = generator("a red heart", num_images=6, best=2, seed=1)
    assert [caption for _, caption in last.pictures] == [
        f"score {picture.score:.3f} · no. {picture.index}" for picture in expected
    ]
    assert "2 pictures, best first" in last.status


def test_small_pictures_are_enlarged_for_viewing(generator):
    *_, last = answer(generator, "a red heart", SETTINGS)
    assert {image.size for image, _ in last.pictures} == {(384, 384)}


def test_an_empty_prompt_is_answered_with_a_sentence(generator):
    (only,) = answer(generator, "  ", SETTINGS)
    assert "The prompt is empty; say in a few words what to draw." in only.status
    assert "mistake" in only.status
    assert only.pictures == []


def test_an_over_long_prompt_is_drawn_and_the_cut_is_said(generator):
    prompt = "a red heart on a white ground beside a green book and two black cats in a house"
    *_, last = answer(generator, prompt, SETTINGS)
    assert f"its last {generator.excess_tokens(prompt)} were left out" in last.status
    assert len(last.pictures) == 2


def test_slow_drawing_shows_the_share_done(generator, monkeypatch):
    monkeypatch.setattr("demo.answer.SHORTEST_INTERVAL_S", -1.0)
    shares = [view.status for view in answer(generator, "a car", SETTINGS) if "Drawing" in view.status]
    assert "Drawing: 25%" in shares[0]
    assert "Drawing: 100%" in shares[-1]


def test_a_failure_while_drawing_is_answered_with_a_sentence(generator, caplog):
    class OutOfMemory(type(generator.vqgan)):
        def decode(self, codes):
            raise RuntimeError("out of memory\nand a page of details")

    vqgan = OutOfMemory(generator.vqgan.config)
    broken = Generator(generator.model, generator.tokenizer, vqgan, generator.scorer)
    *_, last = answer(broken, "a car", SETTINGS)
    assert "Drawing failed: out of memory." in last.status
    assert "details" not in last.status
    assert "details" in caplog.text


def test_what_a_sentence_quotes_cannot_become_markup():
    assert "<b>" not in failure("no <b>bold</b> move").status


def test_a_cancelled_answer_ends(generator):
    views = answer(generator, "a car", SETTINGS)
    next(views)
    views.close()
    with pytest.raises(StopIteration):
        next(views)


def test_the_foot_tells_size_and_grid(generator):
    parameters = sum(parameter.numel() for parameter in generator.model.parameters())
    assert f"{parameters:,} parameters" in facts(generator)
    assert "32 × 32 pixels" in facts(generator)
    assert "16 codes" in facts(generator)
