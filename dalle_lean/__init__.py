"""The model and its parts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dalle_lean.io.model_folder import load_model, save_model
    from dalle_lean.memory import MemoryPlan
    from dalle_lean.model.config import DalleConfig
    from dalle_lean.model.dalle import Dalle

__all__ = ["Dalle", "DalleConfig", "MemoryPlan", "load_model", "save_model"]

_MODULE_OF = {
    "Dalle": "dalle_lean.model.dalle",
    "DalleConfig": "dalle_lean.model.config",
    "MemoryPlan": "dalle_lean.memory",
    "load_model": "dalle_lean.io.model_folder",
    "save_model": "dalle_lean.io.model_folder",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `dalle-lean --help` does not wait for torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dalle_lean' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
