"""Compression of tensors on the wire, and checks before hivemind decodes them.

A forged header can cost gigabytes of memory or crash the process.
"""

import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import torch
from hivemind.compression import (
    CompressionBase,
    Float16Compression,
    NoCompression,
    SizeAdaptiveCompression,
    Uniform8BitQuantization,
)
from hivemind.proto import averaging_pb2, runtime_pb2

from training.swarm.config import WireSection

CODEBOOK_SIZE = 256  # float32 entries of an 8-bit tensor's codebook, which an int64 count precedes


def wire_compression(wire: WireSection) -> CompressionBase:
    """The compression that the settings name."""
    if wire.compression == "fp32":
        return NoCompression()
    if wire.compression == "fp16":
        return Float16Compression()
    return SizeAdaptiveCompression(
        threshold=wire.min_eight_bit_numel, less=Float16Compression(), greater_equal=Uniform8BitQuantization()
    )


def check_tensor(message: runtime_pb2.Tensor, size: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
    """ValueError unless the message holds a whole tensor of this size and type, in a compression that runs use."""
    values = math.prod(size)
    buffer_bytes = {
        runtime_pb2.NONE: dtype.itemsize * values,
        runtime_pb2.FLOAT16: 2 * values,
        runtime_pb2.UNIFORM_8BIT: 8 + 4 * CODEBOOK_SIZE + values,
    }.get(message.compression)
    if buffer_bytes is None:
        name = runtime_pb2.CompressionType.Name(message.compression)
        raise ValueError(f"a tensor compressed with {name}, which no run uses")
    if tuple(message.size) != tuple(size) or message.dtype != str(dtype).removeprefix("torch."):
        raise ValueError(f"a tensor of {message.dtype[:20]!r} {list(message.size)[:8]}; expected {dtype} {list(size)}")
    if len(message.buffer) != buffer_bytes:
        raise ValueError(f"a tensor of {len(message.buffer)} bytes; expected {buffer_bytes}")
    if message.compression == runtime_pb2.UNIFORM_8BIT:
        (entries,) = np.frombuffer(message.buffer, np.int64, count=1)
        if entries != CODEBOOK_SIZE:
            raise ValueError(f"a codebook of {entries} entries instead of {CODEBOOK_SIZE}")
    if message.requires_grad:
        raise ValueError("a tensor that requires a gradient")


async def checked_parts(
    stream: AsyncIterator[averaging_pb2.AveragingData], sizes: Sequence[Sequence[int]]
) -> AsyncIterator[averaging_pb2.AveragingData]:
    """The messages of a stream, whose n-th part must have the n-th size; ValueError otherwise.

    `sizes` may grow meanwhile. Messages without a part, which are refusals, pass.
    """
    index = 0
    async for message in stream:
        if message.HasField("tensor_part"):
            if index >= len(sizes):
                raise ValueError(f"more than the {len(sizes)} parts of this round")
            check_tensor(message.tensor_part, sizes[index])
            index += 1
        yield message


class CheckedStub:
    """A reducer's stub that accepts only answers of the sizes that were sent.

    Args:
        on_answer: called with each answer.
    """

    def __init__(self, stub: Any, on_answer: Callable[[averaging_pb2.AveragingData], None] = lambda _: None):
        self.stub, self.on_answer = stub, on_answer

    async def rpc_aggregate_part(
        self, parts: AsyncIterator[averaging_pb2.AveragingData]
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """As hivemind's stub: returns the stream of answers."""
        sizes: list[tuple[int, ...]] = []

        async def sent() -> AsyncIterator[averaging_pb2.AveragingData]:
            async for message in parts:
                sizes.append(tuple(message.tensor_part.size))
                yield message

        answers = checked_parts(await self.stub.rpc_aggregate_part(sent()), sizes)

        async def received() -> AsyncIterator[averaging_pb2.AveragingData]:
            async for answer in answers:
                self.on_answer(answer)
                yield answer

        return received()
