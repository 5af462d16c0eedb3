"""Whole pictures' codes: the reference's, the same in every batch, and gone when cancelled."""

import gc
import weakref

import pytest
import torch

from dalle_lean.convert import from_dalle_pytorch
from inference.cache import PictureCache, read_prompt
from inference.filtering import choose, filter_logits
from inference.sampler import sample_codes
from tests import golden_data as golden
from tests.inference.tiny_model import tiny_dalle


def last(iterator):
    *_, item = iterator
    return item


@pytest.fixture(scope="module")
def model():
    return tiny_dalle()


@pytest.fixture(scope="module")
def prompt(model):
    return read_prompt(model, torch.arange(1, 17)[None])


@pytest.mark.parametrize("name", golden.DALLE_FIXTURES)
def test_the_references_sampled_codes_come_out_of_the_cache(name):
    stored, facts, config = golden.tensors(name), golden.facts(name), golden.config(name)
    model = from_dalle_pytorch(golden.state_dict(name), config).eval()
    kept = max(int((1 - facts["sample"]["filter_thres"]) * config.num_tokens), 1)
    noise = stored["sample_noise"][:, :, config.num_text_tokens :]
    for row, text in enumerate(stored["text"]):
        prompt = read_prompt(model, text[None])
        cache = PictureCache(model, prompt, batch=1)
        logits, codes = prompt.logits[None], []
        for step in range(config.image_len):
            codes.append(choose(filter_logits(logits, kept), noise[step, row][None], facts["sample"]["temperature"]))
            if step + 1 < config.image_len:
                logits = cache.read(codes[-1])
        assert torch.equal(torch.cat(codes), stored["sample_codes"][row])


@pytest.mark.parametrize("batch_size", [1, 3, 8, 11])
def test_picture_i_is_the_same_for_every_batch_size(model, prompt, batch_size):
    settings = {"top_k": 0, "top_p": 1.0, "temperature": 1.5, "seed": 4}
    together = last(sample_codes(model, prompt, range(24), **settings))
    batches = [range(start, min(24, start + batch_size)) for start in range(0, 24, batch_size)]
    apart = torch.cat([last(sample_codes(model, prompt, batch, **settings)) for batch in batches])
    assert torch.equal(together, apart)


def test_pictures_and_seeds_differ(model, prompt):
    first, second = last(sample_codes(model, prompt, range(2), top_k=0, top_p=1.0, seed=0))
    other_seed = last(sample_codes(model, prompt, range(1), top_k=0, top_p=1.0, seed=1))[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first, other_seed)


def test_codes_come_one_by_one_and_stay(model, prompt):
    lengths, so_far = [], torch.empty(3, 0, dtype=torch.long)
    for codes in sample_codes(model, prompt, range(3)):
        assert torch.equal(codes[:, :-1], so_far)
        so_far = codes.clone()
        lengths.append(codes.shape[1])
    assert lengths == list(range(1, model.config.image_len + 1))
    assert so_far.shape == (3, 16)


def test_greedy_codes_are_the_uncached_models_best(model, prompt):
    codes = last(sample_codes(model, prompt, range(2), temperature=0))
    with torch.no_grad():
        logits = model(torch.arange(1, 17).expand(2, -1), codes)
    best = logits[:, model.config.text_len :].argmax(dim=-1) - model.config.num_text_tokens
    assert torch.equal(codes, best)


def test_cancelling_frees_the_cache(model, prompt, monkeypatch):
    caches = weakref.WeakSet()
    initialise = PictureCache.__init__

    def remember(cache, *arguments):
        initialise(cache, *arguments)
        caches.add(cache)

    monkeypatch.setattr(PictureCache, "__init__", remember)
    codes = sample_codes(model, prompt, range(8))
    next(codes)
    assert len(caches) == 1
    codes.close()
    gc.collect()
    assert len(caches) == 0


def test_a_consumer_may_train_between_two_codes(model, prompt):
    for _ in sample_codes(model, prompt, range(1)):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
