"""What a tensor becomes on the wire, by its size."""

from hivemind.compression import (
    CompressionBase,
    Float16Compression,
    NoCompression,
    SizeAdaptiveCompression,
    Uniform8BitQuantization,
)

from training.swarm.config import WireSection


def wire_compression(wire: WireSection) -> CompressionBase:
    """The compression that the settings name."""
    if wire.compression == "fp32":
        return NoCompression()
    if wire.compression == "fp16":
        return Float16Compression()
    return SizeAdaptiveCompression(
        threshold=wire.min_eight_bit_numel, less=Float16Compression(), greater_equal=Uniform8BitQuantization()
    )
