"""Prompt -> codes -> pixels -> CLIP scores -> the best few."""

from typing import TYPE_CHECKING, Any

from inference.request import Picture

if TYPE_CHECKING:
    from inference.generator import Generator

__all__ = ["Generator", "Picture"]


def __getattr__(name: str) -> Any:
    """Import Generator on first use, so that mistakes in options are reported without waiting for torch."""
    if name != "Generator":
        raise AttributeError(f"module 'inference' has no attribute {name!r}")
    from inference.generator import Generator

    return Generator
