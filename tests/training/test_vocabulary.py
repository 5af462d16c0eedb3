"""The words of the captions travel with the run and its model."""

import pytest

from dalle_lean import load_model, save_model, vocabulary
from dalle_lean.io.files import sha256_file
from dalle_lean.io.model_folder import check_parts
from dalle_lean.vocabulary import Vocabulary
from tests.training.conftest import COLOURS, THINGS
from tests.training.runs import Killed, at_step, kill
from training.run.folder import place_vocabulary
from training.run.recipe import load_recipe
from training.trainer import DalleRun, train


@pytest.fixture(scope="module")
def finished(shards, tmp_path_factory):
    """The folder of a whole run of a few steps."""
    out = tmp_path_factory.mktemp("finished")
    train(shards, out, load_recipe("tiny").override(steps=3))
    return out


def test_the_model_folder_has_the_words_of_the_captions_that_were_trained_on(shards, finished):
    learnt = Vocabulary.load(finished / "model" / "vocabulary.json")
    assert set(learnt.words) == {"a", *COLOURS, *THINGS}
    rows = learnt.captions
    assert 90 < rows < 120  # the held-out ones do not count
    assert learnt.words["a"] == rows
    assert sum(learnt.words[colour] for colour in COLOURS) == rows
    named = check_parts(finished / "model")["parts"]["vocabulary.json"]
    assert named == sha256_file(finished / "vocabulary.json")


def test_a_run_that_is_killed_keeps_its_vocabulary_and_reads_no_captions_for_it_again(
    shards, recipe, tmp_path, monkeypatch
):
    with pytest.raises(Killed):
        train(shards, tmp_path, recipe, on_progress=at_step(4, kill))
    before = (tmp_path / "vocabulary.json").read_bytes()

    def unread(data, order=None):
        yield pytest.fail("read again")

    monkeypatch.setattr("training.data.loader.TrainingData.captions", unread)
    train(shards, tmp_path, recipe)
    assert (tmp_path / "model" / "vocabulary.json").read_bytes() == before


def test_a_run_of_an_earlier_program_gets_its_vocabulary_when_it_goes_on(shards, recipe, finished, tmp_path):
    with pytest.raises(Killed):
        train(shards, tmp_path, recipe, on_progress=at_step(4, kill))
    (tmp_path / "vocabulary.json").unlink()
    train(shards, tmp_path, recipe)
    assert sha256_file(tmp_path / "model/vocabulary.json") == sha256_file(finished / "vocabulary.json")


def test_of_large_data_only_so_many_captions_are_read(shards, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "MOST_CAPTIONS", 20)
    DalleRun(shards, tmp_path, recipe)
    assert Vocabulary.load(tmp_path / "vocabulary.json").captions == 20


def test_a_run_that_starts_from_a_model_has_learnt_that_models_words_too(shards, recipe, finished, tmp_path):
    DalleRun(shards, tmp_path, recipe, init=finished / "model")
    before, both = (Vocabulary.load(folder / "vocabulary.json") for folder in (finished, tmp_path))
    assert both.words == {word: 2 * number for word, number in before.words.items()}


def test_where_the_first_model_does_not_tell_its_words_the_run_does_not_either(shards, recipe, tmp_path):
    train(shards, tmp_path / "first", recipe.override(steps=1))
    old = tmp_path / "first" / "model"
    without_vocabulary(old)
    train(shards, tmp_path / "second", recipe.override(steps=1), init=old)
    assert set(check_parts(tmp_path / "second" / "model")["parts"]) == {"model.safetensors", "tokenizer.json"}


def without_vocabulary(folder):
    """The model folder as earlier programs wrote it."""
    save_model(load_model(folder), folder, tokenizer=folder / "tokenizer.json")


def test_before_the_first_checkpoint_the_words_are_those_of_this_start(tmp_path):
    place_vocabulary(tmp_path, None, ["a zeppelin"] * 5)
    place_vocabulary(tmp_path, None, ["a heart"] * 5)
    assert list(Vocabulary.load(tmp_path / "vocabulary.json").words) == ["a", "heart"]
    (tmp_path / "init").mkdir()
    place_vocabulary(tmp_path, tmp_path / "init", ["a heart"] * 5)
    assert not (tmp_path / "vocabulary.json").exists()
