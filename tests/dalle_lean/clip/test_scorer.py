import json

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from dalle_lean.clip.architecture import build_clip, model_config
from dalle_lean.clip.scorer import ClipScorer, right_caption_first
from dalle_lean.tokenizer import Tokenizer

NAMED = "ViT-S-32-alt"  # the smallest of open_clip's
CAPTIONS = ["a red heart", "a blue heart on a green ground", "a cat left of a tree"] * 3


def architecture(vocab_size=320, context_length=16, eos_id=1):
    return {
        "embed_dim": 48,
        "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 64, "head_width": 32, "layers": 2},
        "text_cfg": {
            "context_length": context_length,
            "vocab_size": vocab_size,
            "width": 64,
            "heads": 2,
            "layers": 2,
            "pool_type": "eos",
            "eos_id": eos_id,
        },
    }


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(CAPTIONS, vocab_size=320)


@pytest.fixture(scope="module")
def scorer(tokenizer):
    torch.manual_seed(0)
    weights = build_clip(model_config(architecture())).state_dict()
    return ClipScorer(architecture(), weights, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def published():
    """A model of a named architecture with open_clip's own tokenizer, and the preprocessing that belongs to it."""
    torch.manual_seed(0)
    model, _, preprocess = open_clip.create_model_and_transforms(NAMED, pretrained_image=False)
    return model.eval(), preprocess


def pictures(number, width, height, seed=0):
    """PIL pictures of coarse coloured patches, which have the sharp edges that resizing treats differently."""
    random = np.random.default_rng(seed)
    patches = random.integers(0, 256, (number, 5, 4, 3), dtype=np.uint8)
    return [Image.fromarray(patch).resize((width, height), Image.Resampling.NEAREST) for patch in patches]


def as_tensor(images):
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]).float() / 255


@torch.no_grad()
def test_features_of_a_published_file_equal_open_clips_own(published, tmp_path):
    model, preprocess = published
    torch.save({"state_dict": {f"module.{name}": part for name, part in model.state_dict().items()}}, tmp_path / "x.pt")
    scorer = ClipScorer(NAMED, tmp_path / "x.pt")
    images = pictures(2, 300, 260)
    expected = F.normalize(model.encode_image(torch.stack([preprocess(image) for image in images])), dim=-1)
    torch.testing.assert_close(scorer.image_features(images), expected)
    texts = F.normalize(model.encode_text(open_clip.get_tokenizer(NAMED)(CAPTIONS)), dim=-1)
    torch.testing.assert_close(scorer.text_features(CAPTIONS), texts)
    torch.testing.assert_close(scorer.score(images, CAPTIONS[1]), expected @ texts[1])


@pytest.mark.parametrize("size", [(32, 32), (40, 90), (20, 28), (200, 64)])
def test_tensors_are_prepared_as_open_clip_prepares_the_same_picture(scorer, size):
    images = pictures(3, *size)
    levels = (scorer.prepare(as_tensor(images)) - scorer.prepare(images)).abs() * min(scorer.image_std) * 255
    # Pillow rounds and cuts off to 0..255 after each direction, which shows at the corners of patches.
    assert levels.mean() < 0.6
    assert levels.max() < 12


@pytest.mark.parametrize("size", [(40, 90), (20, 28)])
def test_pictures_are_resized_by_the_interpolation_of_the_clip(scorer, tokenizer, size):
    bilinear = ClipScorer(architecture(), scorer.model.state_dict(), tokenizer=tokenizer, interpolation="bilinear")
    images = pictures(3, *size)
    levels = (bilinear.prepare(as_tensor(images)) - bilinear.prepare(images)).abs() * min(scorer.image_std) * 255
    assert levels.max() < 2
    assert (bilinear.prepare(images) - scorer.prepare(images)).abs().max() > 0.1


def test_the_interpolation_is_saved_and_folders_of_earlier_programs_are_bicubic(scorer, tokenizer, tmp_path):
    bilinear = ClipScorer(architecture(), scorer.model.state_dict(), tokenizer=tokenizer, interpolation="bilinear")
    bilinear.save(tmp_path)
    assert ClipScorer.load(tmp_path).interpolation == "bilinear"
    config = json.loads((tmp_path / "config.json").read_text())
    del config["interpolation"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ClipScorer.load(tmp_path).interpolation == "bicubic"


def test_batches_change_nothing(scorer):
    images = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(scorer.image_features(images, batch_size=2), scorer.image_features(images))
    torch.testing.assert_close(scorer.text_features(CAPTIONS, batch_size=2), scorer.text_features(CAPTIONS))
    assert scorer.score(images, "a cat").shape == (5,)


@torch.no_grad()
def test_the_length_of_the_padding_does_not_change_the_features(scorer, tokenizer):
    longer = ClipScorer(
        architecture(context_length=24),
        {**build_clip(model_config(architecture(context_length=24))).state_dict(), **lengthened(scorer, 24)},
        tokenizer=tokenizer,
    )
    assert scorer.caption_ids(CAPTIONS).shape[1] == 16
    assert longer.caption_ids(CAPTIONS).shape[1] == 24
    torch.testing.assert_close(longer.text_features(CAPTIONS), scorer.text_features(CAPTIONS))


def lengthened(scorer, context_length):
    """The weights with positions added whose vectors are noise."""
    weights = dict(scorer.model.state_dict())
    positions = weights["positional_embedding"]
    weights["positional_embedding"] = torch.cat([positions, torch.randn(context_length - len(positions), 64)])
    return weights


@torch.no_grad()
def test_nothing_after_the_first_padding_id_counts_and_all_before_it_does(scorer):
    ids = scorer.caption_ids(["a red heart"])
    end = ids[0].tolist().index(1)
    features = scorer.model.encode_text(ids)
    behind, before = ids.clone(), ids.clone()
    behind[0, end + 1 :] = 7
    before[0, 0] += 1
    torch.testing.assert_close(scorer.model.encode_text(behind), features)
    assert (scorer.model.encode_text(before) - features).abs().max() > 1e-3


def test_a_caption_longer_than_the_text_tower_is_cut_and_still_ends(scorer):
    ids = scorer.caption_ids(["a red heart and " * 50, ""])
    assert ids[0, -1] == 1
    assert (ids[0, :-1] != 1).all()
    assert (ids[1] == 1).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.0), (torch.bfloat16, 0.03)])
def test_a_saved_folder_scores_the_same(scorer, tmp_path, dtype, tolerance):
    scorer.save(tmp_path / "clip", dtype)
    assert load_file(tmp_path / "clip/model.safetensors")["visual.proj"].dtype == dtype
    again = ClipScorer.load(tmp_path / "clip")
    assert {parameter.dtype for parameter in again.model.parameters()} == {torch.float32}
    images = pictures(3, 40, 40)
    scores, expected = (clip.score(images, "a red heart") for clip in (again, scorer))
    torch.testing.assert_close(scores, expected, atol=tolerance, rtol=0)


def test_a_folder_of_a_named_architecture_needs_no_tokenizer_file(published, tmp_path):
    ClipScorer(NAMED, published[0].state_dict()).save(tmp_path / "clip", torch.bfloat16)
    assert not (tmp_path / "clip/tokenizer.json").exists()
    assert ClipScorer.load(tmp_path / "clip").architecture == NAMED


def edit(**changes):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("config.json"), "no config.json"),
        (write("config.json", b"{"), "is not JSON"),
        (write("config.json", b"[]"), "not of the format"),
        (edit(format="dalle_lean_clip/9"), "not of the format"),
        (edit(surprise=1), r"unknown or missing fields \['surprise'\]"),
        (edit(tokenizer="http://somewhere"), "tokenizer='http://somewhere'"),
        (edit(sha256=[]), "sha256 must map"),
        (remove("model.safetensors"), r"model\.safetensors is missing"),
        (remove("tokenizer.json"), r"tokenizer\.json is missing"),
        (write("model.safetensors", b"other"), r"model\.safetensors is not a safetensors file"),
        (write("tokenizer.json", b"{}"), r"tokenizer\.json is not the file"),
        (edit(image_mean=[0, 0]), r"image_mean=\[0, 0\]"),
        (edit(image_std=[0, 1, 1]), r"image_std=\[0, 1, 1\]"),
        (edit(image_mean=[0, 0, "x"]), "image_mean"),
        (edit(interpolation="nearest"), "interpolation='nearest': must be one of bicubic, bilinear"),
        (edit(architecture=7), "must be a name or a model config"),
        (edit(architecture={"embed_dim": 48}), "vision_cfg must be an object"),
        (edit(architecture=architecture(vocab_size=10**9)), r"text_cfg\.vocab_size=1000000000: must be"),
        (edit(architecture=architecture(vocab_size=True)), r"text_cfg\.vocab_size=True: must be"),
        (edit(architecture=architecture(vocab_size=260)), "vocab_size=260 is less than the tokenizer's"),
        (edit(architecture=architecture(eos_id=2)), "pool_type='eos' and eos_id=1"),
        (edit(architecture={**architecture(), "surprise": 1}), "architecture: it cannot be built"),
        (edit(architecture=architecture(vocab_size=400)), r"model\.safetensors does not hold the weights"),
    ],
)
def test_a_damaged_folder_is_refused_with_what_is_wrong(scorer, tmp_path, damage, message):
    scorer.save(tmp_path / "clip")
    damage(tmp_path / "clip")
    with pytest.raises(ValueError, match=message) as caught:
        ClipScorer.load(tmp_path / "clip")
    assert str(tmp_path / "clip") in str(caught.value)


def test_files_of_weights_that_are_none_are_refused_by_name(scorer, tokenizer, tmp_path):
    (tmp_path / "noise.pt").write_bytes(b"noise" * 99)
    (tmp_path / "noise.safetensors").write_bytes(b"noise" * 99)
    torch.save({"a pickled": slice(1)}, tmp_path / "pickle.pt")
    spoilt = {name: part * torch.nan for name, part in scorer.model.state_dict().items()}
    save_file(spoilt, tmp_path / "nan.safetensors")
    for name in ("noise.pt", "noise.safetensors", "pickle.pt", "nan.safetensors", "laion2b_s34b_b79k"):
        with pytest.raises(ValueError, match=name):
            ClipScorer(architecture(), tmp_path / name, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf-hub:someone/something", "not an architecture of open_clip"),
        ("local-dir:/somewhere", "not an architecture of open_clip"),
        ("xlm-roberta-base-ViT-B-32", "text tower is on the hub"),
        ("ViT-B-16-SigLIP", "tokenizer .* is on the hub"),
    ],
)
def test_what_would_need_the_network_is_refused(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ClipScorer(name, tmp_path / "weights.safetensors")


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("vision_cfg", {"timm_model_name": "hf-hub:someone/something"}, "'hf-hub:someone/something' is an address"),
        ("vision_cfg", {"attn_pooler_queries": 10**9}, "attn_pooler_queries=1000000000"),
        ("text_cfg", {"tokenizer_kwargs": {"surprise": 1}}, "tokenizer_kwargs={'surprise': 1}"),
        ("text_cfg", {"tokenizer_kwargs": 7}, "tokenizer_kwargs=7"),
    ],
)
def test_an_architecture_that_reaches_too_far_is_refused(part, change, message, tmp_path):
    config = architecture()
    config[part] |= change
    with pytest.raises(ValueError, match=message):
        ClipScorer(config, tmp_path / "weights.safetensors")


def test_a_state_dict_is_checked_as_a_file_is(scorer, tokenizer):
    state = scorer.model.state_dict()
    for wrong, message in (
        ({"logit_scale": torch.tensor(torch.nan)}, "logit_scale holds numbers that are not finite"),
        ({"surprise": torch.zeros(1)}, "unknown key surprise"),
    ):
        with pytest.raises(ValueError, match=message):
            ClipScorer(architecture(), {**state, **wrong}, tokenizer=tokenizer)


def test_wrong_pictures_and_captions_are_refused(scorer):
    for images in (torch.zeros(3, 32, 32), torch.zeros(1, 4, 32, 32), torch.zeros(1, 3, 32, 32, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="must be floating point"):
            scorer.score(images, "a cat")
    with pytest.raises(ValueError, match="images: none"):
        scorer.score([], "a cat")
    for captions in ("a cat", [], [None]):
        with pytest.raises(ValueError, match="captions must be"):
            scorer.text_features(captions)


def test_right_caption_first_counts_pictures_whose_own_caption_wins():
    features = torch.eye(4)
    captions = ["a", "b", "c", "d"]
    assert right_caption_first(features, features, captions) == 1.0
    assert right_caption_first(features[[1, 0, 2, 3]], features, captions) == 0.5
    # Equal captions never compete, and a tie is no win.
    assert right_caption_first(features[[0, 0, 2, 3]], features[[0, 0, 2, 3]], ["a", "a", "c", "d"]) == 1.0
    assert right_caption_first(torch.zeros(4, 4), features, captions) == 0.0


def test_right_caption_first_by_chance_is_one_in_the_number_of_candidates():
    generator = torch.Generator().manual_seed(0)
    images, texts = (F.normalize(torch.randn(2000, 32, generator=generator), dim=-1) for _ in range(2))
    share = right_caption_first(images, texts, [str(number) for number in range(2000)], of=10)
    assert abs(share - 0.1) < 0.03
