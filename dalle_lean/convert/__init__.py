"""Published checkpoints <-> this project's models."""

from dalle_lean.convert.dalle_pytorch import from_dalle_pytorch, to_dalle_pytorch
from dalle_lean.convert.taming import from_taming

__all__ = ["from_dalle_pytorch", "from_taming", "to_dalle_pytorch"]
