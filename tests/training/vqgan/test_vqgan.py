"""train-vqgan on the emoji of tests/data: it learns, survives a kill, and uses its codes."""

import dataclasses
import math
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN, GumbelQuantizer, NearestQuantizer, codebook_use
from tests.tiny import VQGAN_CONFIG
from tests.training.picture_runs import cut_after, killed_after, metrics, train_on_pictures
from training.data.image_text import read_pictures
from training.data.picture_batches import shuffled_batches
from training.run.progress import TrainingDiverged
from training.vqgan.codebook import GumbelLearner, NearestLearner
from training.vqgan.learner import VQGANLearner
from training.vqgan.recipe import VQGANRecipe
from training.vqgan.run import VQGANRun, side_by_side

train_vqgan = partial(train_on_pictures, VQGANRun)
EMOJI = Path(__file__).parents[2] / "data" / "emoji"
SHAPE = dataclasses.replace(VQGAN_CONFIG, picture_side=16)
TINY = VQGANRecipe(
    config=SHAPE, steps=40, batch_size=8, warmup_steps=5, log_every=1, heldout_every=20, checkpoint_every=5
)


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics(out) if "loss" in line]


@pytest.fixture(scope="module")
def emoji(tmp_path_factory):
    """The pixels of all emoji."""
    return read_pictures(EMOJI, 16, store=tmp_path_factory.mktemp("emoji") / "pictures.npy").pixels


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run that nobody interrupted."""
    out = tmp_path_factory.mktemp("run")
    train_vqgan(EMOJI, out, TINY, save_dtype=torch.bfloat16)
    return out


@pytest.mark.parametrize(("side", "words"), [(8, "at least picture_side=16"), (17, "a multiple of")])
def test_crops_need_pictures_that_the_encoder_takes_whole(side, words):
    with pytest.raises(UserError, match=f"crop_from={side}: must be {words}"):
        dataclasses.replace(TINY, crop_from=side)


def test_training_lowers_the_loss_and_reports_the_psnr(trained):
    loss = losses(trained)
    assert len(loss) == TINY.steps
    assert sum(loss[-10:]) < 0.8 * sum(loss[:10])
    psnr = [line["heldout_psnr_db"] for line in metrics(trained) if "heldout_psnr_db" in line]
    assert len(psnr) >= 2
    assert all(8 < value < 40 for value in psnr)


def test_what_is_shipped_is_what_was_measured_last(trained, emoji):
    vqgan = VQGAN.load(trained)
    weights = vqgan.state_dict()
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())
    heldout = emoji[::50]
    images = heldout.float() / 255
    with torch.autocast("cpu", torch.bfloat16):
        error = (vqgan.decode(vqgan.encode(images)) - images).double().square().mean()
    last = metrics(trained)[-1]
    assert last["heldout_psnr_db"] == pytest.approx(float(-10 * error.log10()), abs=1e-3)
    assert 0 < last["heldout_codes_used"] <= 1
    assert 1 <= last["heldout_codes_perplexity"] <= 32


def test_originals_stand_above_their_reconstructions(trained, emoji):
    names = sorted(path.name for path in (trained / "reconstructions").iterdir())
    assert names == ["final.png", "step-000020.png", "step-000040.png"]
    heldout = emoji[::50]
    with Image.open(trained / "reconstructions" / "final.png") as sheet:
        assert sheet.size == (16 * len(heldout), 32)
        assert sheet.getpixel((3, 3)) == tuple(heldout[0, :, 3, 3].tolist())


@pytest.mark.slow
def test_a_killed_run_continues_where_it_stopped(trained, tmp_path):
    killed_after(12, VQGANRun, EMOJI, tmp_path, TINY, save_dtype=torch.bfloat16)
    assert not (tmp_path / "model.safetensors").exists()

    train_vqgan(EMOJI, tmp_path, TINY, save_dtype=torch.bfloat16)

    assert losses(tmp_path) == losses(trained)
    assert VQGAN.load(tmp_path).fingerprint() == VQGAN.load(trained).fingerprint()


def test_a_run_for_larger_pictures_begins_where_the_other_one_ended(trained, tmp_path):
    first = VQGAN.load(trained)
    recipe = dataclasses.replace(
        TINY, config=dataclasses.replace(SHAPE, picture_side=32), steps=1, lr=1e-6, batch_size=4, warmup_steps=1
    )
    train_vqgan(EMOJI, tmp_path, recipe, init_from=first)
    second = VQGAN.load(tmp_path)
    assert second.config.picture_side == 32
    pictures = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert (second.encode(pictures) == first.encode(pictures)).float().mean() > 0.9
    assert (second.decode(first.encode(pictures)) - first.decode(first.encode(pictures))).abs().max() < 0.2


def test_a_vqgan_of_another_shape_is_nothing_to_begin_with(trained, tmp_path):
    recipe = dataclasses.replace(TINY, config=dataclasses.replace(SHAPE, code_width=SHAPE.code_width * 2))
    with pytest.raises(ValueError, match="code_width"):
        train_vqgan(EMOJI, tmp_path, recipe, init_from=VQGAN.load(trained))


def test_another_recipe_does_not_continue_the_run(trained):
    with pytest.raises(ValueError, match=r"holds another run \(lr was .*, now 0\.0005\): give"):
        train_vqgan(EMOJI, trained, dataclasses.replace(TINY, lr=5e-4))


def test_the_gumbel_quantizer_learns_too(tmp_path):
    recipe = dataclasses.replace(TINY, config=dataclasses.replace(SHAPE, quantizer="gumbel"), steps=20)
    train_vqgan(EMOJI, tmp_path, recipe)
    assert sum(losses(tmp_path)[-5:]) < 0.9 * sum(losses(tmp_path)[:5])
    assert VQGAN.load(tmp_path).config.quantizer == "gumbel"


def test_files_that_are_no_pictures_are_counted(tmp_path):
    Image.new("RGB", (20, 10), "red").save(tmp_path / "red.png")
    (tmp_path / "deep").mkdir()
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "deep" / "clear.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    pictures = read_pictures(tmp_path, 4, store=tmp_path / "pictures.npy")
    assert dict(pictures.skipped) == {"picture broken": 1}
    assert pictures.pixels[:][:, :, 0, 0].tolist() == [[255, 255, 255], [255, 0, 0]]


def test_what_pillow_finds_odd_is_counted_and_not_warned_of(tmp_path):
    Image.new("1", (9500, 9500)).save(tmp_path / "huge.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "small.tif")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pictures = read_pictures(tmp_path, 4, store=tmp_path / "pictures.npy")
    assert len(pictures.pixels) == 1
    assert dict(pictures.skipped) == {"too many pixels": 1}


def test_a_folder_without_pictures_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no picture can be read"):
        read_pictures(tmp_path, 4, store=tmp_path / "pictures.npy")


def test_each_pass_shows_every_picture_once():
    order = [rows.tolist() for rows in shuffled_batches(12, 4, 0, start=0, steps=6)]
    first, second = ([row for rows in part for row in rows] for part in (order[:3], order[3:]))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert [rows.tolist() for rows in shuffled_batches(12, 4, 0, start=4, steps=6)] == order[4:]
    with pytest.raises(ValueError, match="3 pictures"):
        shuffled_batches(3, 4, 0, start=0, steps=6)


def test_the_discriminator_moves_the_pixels_by_its_share(emoji):
    pixels = emoji[:8]
    recipe = dataclasses.replace(TINY, precision="fp32", discriminator_start=0.0)
    adversarial = VQGANLearner(recipe)
    without = VQGANLearner(dataclasses.replace(recipe, discriminator_start=1.0))
    assert "discriminator" in adversarial.step(1, pixels)
    assert "discriminator" not in without.step(1, pixels)
    changed = [
        not torch.equal(a, b) for a, b in zip(adversarial.vqgan.parameters(), without.vqgan.parameters(), strict=True)
    ]
    assert any(changed)
    fresh = VQGANLearner(recipe).discriminator.state_dict()
    trained, untouched = adversarial.discriminator.state_dict(), without.discriminator.state_dict()
    assert not torch.equal(trained["main.0.weight"], fresh["main.0.weight"])
    assert all(torch.equal(untouched[name], fresh[name]) for name in fresh)


@pytest.mark.parametrize("quantizer", ["vq", "gumbel"])
@pytest.mark.parametrize("overflowing", ["vqgan.decoder.conv_out.weight", "discriminator.main.0.weight"])
def test_a_step_with_an_infinite_gradient_changes_nothing(quantizer, overflowing, emoji):
    pixels = emoji[:8]
    config = dataclasses.replace(SHAPE, quantizer=quantizer)
    learner = VQGANLearner(dataclasses.replace(TINY, config=config, precision="fp32", discriminator_start=0.0))
    for step in (1, 2):
        before = {name: value.clone() for name, value in learner.state_dict().items()}
        hook = learner.get_parameter(overflowing).register_hook(lambda gradient: gradient * torch.inf)
        numbers = learner.step(step, pixels)
        hook.remove()
        assert math.isfinite(numbers["loss"])
        assert not all(math.isfinite(number) for number in numbers.values())
        assert all(torch.equal(before[name], value) for name, value in learner.state_dict().items())
        learner.step(step, pixels)  # the same without the overflow: something changes
        assert not all(torch.equal(before[name], value) for name, value in learner.state_dict().items())


def test_skipped_steps_are_counted_and_said_and_many_in_a_row_end_the_run(tmp_path, monkeypatch):
    class Overflowing(VQGANLearner):
        """The gradient overflows in the steps 2 and 4, and from step 7 on."""

        def step(self, step, pixels):
            hook = self.vqgan.decoder.conv_out.weight.register_hook(
                lambda gradient: gradient * (torch.inf if step in (2, 4) or step > 6 else 1)
            )
            numbers = super().step(step, pixels)
            hook.remove()
            return numbers

    monkeypatch.setattr("training.vqgan.run.VQGANLearner", Overflowing)
    notes = []
    recipe = dataclasses.replace(TINY, max_skipped_in_row=3)
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row .* until step 9 .* state of step 5"):
        train_vqgan(EMOJI, tmp_path, recipe, on_progress=lambda done, total, note: notes.append(note))
    assert [line["step"] for line in metrics(tmp_path) if "skipped" in line] == [2, 4, 7, 8, 9]
    assert "4 steps skipped (not finite)" in notes[-1]
    assert not (tmp_path / "model.safetensors").exists()


def test_running_means_place_each_code_at_the_mean_of_its_vectors():
    """Three clear clusters, and a codebook that begins with most codes in one of them."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[8.0, 0], [0, 8], [-8, -8]])
    quantizer = NearestQuantizer(dataclasses.replace(SHAPE, codebook_size=6, code_width=2))
    learner = NearestLearner(quantizer, decay=0.9)
    for step in range(200):
        # One cluster holds 98 % of the vectors, like a plain ground.
        which = torch.multinomial(torch.tensor([0.98, 0.01, 0.01]), 256, replacement=True, generator=generator)
        vectors = centres[which] + 0.1 * torch.randn(256, 2, generator=generator)
        learner(vectors.T.reshape(1, 2, 16, 16), step / 200, generator)
    nearest = torch.cdist(centres, quantizer.table).min(dim=1).values
    assert nearest.max() < 0.5
    spread = torch.cdist(quantizer.table, centres).min(dim=1).values
    assert spread.max() < 0.6  # no code is left where no vector is


def test_gradients_pass_the_nearest_quantizer_straight_through():
    quantizer = NearestQuantizer(SHAPE)
    learner = NearestLearner(quantizer, commitment=0.0)
    z = torch.randn(2, 8, 2, 2, requires_grad=True, generator=torch.Generator().manual_seed(0))
    quantized, loss = learner(z, 0.5, torch.Generator())
    weight = torch.randn(2, 8, 2, 2)
    ((quantized * weight).sum() + loss).backward()
    torch.testing.assert_close(z.grad, weight)


def test_the_gumbel_learner_draws_codes_by_their_probability():
    config = dataclasses.replace(SHAPE, quantizer="gumbel", codebook_size=4)
    quantizer = GumbelQuantizer(config)
    torch.nn.init.zeros_(quantizer.proj.weight)
    quantizer.proj.bias.data = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    quantizer.embed.weight.data = F.pad(torch.eye(4), (0, 4))
    quantized, loss = GumbelLearner(quantizer)(torch.zeros(1, 8, 100, 100), 0.5, torch.Generator().manual_seed(0))
    shares = quantized[0, :4].mean(dim=(1, 2))
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), rtol=0, atol=0.02)
    uniform = torch.tensor([0.25] * 4)
    divergence = F.kl_div(uniform.log(), torch.tensor([0.5, 0.3, 0.15, 0.05]), reduction="sum")
    torch.testing.assert_close(loss, 5e-4 * divergence)


def test_codebook_use_counts_what_it_says():
    use = codebook_use(torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]))
    assert use.share == 0.5
    assert use.perplexity == pytest.approx(4)
    assert codebook_use(torch.tensor([10, 0])).perplexity == pytest.approx(1)


def test_a_sheet_of_any_number_of_pictures_has_full_rows():
    pictures = torch.zeros(37, 3, 4, 4)
    assert [len(row) for row in side_by_side(pictures, pictures)] == [16, 16, 16, 16]
    assert [len(row) for row in side_by_side(pictures[:5], pictures[:5])] == [5, 5]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"steps": 0}, "steps=0: must be a whole number of at least 1"),
        ({"precision": "fp16"}, "precision='fp16': must be one of bf16, fp32"),
        ({"squared_weight": math.nan}, "squared_weight=nan: must be a finite number of at least 0"),
        ({"lr": 0.0}, r"lr=0\.0: must be a finite number above 0 and below 1"),
        ({"lr": 1.5}, r"lr=1\.5: must be a finite number above 0 and below 1"),
    ],
)
def test_a_wrong_recipe_says_what_is_wrong(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(TINY, **changes)


def test_a_run_whose_time_is_up_leaves_a_vqgan_and_goes_on_to_the_same_one(trained, tmp_path, clock):
    assert cut_after(7, clock, VQGANRun, EMOJI, tmp_path, TINY, save_dtype=torch.bfloat16).step == 7
    assert VQGAN.load(tmp_path).config == SHAPE
    assert not (tmp_path / "reconstructions").exists()  # measuring would take long
    train_vqgan(EMOJI, tmp_path, TINY, save_dtype=torch.bfloat16, max_minutes=1)
    assert losses(tmp_path) == losses(trained)
    assert VQGAN.load(tmp_path).fingerprint() == VQGAN.load(trained).fingerprint()


def test_a_decoder_trained_alone_may_not_be_saved_so_that_codes_change(tmp_path):
    first = VQGANLearner(TINY).vqgan
    recipe = dataclasses.replace(TINY, decoder_only=True)
    with pytest.raises(ValueError, match="would round the encoder"):
        train_vqgan(EMOJI, tmp_path, recipe, init_from=first, save_dtype=torch.bfloat16)


def test_a_decoder_trained_alone_draws_better_from_the_same_codes(trained, emoji, tmp_path):
    before = VQGAN.load(trained)
    before.decoder.load_state_dict(VQGAN(SHAPE).decoder.state_dict())
    recipe = dataclasses.replace(TINY, decoder_only=True, steps=20)
    train_vqgan(EMOJI, tmp_path, recipe, init_from=before, save_dtype=torch.bfloat16)
    after = VQGAN.load(tmp_path)
    pictures = emoji[:50] / 255
    codes = before.encode(pictures)
    assert torch.equal(after.encode(pictures), codes)
    errors = [(vqgan.decode(codes) - pictures).square().mean().item() for vqgan in (before, after)]
    assert errors[1] < 0.95 * errors[0]
    assert after.reads_codes_of(before.codes_fingerprint())
    assert not after.reads_codes_of(before.fingerprint())  # as recorded for other VQGANs by older data sets


def test_a_decoder_trained_on_larger_pictures_reads_the_same_codes():
    before = VQGAN(SHAPE)
    after = VQGAN(dataclasses.replace(SHAPE, picture_side=2 * SHAPE.picture_side))
    after.load_state_dict(before.state_dict())
    assert after.reads_codes_of(before.codes_fingerprint())
    assert after.fingerprint() != before.fingerprint()
