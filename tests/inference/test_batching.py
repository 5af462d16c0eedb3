"""Which pictures are drawn together, and how many at once."""

import pytest
import torch

from dalle_lean import DalleConfig
from dalle_lean.errors import is_out_of_memory
from inference.batching import (
    Kind,
    Part,
    default_batch_size,
    halve,
    halve_large,
    num_pictures,
    picture_bytes,
    plan_batches,
    whole_groups,
)
from inference.sampling.kv_cache import KVCache
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.prefill import read_prompts
from tests.inference.tiny_model import tiny_dalle

CPU = torch.device("cpu")
PLAIN, GUIDED = Kind(False, 0), Kind(True, 0)


def sizes(batches):
    return [num_pictures(batch) for batch in batches]


def rows_of(batches, kinds):
    """Rows of attention that each batch holds."""
    return [
        sum(whole_groups(len(part.pictures)) * (2 if kinds[part.request].guided else 1) for part in batch)
        for batch in batches
    ]


@pytest.mark.parametrize("counts", [[1], [128], [4, 4, 4, 4, 4], [3, 128, 3, 7], [130, 2], [1] * 20])
@pytest.mark.parametrize("batch_size", [1, 8, 64])
@pytest.mark.parametrize("kind", [PLAIN, GUIDED])
def test_every_picture_is_drawn_once_in_batches_that_are_not_too_large(counts, batch_size, kind):
    kinds = [kind] * len(counts)
    batches = plan_batches(counts, kinds, batch_size)
    drawn = [(part.request, picture) for batch in batches for part in batch for picture in part.pictures]
    assert sorted(drawn) == [(request, picture) for request, count in enumerate(counts) for picture in range(count)]
    assert max(sizes(batches)) <= batch_size
    assert all(len({len(part.pictures) for part in batch}) == 1 for batch in batches)
    # A guided picture takes two rows, and never fewer than a group each.
    assert max(rows_of(batches, kinds)) <= max(whole_groups(batch_size), 16 if kind.guided else 8)


def test_small_requests_share_a_batch():
    assert sizes(plan_batches([8] * 20, [PLAIN] * 20, 64)) == [64, 64, 32]
    # Four pictures of a prompt take as many rows as eight.
    assert sizes(plan_batches([4] * 20, [PLAIN] * 20, 64)) == [32, 32, 16]


def test_requests_of_another_kind_have_batches_of_their_own():
    assert sizes(plan_batches([4] * 4, [PLAIN, GUIDED] * 2, 64)) == [8, 8]
    assert sizes(plan_batches([4] * 4, [PLAIN, Kind(False, 3)] * 2, 64)) == [8, 8]


def test_halving_loses_no_picture():
    batch = [Part(0, range(5)), Part(1, range(5)), Part(2, range(5))]
    pieces, waiting = [], [batch]
    while waiting:
        piece = waiting.pop()
        if sizes([piece]) == [1]:
            pieces.append((piece[0].request, *piece[0].pictures))
        else:
            waiting += halve(piece)
    assert sorted(pieces) == [(request, picture) for request in range(3) for picture in range(5)]
    with pytest.raises(MemoryError, match="even one picture"):
        halve([Part(3, range(1))])


def test_waiting_batches_with_as_many_rows_as_one_without_memory_are_halved_too():
    kinds = [PLAIN, PLAIN, GUIDED, GUIDED]
    waiting = [[Part(1, range(3))], [Part(2, range(2))], [Part(3, range(1))]]
    assert sizes(halve_large([Part(0, range(4))], waiting, kinds)) == [2, 2, 3, 1, 1, 1]
    # A guided picture takes as many rows as two others, but cannot be halved.
    assert sizes(halve_large([Part(0, range(2))], waiting, kinds)) == [1, 1, 1, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("no"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_failures(error, expected):
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pictures_bytes_are_those_its_cache_holds(precision):
    decoder = PackedDecoder(tiny_dalle(), precision)
    prompts = read_prompts(decoder, torch.ones(1, 16, dtype=torch.long))
    small, large = (KVCache(decoder, prompts, batch).num_bytes for batch in (8, 24))
    assert (large - small) / 16 == picture_bytes(decoder.config, decoder.dtype)


def test_the_default_batch_is_what_half_the_free_memory_remembers(monkeypatch):
    config = DalleConfig.paper()
    # Of 64 layers 16 keep 1,024 keys and values of 1,024 channels, the others a row or three.
    assert 0.14e9 < picture_bytes(config, torch.float32) < 0.16e9
    for free, expected in ((1e9, 8), (16e9, 48), (200e9, 128)):
        monkeypatch.setattr("inference.batching.free_bytes", lambda device, free=free: free)
        assert default_batch_size(config, torch.float32, CPU) == expected


def test_the_cache_of_the_batch_before_counts_as_free(monkeypatch):
    monkeypatch.setattr("inference.batching.free_bytes", lambda device: 9e9)
    assert default_batch_size(DalleConfig.paper(), torch.float32, CPU, idle_bytes=7 * 10**9) == 48


def test_in_a_container_the_default_batch_is_what_its_limit_allows(monkeypatch, tmp_path):
    config = DalleConfig.paper()
    assert default_batch_size(config, torch.float32, CPU) > 8
    (tmp_path / "memory.max").write_text("2000000000\n")
    (tmp_path / "memory.current").write_text("1000000000\n")
    monkeypatch.setattr("dalle_lean.free_memory.CONTROL_GROUPS", tmp_path)
    assert default_batch_size(config, torch.float32, CPU) == 8
