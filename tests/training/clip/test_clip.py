import json
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from torch.nn import functional as F

from dalle_lean.clip.architecture import build_clip, model_config
from dalle_lean.clip.scorer import ClipScorer
from dalle_lean.errors import UserError
from dalle_lean.require import require
from dalle_lean.tokenizer import Tokenizer
from tests.tiny import tiny_vqgan
from tests.training.picture_runs import cut_after, killed_after, metrics, train_on_pictures
from training.clip.hard_negatives import HardNegatives
from training.clip.recipe import ClipRecipe
from training.clip.run import ClipRun, contrastive_loss
from training.data.augmentation import jitter
from training.data.image_text import hold_out, read_captioned
from training.data.picture_batches import distinct_batches
from training.run.progress import TrainingDiverged

train_clip = partial(train_on_pictures, ClipRun)
COLOURS = ("red", "green", "blue", "black")
SHAPES = ("circle", "square")
TINY = {
    "picture_side": 32,
    "image_width": 8,
    "width": 64,
    "text_layers": 1,
    "context_length": 12,
    "vocab_size": 300,
    "batch_size": 6,
    "precision": "fp32",
    "lr": 3e-3,
    "alike": (("paint", "place"), ("things", "place")),
    "heldout_every": 3,
    "checkpoint_every": 2,
    "log_every": 1,
}


def draw(colour, shape, offset):
    image = Image.new("RGB", (32, 32), "white")
    box = (6 + offset, 6, 22 + offset, 22)
    pen = ImageDraw.Draw(image)
    pen.ellipse(box, fill=colour) if shape == "circle" else pen.rectangle(box, fill=colour)
    return image


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three pictures of each of eight captions, and a listing that tells what they show."""
    folder = tmp_path_factory.mktemp("shapes")
    lines = []
    for colour in COLOURS:
        for shape in SHAPES:
            for offset in range(3):
                name = f"{colour}-{shape}-{offset}.png"
                draw(colour, shape, offset).save(folder / name)
                facts = {"things": [shape], "paint": colour, "place": offset}
                lines.append(json.dumps({"file_name": name, "text": f"a {colour} {shape}", **facts}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_trained_clip_ranks_the_picture_that_fits_first(folder, tmp_path):
    recipe = ClipRecipe(**{**TINY, "steps": 80, "batch_size": 8})
    end = train_clip(folder, tmp_path, recipe, heldout=folder, save_dtype=torch.bfloat16)
    assert end.measured["right_caption_first"] > 0.9
    scorer = ClipScorer.load(tmp_path / "clip")
    captions = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
    images = [draw(colour, shape, 1) for colour in COLOURS for shape in SHAPES]
    best = [scorer.score(images, caption).argmax().item() for caption in captions]
    assert best == list(range(8))
    losses = [line["loss"] for line in metrics(tmp_path) if "loss" in line]
    assert losses[-1] < losses[0] / 2


@pytest.mark.long
def test_a_killed_run_continues_exactly_where_its_checkpoint_stood(folder, tmp_path):
    recipe = ClipRecipe(**{**TINY, "steps": 8, "precision": "bf16"})
    killed_after(5, ClipRun, folder, tmp_path / "killed", recipe)
    assert metrics(tmp_path / "killed")[-1]["step"] == 5
    assert not (tmp_path / "killed/clip").exists()

    steps_seen = []
    train_clip(folder, tmp_path / "killed", recipe, on_progress=lambda done, total, note: steps_seen.append(note))
    train_clip(folder, tmp_path / "whole", recipe)
    assert [note.split("/")[0] for note in steps_seen if note] == [f"step {step}" for step in range(4, 9)]
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    killed, whole = (load_file(tmp_path / name / "clip/model.safetensors") for name in ("killed", "whole"))
    assert all(torch.equal(killed[name], whole[name]) for name in whole)


def test_a_run_whose_time_is_up_leaves_a_clip_and_goes_on_to_the_same_one(folder, tmp_path, clock):
    recipe = ClipRecipe(**{**TINY, "steps": 6})
    assert cut_after(3, clock, ClipRun, folder, tmp_path / "cut", recipe).step == 3
    assert ClipScorer.load(tmp_path / "cut/clip")
    train_clip(folder, tmp_path / "cut", recipe, max_minutes=1)
    train_clip(folder, tmp_path / "whole", recipe)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    cut, whole = (load_file(tmp_path / name / "clip/model.safetensors") for name in ("cut", "whole"))
    assert all(torch.equal(cut[name], whole[name]) for name in whole)


def test_another_recipe_does_not_continue_the_run(folder, tmp_path):
    recipe = ClipRecipe(**{**TINY, "steps": 2})
    train_clip(folder, tmp_path, recipe)
    before = (tmp_path / "clip/model.safetensors").read_bytes()
    train_clip(folder, tmp_path, recipe)  # finished already: nothing changes
    assert (tmp_path / "clip/model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match=r"holds another run \(lr was .*, now 0\.0001\): give"):
        train_clip(folder, tmp_path, ClipRecipe(**{**TINY, "steps": 2, "lr": 1e-4}))


def test_pictures_can_be_shown_as_a_vqgan_decodes_them(folder, tmp_path):
    tiny_vqgan().save(tmp_path / "vqgan")
    recipe = ClipRecipe(**{**TINY, "steps": 2})
    end = train_clip(folder, tmp_path / "out", recipe, heldout=folder, vqgan=tmp_path / "vqgan")
    assert set(end.measured) == {"right_caption_first", "decoded_right_caption_first"}
    decoded = torch.from_numpy(np.load(tmp_path / "out/decoded.npy"))
    assert decoded.shape == (12, 3, 32, 32)
    train_clip(folder, tmp_path / "plain", recipe, heldout=folder)
    assert metrics(tmp_path / "plain")[0] != metrics(tmp_path / "out")[0]


def test_a_run_learns_from_hard_negatives_and_measures_how_often_it_tells_them_apart(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("training.clip.run.THING_CHOICES", 2)
    learnt = []

    class Watched(ClipRun):
        def step(self, step, rows):
            learnt.append(rows)
            return super().step(step, rows)

    end = train_on_pictures(Watched, folder, tmp_path, ClipRecipe(**{**TINY, "steps": 4}), heldout=folder)
    data = read_captioned(folder, 32, store=tmp_path / "pictures.npy", fields=("paint", "place", "things"))
    negatives = HardNegatives(data, ClipRecipe(**TINY))
    assert (negatives.groups, negatives.num_anchors) == (1, 4)
    begun = islice(distinct_batches(data.captions, 4, seed=0), 4)
    assert learnt == [negatives.batch(step, rows) for step, rows in enumerate(begun, start=1)]
    assert set(end.measured) == {"right_caption_first", "right_thing_first"}
    assert metrics(tmp_path)[-1]["right_thing_first"] == end.measured["right_thing_first"]
    assert "right thing first of 20: " in end.note(4)


def test_a_folder_that_tells_nothing_but_captions_is_trained_on_and_the_lack_is_told(folder, tmp_path, caplog):
    caplog.set_level("INFO", "training")
    (tmp_path / "data").mkdir()
    lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    told = [json.dumps({name: line[name] for name in ("file_name", "text")}) + "\n" for line in lines]
    (tmp_path / "data/metadata.jsonl").write_text("".join(told))
    for line in lines:
        (tmp_path / "data" / line["file_name"]).write_bytes((folder / line["file_name"]).read_bytes())
    end = train_clip(tmp_path / "data", tmp_path / "out", ClipRecipe(**{**TINY, "steps": 1}))
    assert set(end.measured) == {"right_caption_first"}
    lacks = [notice for notice in caplog.messages if notice.startswith("no hard negatives")]
    assert [notice.partition(": ")[2] for notice in lacks] == [
        "the listing lacks paint, place",
        "the listing lacks things, place",
    ]


def test_a_given_tokenizer_travels_into_the_clip_folder(folder, tmp_path):
    Tokenizer.train(["a red circle", "a blue square"] * 5, 280).save(tmp_path / "mine.json")
    train_clip(folder, tmp_path / "out", ClipRecipe(**{**TINY, "steps": 1}), tokenizer=tmp_path / "mine.json")
    assert (tmp_path / "out/clip/tokenizer.json").read_bytes() == (tmp_path / "mine.json").read_bytes()


def test_without_extra_captions_the_loss_is_open_clips():
    images, texts = (F.normalize(torch.randn(6, 8, generator=torch.Generator().manual_seed(n)), dim=1) for n in (0, 1))
    theirs = require("open_clip", extra="training").ClipLoss()(images, texts, torch.tensor(7.0))
    torch.testing.assert_close(contrastive_loss(images, texts, torch.tensor(7.0)), theirs)


def test_an_extra_caption_is_a_wrong_answer_for_each_picture_and_asks_for_none():
    images, texts = (F.normalize(torch.randn(n, 8, generator=torch.Generator().manual_seed(n)), dim=1) for n in (3, 5))
    scale = torch.tensor(7.0)
    of_pictures = [-(scale * texts @ image).log_softmax(0)[i] for i, image in enumerate(images)]
    of_captions = [-(scale * images @ text).log_softmax(0)[i] for i, text in enumerate(texts[:3])]
    torch.testing.assert_close(contrastive_loss(images, texts, scale), sum(of_pictures + of_captions) / 6)


def test_extra_captions_are_read_beside_those_of_the_pictures(folder, tmp_path, monkeypatch):
    counts = []
    whole = contrastive_loss
    monkeypatch.setattr(
        "training.clip.run.contrastive_loss",
        lambda images, texts, scale: counts.append((len(images), len(texts))) or whole(images, texts, scale),
    )
    train_clip(folder, tmp_path, ClipRecipe(**{**TINY, "steps": 2, "extra_captions": 2}), heldout=folder)
    assert counts == [(6, 8)] * 2


def test_a_clip_is_trained_further_from_its_weights_with_its_tokenizer(folder, tmp_path):
    recipe = ClipRecipe(**{**TINY, "steps": 60, "batch_size": 8})
    train_clip(folder, tmp_path / "first", recipe, heldout=folder)
    further = ClipRecipe(**{**TINY, "steps": 1, "batch_size": 8, "lr": 1e-9})
    end = train_clip(folder, tmp_path / "further", further, heldout=folder, init=tmp_path / "first/clip")
    assert end.measured["right_caption_first"] > 0.9
    tokenizers = [(tmp_path / run / "clip/tokenizer.json").read_bytes() for run in ("first", "further")]
    assert tokenizers[0] == tokenizers[1]


def test_the_mean_of_the_initial_and_the_trained_weights_is_stored_if_asked_for(folder, tmp_path):
    tiny = {**TINY, "batch_size": 8}
    train_clip(folder, tmp_path / "first", ClipRecipe(**{**tiny, "steps": 1}), heldout=folder)
    first = tmp_path / "first/clip"
    further = ClipRecipe(**{**tiny, "steps": 3})
    train_clip(folder, tmp_path / "further", further, heldout=folder, init=first)
    train_clip(folder, tmp_path / "mean", further, heldout=folder, init=first, average=True)
    before, after, mean = (load_file(tmp_path / run / "clip/model.safetensors") for run in ("first", "further", "mean"))
    for name in (name for name, weight in mean.items() if weight.is_floating_point()):
        torch.testing.assert_close(mean[name], (before[name] + after[name]) / 2)
        assert name == "logit_scale" or not torch.equal(before[name], after[name])
    with pytest.raises(UserError, match="--average needs --init"):
        train_clip(folder, tmp_path / "out", further, average=True)


def test_a_clip_of_another_shape_or_with_two_tokenizers_is_not_trained_further(folder, tmp_path):
    train_clip(folder, tmp_path / "first", ClipRecipe(**{**TINY, "steps": 1}), heldout=folder)
    clip = tmp_path / "first/clip"
    wider = ClipRecipe(**{**TINY, "steps": 1, "width": 96})
    with pytest.raises(UserError, match=r"'embed_dim': 64.*and not.*'embed_dim': 96"):
        train_clip(folder, tmp_path / "out", wider, heldout=folder, init=clip)
    with pytest.raises(UserError, match="has a tokenizer of its own"):
        train_clip(folder, tmp_path / "out", wider, init=clip, tokenizer=clip / "tokenizer.json")


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(folder, tmp_path):
    blowing_up = {"weight_decay": 1e38, "max_skipped_in_row": 2}
    recipe = ClipRecipe(**{**TINY, "steps": 8, "checkpoint_every": 1, **blowing_up})
    with pytest.raises(TrainingDiverged, match=r"2 steps in a row .* state of step 1"):
        train_clip(folder, tmp_path, recipe)
    assert (tmp_path / "checkpoint").is_dir()
    assert not (tmp_path / "clip").exists()


def test_a_step_with_an_infinite_gradient_changes_nothing_and_is_counted(folder, tmp_path):
    recipe = ClipRecipe(**{**TINY, "steps": 4, "checkpoint_every": 1})
    states = []

    class Overflowing(ClipRun):
        """In step 3 the gradient of one weight overflows; the loss stays finite."""

        def step(self, step, rows):
            states.append({name: value.clone() for name, value in self.scorer.model.state_dict().items()})
            hook = self.scorer.model.text_projection.register_hook(lambda gradient: gradient * torch.inf)
            if step != 3:
                hook.remove()
            numbers = super().step(step, rows)
            hook.remove()
            return numbers

    end = train_on_pictures(Overflowing, folder, tmp_path, recipe)
    assert all(torch.equal(states[2][name], value) for name, value in states[3].items())
    assert not all(torch.equal(states[1][name], value) for name, value in states[2].items())
    assert (end.step, end.skipped, end.skipped_in_row) == (4, 1, 0)
    assert "1 step skipped (not finite)" in end.note(4)
    assert [line["step"] for line in metrics(tmp_path) if "skipped" in line] == [3]


def test_no_batch_holds_a_caption_twice_and_every_picture_has_its_turn():
    captions = [f"thing {number % 10}" for number in range(40)]
    captions[0] = "  THING   1 "
    batches = list(islice(distinct_batches(captions, 5, seed=0), 8))
    for batch in batches:
        assert len({" ".join(captions[row].lower().split()) for row in batch}) == 5
    assert len({row for batch in batches for row in batch}) >= 35
    assert batches == list(islice(distinct_batches(captions, 5, seed=0), 8))
    assert batches != list(islice(distinct_batches(captions, 5, seed=1), 8))
    with pytest.raises(ValueError, match=r"batch_size=11: must be in 2\.\.10"):
        next(distinct_batches(captions, 11, seed=0))


def test_held_out_captions_are_not_trained_on(folder, tmp_path):
    rest, heldout = hold_out(read_captioned(folder, 16, store=tmp_path / "p.npy"), 0.25, seed=0)
    assert len(heldout) == 6
    assert len(rest) == 18
    assert not set(rest.captions) & set(heldout.captions)


def test_jitter_moves_a_little_and_neither_mirrors_nor_recolours():
    left_red = torch.zeros(64, 3, 16, 16)
    left_red[:, 0, :, :8] = 1.0
    moved = jitter(left_red, torch.Generator().manual_seed(0))
    assert (moved[:, 0, :, :6] > 0.99).all()
    assert (moved[:, 0, :, 10:] < 0.01).all()
    assert (moved[:, 1:] == 0).all()
    assert len({tuple(row.tolist()) for row in moved[:, 0, 8]}) > 32


def test_lines_that_cannot_be_used_are_counted_by_reason(folder, tmp_path):
    Image.new("RGBA", (40, 20), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no more")
    Image.new("RGB", (8, 8)).save(tmp_path / "drawing.png", "EPS")
    Image.new("1", (8192, 8193)).save(tmp_path / "bomb.png")
    lines = [
        {"file_name": "clear.png", "caption": "nothing"},
        {"file_name": "broken.png", "text": "x"},
        {"file_name": "missing.png", "text": "x"},
        {"file_name": "drawing.png", "text": "x"},
        {"file_name": "bomb.png", "text": "x"},
        {"file_name": "nul\0.png", "text": "x"},
        {"file_name": "clear.png", "text": "  "},
        {"file_name": "clear.png"},
        {"text": "x"},
        {"file_name": f"../{folder.name}/red-circle-0.png", "text": "x"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{half a line\n")
    data = read_captioned(tmp_path, 8, store=tmp_path / "p.npy")
    assert data.captions == ["nothing"]
    assert (data.pixels[:] == 255).all()  # transparent: white
    assert dict(data.skipped) == {
        "picture broken": 2,
        "too many pixels": 1,
        "picture missing": 2,
        "no caption": 2,
        "no file_name": 1,
        "file_name points outside the folder": 1,
        "line is not JSON": 1,
    }


@pytest.mark.parametrize(("listing", "message"), [(None, "has no metadata.jsonl"), ("", "has no usable line")])
def test_a_folder_without_anything_usable_is_refused_by_name(tmp_path, listing, message):
    if listing is not None:
        (tmp_path / "metadata.jsonl").write_text(listing)
    with pytest.raises(ValueError, match=message) as caught:
        read_captioned(tmp_path, 16, store=tmp_path / "p.npy")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 100},
        {"picture_side": 60},
        {"image_layers": (1, 1)},
        {"heldout_share": 1.5},
        {"hard_negative_share": -0.1},
        {"hard_group_size": 1},
        {"alike": (("ground",), ())},
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ClipRecipe(**wrong)


@pytest.mark.parametrize("nothing", [0, 0.0])
def test_a_share_of_nothing_to_measure_on_is_refused_and_the_other_shares_may_be_nothing(nothing):
    with pytest.raises(ValueError, match=r"heldout_share=0.*above 0, to leave captions to measure on"):
        ClipRecipe(heldout_share=nothing)
    ClipRecipe(warmup_share=nothing, decoded_share=nothing)


def test_the_default_clip_is_small(folder, tmp_path):
    tokenizer = Tokenizer.train(read_captioned(folder, 16, store=tmp_path / "p.npy").captions, 2048)
    recipe = ClipRecipe()
    model = build_clip(model_config(recipe.architecture(tokenizer)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    grown = (recipe.vocab_size - tokenizer.vocab_size) * recipe.width
    assert parameters + grown < 6e6
