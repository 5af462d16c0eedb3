"""Batches: of one size, from one part, encoded side by side on a CPU."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from preprocessing.encoding.decode_pool import DecodePool
from preprocessing.encoding.decoding import Decoding, Rejection
from preprocessing.encoding.encode import preprocess
from preprocessing.encoding.pipeline import Batch, Encoder, EncodingJob, Part, prepare
from preprocessing.sources import open_source
from tests.preprocessing.runs import contents


@pytest.fixture
def torch_threads():
    """Sets torch's threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_batches_encoded_side_by_side_have_the_codes_of_one_after_the_other(discs, vqgan, tmp_path, torch_threads):
    for threads in (1, 3):
        torch_threads(threads)
        with Encoder(vqgan, 4, 16, bf16=False) as encoder:
            assert encoder.at_once == threads
        preprocess(open_source(discs, 8), tmp_path / str(threads), vqgan, batch_size=4)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_encoding_side_by_side_leaves_torch_its_threads(vqgan, torch_threads):
    torch_threads(3)
    with Encoder(vqgan, 4, 16, bf16=False) as encoder:
        assert encoder.threads.submit(torch.get_num_threads).result() == 1
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3


def test_large_batches_are_encoded_one_after_the_other(vqgan, torch_threads):
    torch_threads(3)
    with Encoder(vqgan, 2**10, 256, bf16=False) as encoder:
        assert encoder.at_once == 1
        assert encoder.threads.submit(torch.get_num_threads).result() == 3


@pytest.fixture
def job(discs, tmp_path):
    return EncodingJob(
        source=open_source(discs, 8),
        out=tmp_path,
        decoding=Decoding(side=16),
        batch_size=3,
        bf16=False,
        explain=False,
        vqgan="",
        workers=1,
        memory_bytes=2**28,
    )


def test_every_batch_has_one_size_and_no_part_shares_one(job):
    with DecodePool(job.decoding, workers=1) as pool:
        events = list(prepare(job, pool, [2, 0], pinned=False))
    batches = [event for event in events if isinstance(event, Batch)]
    assert {event.pixels.shape for event in batches} == {(3, 16, 16, 3)}
    assert [(event.part, len(event.rows), event.seen) for event in batches] == [
        (2, 3, 3),
        (2, 3, 6),
        (2, 2, 8),
        (0, 3, 3),
        (0, 3, 6),
        (0, 2, 8),
    ]
    assert not batches[2].pixels[2].any()


@pytest.mark.parametrize("explain", [False, True])
def test_a_rejection_is_kept_in_memory_only_to_be_explained(job, explain):
    part = Part(0, replace(job, explain=explain), pinned=False)
    for row in range(1000):
        part.add(Rejection(f"row {row}", "picture_missing"))
    assert part.rejected == {"picture_missing": 1000}
    assert len(part.explained) == (1000 if explain else 0)
