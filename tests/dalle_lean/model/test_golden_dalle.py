"""The model agrees number for number with the public reference implementations."""

import pytest
import torch

from dalle_lean import MemoryPlan
from dalle_lean.convert import from_dalle_pytorch, to_dalle_pytorch
from tests import golden_data as golden

fixtures = pytest.mark.parametrize("name", golden.DALLE_FIXTURES)


def model_of(name):
    return from_dalle_pytorch(golden.state_dict(name), golden.config(name))


@fixtures
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_logits_are_the_references(name, dtype, bound):
    stored, rows = golden.tensors(name), golden.facts(name)["logits_rows"]
    with torch.no_grad():
        logits = model_of(name).to(dtype)(stored["text"][rows], stored["image"][rows])
    allowed = logits > torch.finfo(dtype).min
    reference = stored["logits_f64"]
    assert (logits.double() - reference)[allowed].abs().max() < bound
    assert allowed.sum() == len(rows) * (16 * (100 + 16) + 64 * 128)


@fixtures
@pytest.mark.parametrize("activations", ["keep", "reversible"])
def test_loss_and_every_gradient_are_the_references(name, activations):
    stored = golden.tensors(name)
    model = model_of(name)
    model.plan = MemoryPlan(activations=activations)
    loss = model.loss(stored["text"], stored["image"])
    assert abs(loss.item() - golden.facts(name)["loss_f64"]) < 1e-6
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    for key, parameter in model.named_parameters():
        parameter.data = gradients[key]
    published = to_dalle_pytorch(model, golden.generation(name))
    references = {key.removeprefix("grad."): value for key, value in stored.items() if key.startswith("grad.")}
    assert len(references) == len(gradients)
    for key, reference in references.items():
        assert (published[key] - reference).abs().max() <= 1e-5 * reference.abs().max(), key


@fixtures
def test_sampling_without_a_cache_gives_the_references_codes(name):
    """Each code follows from those before it, so one pass over the reference's codes samples all of them."""
    stored, facts = golden.tensors(name), golden.facts(name)
    model, config = model_of(name), golden.config(name)
    kept = max(int((1 - facts["sample"]["filter_thres"]) * config.num_tokens), 1)
    with torch.no_grad():
        logits = model(stored["text"], stored["sample_codes"][:, :-1])[:, -config.image_len :]
    best = logits.topk(kept)
    filtered = torch.full_like(logits, -torch.inf).scatter(2, best.indices, best.values)
    noise = stored["sample_noise"].transpose(0, 1)
    ids = (filtered / facts["sample"]["temperature"] + noise).argmax(dim=-1)
    assert torch.equal(ids - config.num_text_tokens, stored["sample_codes"])
