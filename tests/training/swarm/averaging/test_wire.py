"""Headers of tensors are checked before a byte of the tensors is read."""

import asyncio
import math

import numpy as np
import pytest
import torch
from hivemind.compression import CompressionInfo, Uniform8BitQuantization
from hivemind.proto import averaging_pb2, runtime_pb2

from training.swarm.averaging.wire import (
    CODEBOOK_SIZE,
    CheckedStub,
    check_tensor,
    checked_parts,
    wire_compression,
)
from training.swarm.config import WireSection

SIZE = (70_000,)


def message(compression="8bit", size=SIZE, **changes):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0))
    made = wire_compression(WireSection(compression=compression)).compress(tensor, CompressionInfo.from_tensor(tensor))
    for name, value in changes.items():
        if name == "said_size":
            del made.size[:]
            made.size.extend(value)
        else:
            setattr(made, name, value)
    return made


@pytest.mark.parametrize("compression", ["fp32", "fp16", "8bit"])
@pytest.mark.parametrize("size", [SIZE, (3, 5), (1,), (0,), ()])
def test_what_honest_peers_send_is_taken(compression, size):
    check_tensor(message(compression, size), size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.int64])
def test_what_a_donor_hands_out_is_taken(dtype):
    tensor = torch.arange(12).view(3, 4).to(dtype)
    made = wire_compression(WireSection(compression="fp32")).compress(tensor, CompressionInfo.from_tensor(tensor))
    check_tensor(made, tensor.shape, dtype)


def oversized_codebook():
    buffer = message().buffer
    return np.int64(2**40).tobytes() + buffer[8:]


LIES = {
    "a type of 4 kB an element": {"dtype": "U1000"},
    "another type": {"dtype": "float64"},
    "another size": {"said_size": (2, *SIZE)},
    "a huge size": {"said_size": (2**31 - 1,) * 3},
    "a short buffer": {"buffer": b"12345678"},
    "no buffer": {"buffer": b""},
    "a long codebook": {"buffer": oversized_codebook()},
    "a compression of tables": {"compression": runtime_pb2.BLOCKWISE_8BIT},
    "a compression by quantiles": {"compression": runtime_pb2.QUANTILE_8BIT},
    "a wish for a gradient": {"requires_grad": True},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused(lie):
    with pytest.raises(ValueError, match=r"tensor|codebook|compression"):
        check_tensor(message(**LIES[lie]), SIZE)


def collect(stream):
    async def run():
        return [item async for item in stream]

    return asyncio.run(run())


async def stream_of(messages):
    for item in messages:
        yield item


def parts(*tensors, code=averaging_pb2.PART_FOR_AVERAGING):
    return [averaging_pb2.AveragingData(code=code, tensor_part=tensor, weight=1.0) for tensor in tensors]


def test_a_senders_parts_pass_in_their_order():
    sent = parts(message(size=(3,)), message(size=(70_000,)))
    assert collect(checked_parts(stream_of(sent), [(3,), (70_000,)])) == sent
    with pytest.raises(ValueError, match=r"expected torch.float32 \[70000\]"):
        collect(checked_parts(stream_of(sent), [(70_000,), (3,)]))


def test_a_part_too_many_is_refused():
    with pytest.raises(ValueError, match="more than the 1 parts of this round"):
        collect(checked_parts(stream_of(parts(message(), message())), [SIZE]))


class Reducer:
    """Takes all parts, then answers."""

    def __init__(self, answers):
        self.answers = answers

    async def rpc_aggregate_part(self, stream):
        async def answer():
            self.taken = [part async for part in stream]
            for item in self.answers:
                yield item

        return answer()


def averages(answers, sent):
    async def stream():
        async for answer in await CheckedStub(Reducer(answers)).rpc_aggregate_part(stream_of(sent)):
            yield answer

    return collect(stream())


def test_a_reducers_averages_pass():
    sent = parts(message(size=(3,)), message())
    answers = parts(message(size=(3,)), message(), code=averaging_pb2.AVERAGED_PART)
    assert averages(answers, sent) == answers


@pytest.mark.parametrize("lie", LIES)
def test_a_reducers_lie_is_refused(lie):
    with pytest.raises(ValueError, match=r"tensor|codebook|compression"):
        averages(parts(message(**LIES[lie]), code=averaging_pb2.AVERAGED_PART), parts(message()))


def test_an_average_of_what_was_not_sent_is_refused():
    with pytest.raises(ValueError, match="more than the 1 parts of this round"):
        averages(parts(message(), message(), code=averaging_pb2.AVERAGED_PART), parts(message()))


def test_a_reducers_refusal_passes():
    refusal = [averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)]
    assert averages(refusal, parts(message())) == refusal


def test_the_codebook_is_hiveminds():
    """Fails if hivemind changes its 8-bit layout."""
    tensor = torch.randn(SIZE)
    made = Uniform8BitQuantization().compress(tensor, CompressionInfo.from_tensor(tensor))
    assert len(made.buffer) == 8 + 4 * CODEBOOK_SIZE + math.prod(SIZE)
