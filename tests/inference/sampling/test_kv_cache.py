"""Each step of the cached decoder against the model run over everything so far."""

import pytest
import torch

from benchmarks.allocations import allocated
from dalle_lean import Dalle, DalleConfig
from dalle_lean.errors import UserError
from inference.sampling.kv_cache import KVCache
from inference.sampling.kv_layout import biases_bytes, score_bias
from inference.sampling.load_kernels import kernels
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.packed_linear import PanelLinear
from inference.sampling.prefill import read_prompts
from tests.inference.tiny_model import lively
from tests.tiny import DALLE_FIELDS

TINY = DALLE_FIELDS | {"image_side": 5, "num_heads": 2, "head_size": 12}
KINDS = {
    "row": {"attention_pattern": ("row",), "last_attention": None},
    "column": {"attention_pattern": ("column",), "last_attention": None},
    "conv centred": {"attention_pattern": ("conv",), "last_attention": None, "conv_kernel": 3},
    "conv corner": {"attention_pattern": ("conv",), "last_attention": None, "conv_kernel": 3, "conv_window": "corner"},
    "conv wider than the picture": {"attention_pattern": ("conv",), "last_attention": None, "conv_kernel": 15},
    "full": {"attention_pattern": ("full",), "last_attention": None},
    "the paper's": {},
}
needs_numba = pytest.mark.skipif(kernels() is None, reason="numba cannot be used")
VARIANTS = {
    "paper": {},
    "no shift": {"token_shift": False},
    "one stream": {"reversible": False},
    "learnt positions": {"rotary": False},
    "untied": {"tie_embeddings": False, "shared_blocks": None},
    "sandwich": {"sandwich_norm": True},
    "not gated": {"ffn_gated": False, "ffn_activation": "relu_squared"},
    "sparse": {"pixelfly_rank": 4, "pixelfly_block_size": 4, "pixelfly_butterfly_size": 2, "head_size": 16},
    "all products by kernels": {"num_heads": 2, "head_size": 16, "image_vocab_size": 64},
    "one row": {"image_side": 1},
    "two rows": {"image_side": 2},
    "all sizes of tiles": {"image_side": 9, "head_size": 84, "text_len": 92},
}


def lively_dalle(**fields) -> Dalle:
    torch.manual_seed(0)
    return lively(Dalle(DalleConfig(**TINY | fields)))


def uncached(model, text, codes):
    """The logits of every code, [B, I, C], by the model itself over whole pictures."""
    config = model.config
    with torch.no_grad():
        return model(text, codes)[:, config.text_len :, config.num_text_tokens :]


def cached(decoder, text, codes, given=0, guided=False):
    """The same step by step, from code `given` on; one row of `codes` a caption, or as many for each."""
    prompts = read_prompts(decoder, text, codes[:: len(codes) // len(text), :given], guided=guided)
    codes = codes.repeat(2 if guided else 1, 1)
    cache = KVCache(decoder, prompts, len(codes))
    first = prompts.logits.repeat_interleave(len(codes) // prompts.count, dim=0)
    steps = (cache.decode_step(codes[:, place]) for place in range(given, codes.shape[1] - 1))
    return torch.stack([first, *steps], dim=1)


def inputs(config, batch, captions=1):
    text = torch.randint(0, config.text_vocab_size, (captions, config.text_len))
    return text, torch.randint(0, config.image_vocab_size, (batch, config.image_len))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_agrees_with_the_uncached_model(kind, variant):
    model = lively_dalle(**KINDS[kind] | VARIANTS[variant])
    text, codes = inputs(model.config, batch=3)
    expected = uncached(model, text.expand(3, -1), codes)
    if variant == "all products by kernels" and kernels() is not None:
        decoder = PackedDecoder(model)
        products = [decoder.output, *(getattr(decoder.layers[0], name) for name in ("qkv", "out", "up", "down"))]
        assert all(isinstance(product, PanelLinear) for product in products)
    for compiled in (True, False):
        steps = cached(PackedDecoder(model, compiled=compiled), text, codes)
        torch.testing.assert_close(steps, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("given", [3, 5, 15, 17, 24])
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_after_given_codes_agree_with_the_uncached_model(kind, shift, given):
    model = lively_dalle(**KINDS[kind] | {"token_shift": shift})
    text, codes = inputs(model.config, batch=3)
    codes[:, :given] = codes[0, :given]
    expected = uncached(model, text.expand(3, -1), codes)[:, given:]
    for compiled in (True, False):
        steps = cached(PackedDecoder(model, compiled=compiled), text, codes, given)
        torch.testing.assert_close(steps, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("given", [0, 10])
@pytest.mark.parametrize("guided", [False, True])
def test_prompts_in_one_batch_are_kept_apart(guided, given, compiled):
    model = lively_dalle()
    text, codes = inputs(model.config, batch=6, captions=3)
    codes[:, :given] = codes[::2, :given].repeat_interleave(2, dim=0)
    expected = uncached(model, text.repeat_interleave(2, dim=0), codes)
    if guided:
        null = uncached(model, torch.zeros(6, model.config.text_len, dtype=torch.long), codes)
        expected = torch.cat([expected, null])
    steps = cached(PackedDecoder(model, compiled=compiled), text, codes, given, guided)
    torch.testing.assert_close(steps, expected[:, given:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("batch", [1, 6, 7, 8, 13])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_row_is_bit_for_bit_the_same_in_any_batch(batch, precision, compiled):
    decoder = PackedDecoder(lively_dalle(), precision, compiled)
    text, codes = inputs(decoder.config, batch=24)
    together = cached(decoder, text, codes)
    assert torch.equal(cached(decoder, text, codes[:batch]), together[:batch])


@needs_numba
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_row_is_bit_for_bit_the_same_in_any_batch_by_tiles_of_all_sizes(precision):
    decoder = PackedDecoder(lively_dalle(**KINDS["full"], **VARIANTS["all sizes of tiles"]), precision)
    text, codes = inputs(decoder.config, batch=7)
    together = cached(decoder, text, codes)
    assert all(torch.equal(cached(decoder, text, codes[:batch]), together[:batch]) for batch in (1, 3, 6))


def test_a_row_is_the_same_in_any_batch_in_int8_where_the_kernel_multiplies_all_layers():
    decoder = PackedDecoder(lively_dalle(**VARIANTS["all products by kernels"]), "int8")
    codes_rows = decoder.model.output.weight[decoder.config.num_text_tokens :]
    if kernels() is None or not kernels().matmul_kernel.multiplies(codes_rows.shape, torch.int8):
        pytest.skip("the kernel multiplies no int8 here")  # where it must, test_matmul_kernel asserts that it does
    assert isinstance(decoder.output, PanelLinear)
    text, codes = inputs(decoder.config, batch=24)
    assert torch.equal(cached(decoder, text, codes[:13]), cached(decoder, text, codes)[:13])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("head_size", "given"), [(12, 0), (12, 10), (16, 0), (16, 12)])
def test_a_row_is_bit_for_bit_the_same_among_other_prompts(head_size, given, compiled):
    decoder = PackedDecoder(lively_dalle(head_size=head_size), compiled=compiled)
    text, codes = inputs(decoder.config, batch=6, captions=3)
    codes[:, :given] = codes[::2, :given].repeat_interleave(2, dim=0)
    alone = cached(decoder, text[1:2], codes[2:4], given)
    assert torch.equal(alone, cached(decoder, text, codes, given)[2:4])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.1), ("int8", 0.1)])
def test_lower_precisions_stay_close(precision, tolerance, compiled):
    model = lively_dalle()
    text, codes = inputs(model.config, batch=3)
    expected = uncached(model, text.expand(3, -1), codes)
    error = (cached(PackedDecoder(model, precision, compiled), text, codes) - expected).norm() / expected.norm()
    assert 1e-4 < error < tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_rows_given_as_tensors_do_the_same(kind):
    """What a CUDA graph records of one row, it replays for all rows of the column."""
    decoder = PackedDecoder(lively_dalle(**KINDS[kind]), compiled=False)
    text, codes = inputs(decoder.config, batch=8)
    expected = cached(decoder, text, codes)
    cache = KVCache(decoder, read_prompts(decoder, text), batch=8)
    for place in range(decoder.config.image_len - 1):
        row, column = divmod(place, decoder.config.image_side)
        with torch.inference_mode():
            logits = cache.step(codes[:, place], column, torch.tensor([row]), torch.tensor([place]))
        assert torch.equal(logits, expected[:, place + 1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_that_starts_again_gives_what_a_new_one_gives(variant):
    config = DalleConfig(**TINY | VARIANTS[variant])
    decoder = PackedDecoder(lively(Dalle(config)), compiled=False)
    text, codes = inputs(config, batch=8)
    given = codes[:1, : config.image_side // 2]
    cache = KVCache(decoder, read_prompts(decoder, text.flip(1) + 1, codes[:1, : config.image_len - 1]), batch=8)
    for prompts in (read_prompts(decoder, text + 1), read_prompts(decoder, text, given)):
        with torch.inference_mode():
            cache.restart(prompts)
        new = KVCache(decoder, prompts, batch=8)
        for place in range(prompts.num_codes, config.image_len - 1):
            assert torch.equal(cache.decode_step(codes[:, place]), new.decode_step(codes[:, place]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_give_what_a_cpu_gives(kind):
    model = lively_dalle(**KINDS[kind])
    text, codes = inputs(model.config, batch=8)
    expected = cached(PackedDecoder(model), text, codes)
    decoder = PackedDecoder(model.cuda(), "fp32")
    prompts = read_prompts(decoder, text)
    cache = KVCache(decoder, prompts, 8)
    steps = [cache.decode_step(codes[:, place].cuda()).cpu() for place in range(model.config.image_len - 1)]
    torch.testing.assert_close(torch.stack(steps, dim=1), expected[:, 1:], atol=1e-3, rtol=0)


def test_a_step_sees_nothing_of_what_comes_later():
    model = lively_dalle()
    text, codes = inputs(model.config, batch=2)
    decoder = PackedDecoder(model)
    cache = KVCache(decoder, read_prompts(decoder, text), batch=2)
    for place in range(12):
        logits = cache.decode_step(codes[:, place])
        with torch.no_grad():
            expected = model(text.expand(2, -1), codes[:, : place + 1])[:, -1, model.config.num_text_tokens :]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@needs_numba
def test_a_row_layer_keeps_one_row_a_convolution_those_it_sees_and_only_columns_all():
    decoder = PackedDecoder(lively_dalle())
    cache = KVCache(decoder, read_prompts(decoder, inputs(decoder.config, 1)[0]), batch=8)
    cells = {kind: window.cells for kind, window in cache.step.windows.items()}
    # 5 x 5 codes; the paper's centred 5 x 5 convolution sees three rows.
    assert cells == {"row": 5, "column": 25, "conv": 3 * 5}
    kinds = decoder.config.layer_kinds
    held = [keys.numel() + values.numel() for keys, values in zip(cache.step.keys, cache.step.values, strict=True)]
    assert held == [2 * 8 * 2 * 12 * cells[kind] for kind in kinds]


@pytest.mark.parametrize("compiled", [True, False])
def test_pictures_share_the_keys_of_their_prompt(compiled):
    decoder = PackedDecoder(lively_dalle(), compiled=compiled)
    prompts = read_prompts(decoder, inputs(decoder.config, 1)[0])
    one, small, large = (KVCache(decoder, prompts, batch).num_bytes for batch in (8, 16, 128))
    assert large - small == 14 * (small - one)
    assert 2 * one - small >= sum(kv.nbytes for kv in prompts.text_kv)


@pytest.mark.parametrize("compiled", [True, False])
def test_reading_leaves_nothing_allocated(compiled):
    decoder = PackedDecoder(lively_dalle(), compiled=compiled)
    text, codes = inputs(decoder.config, batch=8)
    cache = KVCache(decoder, read_prompts(decoder, text), batch=8)

    def read_the_rest():
        while cache.codes_read < decoder.config.image_len - 1:
            cache.decode_step(codes[:, cache.codes_read])

    _, left, _ = allocated(read_the_rest)
    assert left == 0


def test_giving_every_code_is_refused():
    decoder = PackedDecoder(lively_dalle())
    text, codes = inputs(decoder.config, batch=1)
    with pytest.raises(ValueError, match="25 codes are given of 25"):
        read_prompts(decoder, text, codes)


@pytest.mark.parametrize(("precision", "message"), [("fp8", "one of fp32"), ("fp16", "a CPU has no fast float16")])
def test_a_precision_that_cannot_be_is_refused(precision, message):
    with pytest.raises(ValueError, match=message):
        PackedDecoder(lively_dalle(), precision)


def test_pictures_too_large_for_the_memory_are_refused_with_both_figures():
    config = DalleConfig(**TINY | {"image_side": 1024, "attention_pattern": ("full",), "last_attention": "full"})
    with pytest.raises(UserError, match=r"image_side=1024: drawing pictures of 1,048,576 codes needs .* TB of memory"):
        PackedDecoder(Dalle(config))


@pytest.mark.parametrize("kind", ["row", "column", "conv", "full"])
def test_what_score_biases_take_is_foretold(kind):
    config = DalleConfig(**TINY | {"image_side": 32, "attention_pattern": (kind,), "last_attention": kind})
    taken, _, _ = allocated(lambda: score_bias(config, kind, torch.device("cpu"), torch.float32))
    assert taken <= biases_bytes(config, torch.float32) < 1.5 * taken
