"""Whole pictures' codes: the reference's, the same in every batch, and gone when cancelled."""

import weakref
from contextlib import closing

import pytest
import torch

from dalle_lean.convert import from_dalle_pytorch
from inference.request import Settings
from inference.sampling.filtering import LEAST_PLAUSIBLE, filter_logits, sample
from inference.sampling.kv_cache import KVCache
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.prefill import read_prompts
from inference.sampling.sampler import Row, sample_codes
from tests import golden_data as golden
from tests.inference.tiny_model import tiny_dalle


def last(iterator):
    *_, item = iterator
    return item


CAPTION = torch.arange(1, 17)[None]
FREE = {"top_k": 0, "top_p": 1.0}


@pytest.fixture(scope="module")
def decoder():
    return PackedDecoder(tiny_dalle())


def rows(pictures, **sampling):
    return [Row(picture, Settings(**sampling)) for picture in pictures]


def draw(decoder, pictures, text=CAPTION, start=None, **sampling):
    """The codes [R, I] of these pictures of each caption in `text`."""
    guided = sampling.get("guidance", 1.0) != 1
    prompts = read_prompts(decoder, text, start, guided=guided)
    return last(sample_codes(decoder, prompts, rows(pictures, **sampling) * len(text)))


@pytest.mark.parametrize("name", golden.DALLE_FIXTURES)
def test_the_references_sampled_codes_come_out_of_the_cache(name):
    stored, facts, config = golden.tensors(name), golden.facts(name), golden.config(name)
    decoder = PackedDecoder(from_dalle_pytorch(golden.state_dict(name), config).eval())
    kept = max(int((1 - facts["sample"]["filter_thres"]) * config.num_tokens), 1)
    noise = stored["sample_noise"][:, :, config.num_text_tokens :]
    prompts = read_prompts(decoder, stored["text"])
    cache = KVCache(decoder, prompts, batch=len(stored["text"]))
    logits, codes = prompts.logits, []
    for step in range(config.image_len):
        codes.append(sample(filter_logits(logits, kept), noise[step], facts["sample"]["temperature"]))
        if step + 1 < config.image_len:
            logits = cache.decode_step(codes[-1])
    assert torch.equal(torch.stack(codes, dim=1), stored["sample_codes"])


@pytest.mark.parametrize("batch_size", [1, 3, 8, 11])
def test_picture_i_is_the_same_for_every_batch_size(decoder, batch_size):
    sampling = FREE | {"temperature": 1.5, "seed": 4}
    together = draw(decoder, range(24), **sampling)
    batches = [range(start, min(24, start + batch_size)) for start in range(0, 24, batch_size)]
    assert torch.equal(together, torch.cat([draw(decoder, batch, **sampling) for batch in batches]))


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("num_start", [0, 6])
def test_picture_i_is_the_same_beside_any_other_prompts(decoder, guidance, num_start):
    text = torch.stack([CAPTION[0], CAPTION[0] + 20, CAPTION[0].flip(0)])
    start = torch.arange(3 * num_start).view(3, num_start)
    sampling = FREE | {"seed": 4, "guidance": guidance}
    together = draw(decoder, range(5), text, start, **sampling)
    alone = [draw(decoder, range(5), text[[row]], start[[row]], **sampling) for row in range(3)]
    assert torch.equal(together, torch.cat(alone))


def test_rows_have_settings_of_their_own(decoder):
    samplings = [
        Settings(seed=1, top_k=5, top_p=1.0, temperature=3.0),
        Settings(seed=2, top_k=0, top_p=0.9),
        Settings(seed=3, **FREE, temperature=9.0),
        Settings(temperature=0.0),
    ]
    prompts = read_prompts(decoder, CAPTION)
    together = last(sample_codes(decoder, prompts, [Row(7, sampling) for sampling in samplings]))
    alone = [last(sample_codes(decoder, prompts, [Row(7, sampling)])) for sampling in samplings]
    assert torch.equal(together, torch.cat(alone))
    assert len({tuple(codes.tolist()) for codes in together}) == 4


def test_pictures_and_seeds_differ(decoder):
    first, second = draw(decoder, range(2), seed=0, **FREE)
    assert not torch.equal(first, second)
    assert not torch.equal(first, draw(decoder, range(1), seed=1, **FREE)[0])


def test_codes_come_one_by_one_and_stay(decoder):
    lengths, so_far = [], torch.empty(3, 0, dtype=torch.long)
    for codes in sample_codes(decoder, read_prompts(decoder, CAPTION), rows(range(3))):
        assert torch.equal(codes[:, :-1], so_far)
        so_far = codes.clone()
        lengths.append(codes.shape[1])
    assert lengths == list(range(1, decoder.config.image_len + 1))
    assert so_far.shape == (3, 16)


def best_codes(decoder, text, codes, null_share=0.0):
    """The uncached model's likeliest code after each prefix; guided away from the empty caption by `null_share`."""
    config = decoder.config
    with torch.no_grad():
        logits = decoder.model(text.expand(len(codes), -1), codes)
        null = decoder.model(torch.zeros_like(text).expand(len(codes), -1), codes)
    guided = logits + null_share * (logits - null)
    if null_share:
        likely = logits.softmax(dim=-1)
        guided[likely < LEAST_PLAUSIBLE * likely.amax(dim=-1, keepdim=True)] = -torch.inf
    return guided[:, config.text_len :].argmax(dim=-1) - config.num_text_tokens


def test_greedy_codes_are_the_uncached_models_best(decoder):
    codes = draw(decoder, range(2), temperature=0)
    assert torch.equal(codes, best_codes(decoder, CAPTION, codes))


def test_guided_greedy_codes_are_the_best_away_from_the_empty_caption(decoder):
    codes = draw(decoder, range(2), temperature=0, guidance=3.0)
    assert torch.equal(codes, best_codes(decoder, CAPTION, codes, null_share=2.0))
    assert not torch.equal(codes, draw(decoder, range(2), temperature=0))


@pytest.mark.parametrize("num_start", [1, 4, 9, 15])
def test_a_given_start_is_kept_and_gone_on_from(decoder, num_start):
    start = torch.arange(10, 10 + num_start)
    codes = draw(decoder, range(2), start=start[None], temperature=0)
    assert torch.equal(codes[:, :num_start], start.expand(2, -1))
    assert torch.equal(codes[:, num_start:], best_codes(decoder, CAPTION, codes)[:, num_start:])


def test_going_on_from_a_pictures_own_start_gives_the_same_picture(decoder):
    whole = draw(decoder, range(1), seed=9, **FREE)
    again = draw(decoder, range(1), start=whole[:, :8], seed=9, **FREE)
    assert torch.equal(whole, again)


def test_cancelling_frees_the_cache(decoder, monkeypatch):
    caches = weakref.WeakSet()
    initialise = KVCache.__init__

    def remember(cache, *arguments):
        initialise(cache, *arguments)
        caches.add(cache)

    monkeypatch.setattr(KVCache, "__init__", remember)
    codes = sample_codes(decoder, read_prompts(decoder, CAPTION), rows(range(8)))
    next(codes)
    assert len(caches) == 1
    codes.close()
    assert len(caches) == 0


def test_graphs_are_recorded_once_for_a_batch_size_and_freed_where_drawing_is_cancelled(decoder, monkeypatch):
    decoder = PackedDecoder(decoder.model, compiled=False)  # as on a GPU
    made, captions = [], [CAPTION, CAPTION.flip(1), CAPTION]
    expected = [draw(decoder, range(8), text) for text in captions]
    initialise = KVCache.__init__

    def with_graphs(cache, decoder, prompts, batch):
        initialise(cache, decoder, prompts, batch)
        cache.graphs = cache.step
        made.append(batch)

    monkeypatch.setattr(KVCache, "__init__", with_graphs)
    pairs = zip(captions, expected, strict=True)
    assert all(torch.equal(draw(decoder, range(8), text), codes) for text, codes in pairs)
    assert made == [8]
    draw(decoder, range(4))
    assert made == [8, 4]
    with closing(sample_codes(decoder, read_prompts(decoder, CAPTION), rows(range(4)))) as codes:
        next(codes)
    assert made == [8, 4]
    assert decoder.idle_cache is None


def test_a_consumer_may_train_between_two_codes(decoder):
    for _ in sample_codes(decoder, read_prompts(decoder, CAPTION), rows(range(1))):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
