"""Every way to name a scorer, and what is said where it is none."""

import json
import re
import sys
import textwrap

import open_clip
import pytest
import torch
from safetensors.torch import save_file

import inference.scorer
from dalle_lean.clip.scorer import IMAGE_MEAN, IMAGE_STD, ClipScorer
from inference.scorer import make_scorer, preprocessing

CPU = torch.device("cpu")
SMALL = "ViT-S-32-alt"  # the smallest of open_clip's
PICTURES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file of weights for SMALL."""
    torch.manual_seed(0)
    model = open_clip.create_model(SMALL)
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_file(model.state_dict(), path)
    return path


@pytest.fixture
def user_module(monkeypatch, tmp_path):
    """A function that makes Python's source a module `my_scorers` that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source):
        (tmp_path / "my_scorers.py").write_text(textwrap.dedent(source))

    yield write
    sys.modules.pop("my_scorers", None)


def test_clip_is_the_model_folders_and_none_where_it_has_none(model_folder):
    scorer = make_scorer("clip", model_folder / "clip", CPU)
    expected = ClipScorer.load(model_folder / "clip").score(PICTURES, "a red heart")
    assert torch.equal(scorer.score(PICTURES, "a red heart"), expected)
    assert scorer.name == "CLIP"
    assert make_scorer("clip", None, CPU) is None


def test_none_is_no_ranking_even_where_there_is_a_clip(model_folder):
    assert make_scorer("none", model_folder / "clip", CPU) is None


def test_an_architecture_and_a_file_is_that_clip(weights):
    scorer = make_scorer(f"{SMALL}:{weights}", None, CPU)
    expected = ClipScorer(SMALL, weights).score(PICTURES, "a cat")
    assert torch.equal(scorer.score(PICTURES, "a cat"), expected)
    assert scorer.name == f"CLIP {SMALL} (small.safetensors)"


def published(monkeypatch, **tags):
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, SMALL, tags)


def test_a_file_is_given_pictures_as_all_published_weights_of_its_architecture_are(weights, monkeypatch):
    plain = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "interpolation": "bilinear"}
    published(monkeypatch, one=plain, two=plain)
    scorer = make_scorer(f"{SMALL}:{weights}", None, CPU)
    assert (scorer.image_mean, scorer.image_std, scorer.interpolation) == tuple(plain.values())
    published(monkeypatch, one=plain, two={**plain, "mean": (0.5, 0.5, 0.5)})
    scorer = make_scorer(f"{SMALL}:{weights}", None, CPU)
    assert (scorer.image_mean, scorer.image_std, scorer.interpolation) == (IMAGE_MEAN, IMAGE_STD, "bicubic")


def test_a_tag_is_fetched_with_its_preprocessing_and_activation(weights, hub_cache, monkeypatch):
    hub_cache("someone/small", "open_clip_model.safetensors", weights)
    colours = {"mean": (0.5, 0.5, 0.5), "std": (0.4, 0.4, 0.4), "interpolation": "bilinear", "quick_gelu": True}
    published(monkeypatch, good_tag={"hf_hub": "someone/small/", **colours})
    scorer = make_scorer(f"{SMALL}:good_tag", None, CPU)
    config = {**open_clip.get_model_config(SMALL), "quick_gelu": True}
    options = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.4, 0.4, 0.4), "interpolation": "bilinear"}
    expected = ClipScorer(config, weights, **options).score(PICTURES, "a cat")
    assert torch.equal(scorer.score(PICTURES, "a cat"), expected)
    assert not torch.equal(ClipScorer(SMALL, weights, **options).score(PICTURES, "a cat"), expected)
    assert scorer.name == f"CLIP {SMALL} (good_tag)"


def test_a_name_on_the_hub_brings_its_own_architecture_and_preprocessing(weights, hub_cache, tmp_path):
    preprocess = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "random", "resize_mode": "squash"}
    content = {"model_cfg": open_clip.get_model_config(SMALL), "preprocess_cfg": preprocess}
    (tmp_path / "config.json").write_text(json.dumps(content))
    hub_cache("someone/small", "open_clip_config.json", tmp_path / "config.json")
    hub_cache("someone/small", "open_clip_model.safetensors", weights)
    scorer = make_scorer("hf-hub:someone/small", None, CPU)
    half = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
    expected = ClipScorer(SMALL, weights, **half).score(PICTURES, "a cat")
    assert torch.equal(scorer.score(PICTURES, "a cat"), expected)
    assert scorer.name == "CLIP someone/small"


def test_what_the_hub_does_not_have_is_said_with_a_way_out(hub_cache, monkeypatch, tmp_path):
    published(monkeypatch, good_tag={"hf_hub": "someone/small/"})
    for spec in (f"{SMALL}:good_tag", "hf-hub:someone/small"):
        with pytest.raises(ValueError, match=rf"scorer='{spec}': it cannot be downloaded \(.*\); .* or give ARCHI"):
            make_scorer(spec, None, CPU)
    (tmp_path / "config.json").write_text("[]")
    hub_cache("someone/small", "open_clip_config.json", tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"its open_clip_config\.json has no model_cfg"):
        make_scorer("hf-hub:someone/small", None, CPU)


def test_a_pickle_from_the_hub_is_not_unpickled(hub_cache, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_cfg": open_clip.get_model_config(SMALL)}))
    torch.save({"a pickled": slice(1)}, tmp_path / "pickle.bin")
    hub_cache("someone/small", "open_clip_config.json", tmp_path / "config.json")
    hub_cache("someone/small", "open_clip_pytorch_model.bin", tmp_path / "pickle.bin")
    with pytest.raises(ValueError, match=r"open_clip_pytorch_model\.bin does not hold the weights of this CLIP"):
        make_scorer("hf-hub:someone/small", None, CPU)


def test_the_documented_example_of_a_scorer_works_as_it_stands(user_module):
    indented = inference.scorer.__doc__.partition("# my_scorers.py")[2].partition("\n\nShapes:")[0]
    user_module(textwrap.dedent("    #" + indented))
    scorer = make_scorer("my_scorers:Darkest", None, CPU)
    pictures = torch.stack([torch.ones(3, 8, 4), torch.zeros(3, 8, 4), torch.full((3, 8, 4), 0.25)])
    torch.testing.assert_close(scorer.score(pictures, "night"), torch.tensor([0.0, 1.0, 0.75]))
    assert scorer.name == "darkness"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "AttributeError: .* has no attribute 'Mine'"),
        ("import nowhere_to_be_found", "no module nowhere_to_be_found; install it, or name its folder in PYTHONPATH"),
        ("1 +", "SyntaxError"),
        ("class Mine: pass", r"TypeError: Mine\(\) takes no arguments"),
        ("class Mine:\n  def __init__(self, device): self.name = 'mine'", "Mine is not a scorer: it needs a name"),
        ("class Mine:\n  name = 7\n  __init__ = lambda self, d: None\n  score = print", "Mine is not a scorer"),
        ("class Mine:\n  def __init__(self, device): 1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_is_wrong_with_a_users_class_is_said(user_module, source, message):
    user_module(source)
    with pytest.raises(ValueError, match=f"scorer='my_scorers:Mine': {message}"):
        make_scorer("my_scorers:Mine", None, CPU)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("best", "must be clip, none, ARCHITECTURE:FILE"),
        ("", "must be clip"),
        (":x", "must be clip"),
        ("ViT-B-32:", "must be clip"),
        ("no_such_module:Mine", "no module no_such_module; install it"),
        ("ViT-B-99:x", "'ViT-B-99' is not an architecture of open_clip"),
        ("ViT-B-32:nowhere.pt", r"nowhere\.pt is neither a file nor a tag of ViT-B-32 \(one of openai, laion400m_e31,"),
        ("RN50:opnai", r"opnai is neither a file nor a tag of RN50 \(one of openai"),
        (f"{SMALL}:openai", rf"openai is neither a file nor a tag of {SMALL} \(but it has none\)"),
        ("xlm-roberta-base-ViT-B-32:laion5b_s13b_b90k", "its text tower is on the hub"),
        ("ViT-B-16-SigLIP:webli", "its tokenizer .* is on the hub; choose an architecture that open_clip contains"),
    ],
)
def test_a_spec_that_names_nothing_is_refused_with_what_to_do(spec, message):
    with pytest.raises(ValueError, match=f"scorer={re.escape(repr(spec))}: .*{message}"):
        make_scorer(spec, None, CPU)


def test_a_file_that_holds_no_weights_is_named(tmp_path):
    (tmp_path / "noise.pt").write_bytes(b"noise" * 99)
    with pytest.raises(ValueError, match=r"noise\.pt does not hold the weights"):
        make_scorer(f"{SMALL}:{tmp_path / 'noise.pt'}", None, CPU)


def test_every_published_preprocessing_of_open_clip_is_one_that_clips_take():
    for architecture, tag in open_clip.list_pretrained():
        described = preprocessing(open_clip.get_pretrained_cfg(architecture, tag))
        assert described["interpolation"] in ("bicubic", "bilinear")
        assert all(0 <= number <= 1 for number in described["image_mean"])
        assert all(0 < number <= 1 for number in described["image_std"])
