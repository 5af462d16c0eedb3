"""A judge is named as a scorer is."""

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from inference.evaluation.clip_metrics import make_judge
from inference.scorer import make_scorer

CPU = torch.device("cpu")
SMALL = "ViT-S-32-alt"  # the smallest of open_clip's


def test_a_judge_is_what_ranks_under_the_same_name(tmp_path, model_folder):
    torch.manual_seed(0)
    save_file(open_clip.create_model(SMALL).state_dict(), tmp_path / "small.safetensors")
    for spec in (f"{SMALL}:{tmp_path / 'small.safetensors'}", str(model_folder / "clip")):
        judge, scorer = make_judge(spec, CPU), make_scorer(spec, None, CPU)
        assert judge.name == scorer.name
        captions = ["a cat", "a red circle"]
        assert torch.equal(judge.text_features(captions), scorer.text_features(captions))
    assert judge.name == f"CLIP {model_folder.name}/clip"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("none", "judge='none': must be a CLIP"),
        ("clip", "judge='clip': must be a CLIP"),
        ("nowhere", "judge='nowhere': must be clip, none"),
        ("collections:Counter", "judge='collections:Counter': TypeError"),
        ("ViT-B-32:nowhere.pt", r"judge='ViT-B-32:nowhere.pt': nowhere\.pt is neither a file nor a tag"),
    ],
)
def test_a_judge_that_is_no_clip_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        make_judge(spec, CPU)


def test_a_folder_of_something_else_is_named(tmp_path):
    with pytest.raises(ValueError, match="is not a CLIP folder"):
        make_judge(str(tmp_path), CPU)
