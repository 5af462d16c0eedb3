"""A tiny model folder, with and without CLIP, and its generator."""

import pytest

from dalle_lean.io.model_folder import pack_model
from dalle_lean.vocabulary import LIKELY, Vocabulary
from inference import Generator
from tests.inference.tiny_model import CAPTIONS, save_tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model_folder_with_vocabulary(model_folder, tmp_path_factory):
    """The model that says which words it has learnt."""
    folder = tmp_path_factory.mktemp("knowing")
    Vocabulary.count(CAPTIONS * LIKELY).save(folder / "words.json")
    pack_model(model_folder, folder / "model", vocabulary=folder / "words.json")
    return folder / "model"


@pytest.fixture(scope="session")
def model_folder_without_clip(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny_without_clip"), with_clip=False)


@pytest.fixture(scope="session")
def generator(model_folder):
    return Generator.from_folder(model_folder, device="cpu", precision="fp32")


@pytest.fixture(scope="session")
def generator_without_clip(model_folder_without_clip):
    return Generator.from_folder(model_folder_without_clip, device="cpu", precision="fp32")
