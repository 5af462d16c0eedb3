import pytest
import torch
from torch import nn

from dalle_lean import MemoryPlan
from dalle_lean.model.grad_scales import BranchScales
from dalle_lean.optim.lamb import Lamb
from training.run.checkpoint import NAME, has_checkpoint, load_checkpoint, save_checkpoint
from training.run.recipe import OptimizerRecipe
from training.step.learner import build_optimizer

RUN = {"model": {"num_layers": 2}, "betas": (0.9, 0.96)}


def parts(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(300, 300)
    optimizer = Lamb(model.parameters(), lr=0.01)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_everything_comes_back(tmp_path):
    saved = parts()
    progress = {"step": 7, "position": (1, 30), "loss": 1.5}
    save_checkpoint(tmp_path, **saved, progress=progress, run=RUN)
    following = torch.rand(3)

    loaded = parts(seed=1)
    assert load_checkpoint(tmp_path, **loaded, run=RUN) == progress
    assert torch.equal(torch.rand(3), following)
    assert torch.equal(loaded["model"].weight, saved["model"].weight)
    for one, other in zip(loaded["optimizer"].state.values(), saved["optimizer"].state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in other)


def take_steps(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()


@pytest.mark.parametrize("name", ["lamb", "adamw", "adamw8bit"])
def test_each_optimizer_resumes_bit_for_bit(tmp_path, name):
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    gradients = [torch.randn(170, 180, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    models = [nn.Linear(180, 170) for _ in range(2)]
    optimizers = [build_optimizer(model, OptimizerRecipe(name=name), MemoryPlan()) for model in models]
    take_steps(optimizers[0], models[0].weight, gradients[:2])
    save_checkpoint(tmp_path, model=models[0], optimizer=optimizers[0], progress={}, run={})
    load_checkpoint(tmp_path, model=models[1], optimizer=optimizers[1], run={})
    for model, optimizer in zip(models, optimizers, strict=True):
        take_steps(optimizer, model.weight, gradients[2:])
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_new_folder_has_no_checkpoint(tmp_path):
    assert not has_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path, **parts(), run=RUN) is None


def test_a_checkpoint_of_another_run_is_refused_by_what_differs(tmp_path):
    save_checkpoint(tmp_path, **parts(), progress={}, run=RUN)
    with pytest.raises(ValueError, match=r"another run \(num_layers was 2, now 3\)"):
        load_checkpoint(tmp_path, **parts(), run={**RUN, "model": {"num_layers": 3}})


def test_a_checkpoint_made_before_a_setting_existed_had_its_default(tmp_path):
    save_checkpoint(tmp_path, **parts(), progress={}, run=RUN)
    now = {**RUN, "model": {"num_layers": 2, "gated": True}}
    assert load_checkpoint(tmp_path, **parts(), run=now, defaults={"model": {"gated": True}}) == {}
    with pytest.raises(ValueError, match=r"another run \(gated was False, now True\)"):
        load_checkpoint(tmp_path, **parts(), run=now, defaults={"model": {"gated": False}})


def test_a_checkpoint_of_another_kind_of_run_is_refused_by_what_it_lacks(tmp_path):
    save_checkpoint(tmp_path, **parts(), progress={}, run={"pictures": 3})
    with pytest.raises(ValueError, match="holds a run of another kind; name"):
        load_checkpoint(tmp_path, **parts(), run=RUN, defaults={"model": {"gated": True}})


def test_a_checkpoint_without_gradient_scales_leaves_them_as_they_are(tmp_path):
    save_checkpoint(tmp_path, **parts(), progress={}, run=RUN)
    state = torch.load(tmp_path / NAME, weights_only=True)
    del state["scales"]
    torch.save(state, tmp_path / NAME)
    scales = BranchScales(2)
    scales.values = [64.0, 64.0]
    load_checkpoint(tmp_path, **parts(), run=RUN, scales=scales)
    assert scales.values == [64.0, 64.0]


@pytest.mark.parametrize("keep_bytes", [0, 10, 5000])
def test_a_damaged_checkpoint_is_named(tmp_path, keep_bytes):
    save_checkpoint(tmp_path, **parts(), progress={}, run=RUN)
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole[:keep_bytes])
    with pytest.raises(ValueError, match=r"state\.pt is damaged"):
        load_checkpoint(tmp_path, **parts(), run=RUN)


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    (tmp_path / NAME).parent.mkdir()
    torch.save({"format": print}, tmp_path / NAME)
    with pytest.raises(ValueError, match=r"state\.pt is damaged"):
        load_checkpoint(tmp_path, **parts(), run=RUN)
