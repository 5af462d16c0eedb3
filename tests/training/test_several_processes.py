"""Several processes learn as one does, with torch's own parallelism (gloo on the CPU)."""

import dataclasses

import pytest
from safetensors.torch import load_file

from dalle_lean import DalleConfig
from dalle_lean.errors import UserError
from tests.training.runs import saved_progress, weights
from tests.training.several import CASES, LAMB, QUICK, learnt, run_together, tiny_recipe, train_recipe
from training.run.processes import Processes, open_processes
from training.run.recipe import DataRecipe, MemoryRecipe, Recipe, load_recipe
from training.step.data_parallel import use_fsdp
from training.trainer import train

TWO = Processes(world=2)


def largest_difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@pytest.mark.long
@pytest.mark.parametrize("names", [QUICK, pytest.param(sorted({*CASES} - {*QUICK}), marks=pytest.mark.slow)])
def test_two_processes_learn_in_as_many_steps_what_one_learns(tmp_path, names):
    run_together(2, "learn_all", tmp_path, *names)
    for name in names:
        _, plan, optimizer = CASES[name]
        expected, losses = learnt(tiny_recipe(plan, optimizer))
        together = load_file(tmp_path / f"{name}.safetensors")
        assert together.pop("losses").tolist() == pytest.approx(losses, abs=1e-6), name
        assert largest_difference(together, expected) < 1e-6, name
        assert losses[-1] < losses[0] - 0.1, name


@pytest.fixture(scope="module")
def undisturbed(shards, tmp_path_factory):
    """The folder of a whole run of one process."""
    out = tmp_path_factory.mktemp("whole")
    train(shards, out, train_recipe())
    return out


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_are_continued_by_one(shards, undisturbed, tmp_path):
    said = run_together(2, "train_until_killed", shards, tmp_path, "fsdp", 1, 7, check=False)
    assert "another of the processes has ended" in said
    assert saved_progress(tmp_path)["step"] == 6
    end = train(shards, tmp_path, train_recipe())
    assert largest_difference(weights(tmp_path), weights(undisturbed)) < 1e-6
    assert dataclasses.asdict(end)["position"] == saved_progress(undisturbed)["position"]


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def parallel_and_whole(request, shards, tmp_path_factory):
    """Each kind of parallelism, and the folder of a whole run of two processes with it."""
    out = tmp_path_factory.mktemp(request.param)
    run_together(2, "train_until_killed", shards, out, request.param, -1, 0)
    return request.param, out


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "step"), [(0, 1), (1, 4), (0, 6), (0, "saving"), (1, "saving")])
def test_processes_killed_at_any_moment_and_continued_end_with_the_weights_of_undisturbed_ones(
    shards, parallel_and_whole, tmp_path, rank, step
):
    parallel, whole = parallel_and_whole
    run_together(2, "train_until_killed", shards, tmp_path, parallel, rank, step, check=False)
    run_together(2, "train_until_killed", shards, tmp_path, parallel, -1, 0)
    assert largest_difference(weights(tmp_path), weights(whole)) == 0


@pytest.mark.slow
def test_stopped_on_four_processes_a_run_goes_on_with_two_and_one_and_the_same_batches(shards, undisturbed, tmp_path):
    run_together(4, "train_until_killed", shards, tmp_path, "fsdp", 3, 4, check=False)
    run_together(2, "train_until_killed", shards, tmp_path, "ddp", 1, 8, check=False)
    assert saved_progress(tmp_path)["step"] == 6
    train(shards, tmp_path, train_recipe())
    assert largest_difference(weights(tmp_path), weights(undisturbed)) < 1e-6


def test_what_a_model_in_shards_cannot_have_is_refused_by_name():
    recipe = load_recipe("paper")
    with pytest.raises(UserError, match=r"needs .*eight_bit = false, .*offload_optimizer = false.*; or take"):
        use_fsdp("fsdp", DalleConfig.from_dict(recipe.model), recipe, TWO)
    assert use_fsdp("fsdp", DalleConfig.from_dict(recipe.model), tiny_recipe("keep", LAMB), TWO)


def test_a_batch_that_processes_cannot_share_equally_is_refused():
    with pytest.raises(UserError, match="batch_size = 8: must be a multiple of the 3 processes"):
        tiny_recipe("keep", LAMB).share_of(3)


def test_a_share_has_as_many_samples_at_once_as_the_whole_batch():
    share = tiny_recipe("keep", LAMB).share_of(2)
    assert (share.data.batch_size, share.memory.micro_batches) == (4, 2)


def test_a_share_that_its_micro_batches_do_not_divide_has_more_of_them():
    recipe = Recipe(data=DataRecipe(batch_size=18), memory=MemoryRecipe(micro_batches=3))
    share = recipe.share_of(2)
    assert (share.data.batch_size, share.memory.micro_batches) == (9, 3)


def test_processes_cannot_share_a_gpu(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one GPU for each"):
        open_processes("cuda:0")


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert open_processes("cpu") == Processes()
