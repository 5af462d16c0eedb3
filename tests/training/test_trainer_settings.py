"""What the settings of a recipe make of a run: precision, short sequences first."""

import dataclasses
import os
import resource
import signal
import time

import pytest
import torch

from dalle_lean import load_model
from dalle_lean.errors import UserError
from tests.training.runs import Killed, at_step, kill, losses, weights
from training.run.metrics import NAME as METRICS
from training.run.metrics import read_metrics
from training.run.progress import TrainingDiverged
from training.trainer import DalleRun, Progress, train

CHANGES = {
    "fp16": {"memory": {"precision": "fp16"}},
    "bf16 weights": {"memory": {"precision": "bf16-weights"}},
    "adamw8bit": {"optimizer": {"name": "adamw8bit"}},
    "muon": {"optimizer": {"name": "muon"}},
    "length warm-up": {"schedule": {"length_warmup": ((4, 4, 2), (7, 8, 3))}},
    "caption dropout": {"data": {"caption_dropout": 0.5}, "schedule": {"length_warmup": ((4, 4, 2),)}},
}


def changed(recipe, sections):
    parts = {name: dataclasses.replace(getattr(recipe, name), **values) for name, values in sections.items()}
    return dataclasses.replace(recipe, **parts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"hidden_size": 2**16}}, "a model of 77,360,922,988 parameters needs 775 GB of RAM, and"),
        ({"model": {"num_layers": 4096, "shared_blocks": None, "hidden_size": 4096}}, "needs .* TB of RAM, and"),
        ({"data": {"batch_size": 10**9}}, r"a step of 1,000,000,000 samples, 1,000,000,000 of them at once"),
        ({"data": {"batch_size": 10**12}, "memory": {"micro_batches": 10**12}}, r"samples, 1 of them at once"),
    ],
    ids=["hidden size", "layers", "batch", "batch in parts"],
)
def test_a_run_too_large_for_the_machine_is_refused_with_both_figures_before_it_takes_any(
    shards, recipe, tmp_path, change, words
):
    model = recipe.model | change.pop("model", {})
    recipe = dataclasses.replace(changed(recipe, change), model=model)
    before, started_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(UserError, match=f"{words}.* are free: take a smaller batch_size or model"):
        train(shards, tmp_path / "out", recipe)
    assert time.monotonic() - started_s < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "names",
    [("fp16", "muon", "length warm-up"), ("bf16 weights", "caption dropout"), ("adamw8bit",)]
    + [pytest.param((name,), marks=pytest.mark.slow) for name in CHANGES if name != "adamw8bit"],
    ids=", ".join,
)
def test_a_run_of_any_kind_goes_on_bit_for_bit_after_a_kill_and_after_control_c(shards, recipe, tmp_path, names):
    for name in names:
        recipe = changed(recipe, CHANGES[name])
    train(shards, tmp_path / "whole", recipe)

    def press():
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(shards, tmp_path / "again", recipe, on_progress=at_step(5, press))
    load_model(tmp_path / "again/model")
    with pytest.raises(Killed):
        train(shards, tmp_path / "again", recipe, on_progress=at_step(11, kill))
    train(shards, tmp_path / "again", recipe)
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(value, whole[name]) for name, value in weights(tmp_path / "again").items())


def test_short_sequences_are_learnt_from_first_and_everything_is_measured(shards, recipe, tmp_path):
    run = DalleRun(shards, tmp_path, changed(recipe, CHANGES["length warm-up"]))
    notes = []
    run.run(lambda done, total, note: notes.append(note))
    lines = [line for line in read_metrics(tmp_path / METRICS) if "loss" in line]
    lengths = [4 + 2 * 2] * 4 + [8 + 3 * 3] * 3 + [12 + 4 * 4] * 5
    assert [line["sample_tokens"] for line in lines] == lengths
    assert [line["tokens"] for line in lines] == [8 * sum(lengths[: step + 1]) for step in range(12)]
    assert all(line["tokens_per_s"] == pytest.approx(line["samples_per_s"] * line["sample_tokens"]) for line in lines)
    assert "8 tokens a sample" in notes[4]
    assert "/s" not in notes[-1]  # the bar tells the speed
    assert run.learner.measure(run.heldout)["heldout_loss"] == pytest.approx(
        run.model.loss(*run.heldout).item(), rel=1e-5
    )


def learnt_from(run):
    """The batches and crops that the run's learner will get, as they come."""
    seen, step = [], run.learner.step

    def remembered(batch, lr, crop=None):
        seen.append((batch, crop))
        return step(batch, lr, crop)

    run.learner.step = remembered
    return seen


def test_without_dropout_the_learner_gets_every_caption_as_it_was_read(shards, recipe, tmp_path):
    recipe = changed(recipe, {"schedule": {"checkpoint_every": 0, "heldout_every": 0}})
    run, other = DalleRun(shards, tmp_path / "run", recipe), DalleRun(shards, tmp_path / "other", recipe)
    seen = learnt_from(run)
    run.run()
    read = [batch for batch, _ in other.batches()]
    assert all(torch.equal(batch.text_ids, ids) for (batch, _), (ids, _) in zip(seen, read, strict=True))


def test_dropped_captions_are_empty_in_the_batch_and_stay_what_they_are_where_it_is_measured(shards, recipe, tmp_path):
    whole = DalleRun(shards, tmp_path / "whole", recipe)
    run = DalleRun(shards, tmp_path / "run", changed(recipe, CHANGES["caption dropout"]))
    read, seen = [batch for batch, _ in whole.batches()], learnt_from(run)
    run.run()
    empty = torch.stack([(batch.text_ids == 0).all(dim=1) for batch, _ in seen])
    assert 0.3 < empty.float().mean() < 0.7
    assert [crop is not None for _, crop in seen] == [True] * 4 + [False] * 8
    for (batch, _), (text_ids, image_codes), gone in zip(seen, read, empty, strict=True):
        assert torch.equal(batch.text_ids[~gone], text_ids[~gone])
        assert torch.equal(batch.image_codes, image_codes)
    assert torch.equal(run.heldout.text_ids, whole.heldout.text_ids)
    measured = [line["heldout_loss"] for line in read_metrics(tmp_path / "run" / METRICS) if "heldout_loss" in line]
    assert measured[-1] == pytest.approx(run.model.loss(*whole.heldout).item(), rel=1e-5)


@torch.no_grad()
def empty_caption_nats(run):
    """Losses of the empty caption and of held-out pictures given it."""
    text_ids = torch.zeros_like(run.heldout.text_ids)
    return [nats.item() for nats in run.model.eval().losses(text_ids, run.heldout.image_codes)]


def test_a_model_learns_the_empty_caption_where_captions_are_dropped(shards, recipe, tmp_path):
    recipe = changed(recipe.override(steps=40), {"schedule": {"checkpoint_every": 0, "heldout_every": 0}})
    runs = [
        DalleRun(shards, tmp_path / str(share), changed(recipe, {"data": {"caption_dropout": share}}))
        for share in (0.0, 0.5)
    ]
    for run in runs:
        run.run()
    (never_text, never_image), (text, image) = map(empty_caption_nats, runs)
    assert text < never_text - 1
    assert image < never_image - 0.05


def test_bfloat16_weights_stay_so_and_leave_a_model_folder_like_any_other(shards, recipe, tmp_path):
    run = DalleRun(shards, tmp_path, changed(recipe, CHANGES["bf16 weights"]))
    run.run()
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.bfloat16}
    masters = [state["master"].dtype for state in run.learner.optimizer.state.values()]
    assert masters == [torch.float32] * len(list(run.model.parameters()))
    assert {value.dtype for value in weights(tmp_path).values()} == {torch.float32}
    measured = [line["heldout_loss"] for line in read_metrics(tmp_path / METRICS) if "heldout_loss" in line]
    assert measured[-1] < measured[0]


def test_a_step_that_only_lowered_a_scale_is_counted_apart(shards, recipe, tmp_path):
    run = DalleRun(shards, tmp_path, changed(recipe, CHANGES["fp16"]))
    run.model.scales.values[0] = 2.0**24
    run.model.layers[0].attention.scale.data.fill_(30.0)
    notes = []
    run.run(lambda done, total, note: notes.append(note))
    assert run.progress.skipped == 0
    assert 0 < run.progress.rescaled < 12
    assert run.model.scales.values[0] < 2.0**24
    assert f"{run.progress.rescaled} steps skipped (gradient scales lowered)" in notes[-1]
    counted = [line["rescaled"] for line in read_metrics(tmp_path / METRICS) if "rescaled" in line]
    assert counted == list(range(1, run.progress.rescaled + 1))


def test_a_gradient_too_large_for_the_smallest_scale_ends_the_run(shards, recipe, tmp_path):
    recipe = changed(recipe, {**CHANGES["fp16"], "optimizer": {"max_skipped_in_row": 3}})
    run = DalleRun(shards, tmp_path, recipe)
    run.model.scales.values[:] = [1.0] * 6
    run.model.weigh = lambda text_nats, image_nats: 1e12 * (text_nats + image_nats)
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row .* lower learning rate"):
        run.run()
    assert run.progress.rescaled == 0


def test_a_runs_lines_name_the_units_of_its_losses():
    progress = Progress(step=3, loss=5.25, heldout_loss=5.5, heldout_image_bits=6.5)
    said = "step 3/3, loss 5.25 nats/token, held-out loss 5.5 nats/token, held-out pictures 6.500 bits/code"
    assert progress.note(3) == said
    assert progress.last_line(3, "the model is in out/model") == f"{said}; the model is in out/model"
