"""The image tower of this package's own CLIPs."""

import json

import pytest
import torch

from dalle_lean.clip.architecture import build_clip, model_config
from dalle_lean.clip.picture_tower import PatchResNet
from dalle_lean.clip.scorer import ClipScorer
from dalle_lean.tokenizer import Tokenizer

TOWER = {"image_size": 64, "patch_size": 4, "widths": [8, 16, 32], "blocks": [1, 2, 1]}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["a red heart", "a blue heart"] * 5, 280)


def architecture(tokenizer, **changes):
    text = {"context_length": 12, "vocab_size": 280, "width": 32, "heads": 1, "layers": 1}
    text |= {"pool_type": "eos", "eos_id": tokenizer.padding_id}
    return {"embed_dim": 24, "vision_cfg": {**TOWER, **changes}, "text_cfg": text}


@torch.no_grad()
def test_features_are_one_row_for_each_picture_and_tell_where_things_are():
    torch.manual_seed(0)
    tower = PatchResNet(24, **TOWER).eval()
    left = torch.zeros(1, 3, 64, 64)
    left[..., 16:32, 8:24] = 1
    features = tower(torch.cat([left, left.flip(-1), left.roll(32, -1)]))
    assert features.shape == (3, 24)
    assert (features[0] - features[1:]).abs().amax(dim=1).min() > 1e-3


@torch.no_grad()
def test_a_new_tower_lets_every_pixel_count():
    torch.manual_seed(0)
    tower = PatchResNet(24, **TOWER).eval()
    picture = torch.rand(1, 3, 64, 64)
    with torch.enable_grad():
        picture.requires_grad_()
        tower(picture).sum().backward()
    assert (picture.grad.abs().sum(dim=1) > 0).float().mean() > 0.95


def test_a_clip_with_this_tower_is_saved_and_loaded_whole(tokenizer, tmp_path):
    torch.manual_seed(0)
    weights = build_clip(model_config(architecture(tokenizer))).state_dict()
    scorer = ClipScorer(architecture(tokenizer), weights, tokenizer=tokenizer)
    assert scorer.image_side == 64
    scorer.save(tmp_path)
    again = ClipScorer.load(tmp_path)
    pictures = torch.rand(3, 3, 80, 80)
    assert torch.equal(again.score(pictures, "a red heart"), scorer.score(pictures, "a red heart"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 72}, "image_size=72: must be a multiple of 16"),
        ({"patch_size": 3}, "patch_size=3: must be even"),
        ({"blocks": [1, 1]}, "one number for each resolution"),
        ({"widths": []}, "one number for each resolution"),
        ({"widths": [8, 16, 10**6]}, r"vision_cfg\.widths"),
        ({"blocks": [1, 1, 10**6]}, r"vision_cfg\.blocks"),
        ({"widths": "wide"}, r"vision_cfg\.widths"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_sizes_that_fit_nothing_are_refused(tokenizer, tmp_path, changes, message):
    config = architecture(tokenizer, **changes)
    with pytest.raises(ValueError, match=message):
        build_clip(model_config(json.loads(json.dumps(config))))
