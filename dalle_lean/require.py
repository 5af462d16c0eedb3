"""Optional packages, imported where they are used."""

import importlib
from types import ModuleType

from dalle_lean.errors import UserError


class MissingPackage(UserError, ImportError):
    """An optional package is not installed; the message says what to install."""


def require(module: str, extra: str) -> ModuleType:
    """Import `module`; MissingPackage names the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        command = f"pip install 'dalle-lean[{extra}]'"
        raise MissingPackage(f"{error.name} is not installed; install it with: {command}") from None
