"""The weights of a TorchScript archive, the format of OpenAI's CLIPs, read without running any of its code.

An archive is a zip: data.pkl describes the modules, data/N holds the bytes of a tensor, code/ is ignored.
"""

import io
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dalle_lean.errors import UserError

MAX_PICKLE_BYTES = 2**24
DTYPES = {
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "LongStorage": torch.int64,
}


class Module:
    """Stands for a module of any class; `content` holds its attributes."""

    content: Any = None

    def __setstate__(self, state: Any) -> None:
        self.content = state


def is_torchscript(path: Path) -> bool:
    """Whether a file is an archive with code, which torch's other files do not have."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any("/code/" in name for name in archive.namelist())


def torchscript_weights(path: Path) -> dict[str, Tensor]:
    """Parameters and buffers by name; UserError if the archive is damaged or holds anything else."""
    try:
        with zipfile.ZipFile(path) as archive:
            [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if archive.getinfo(name).file_size > MAX_PICKLE_BYTES:
                raise UserError(f"its data.pkl has more than {MAX_PICKLE_BYTES:,} bytes")
            return dict(tensors_of(ModuleUnpickler(archive, name).load(), ""))
    except Exception as error:  # damaged archives raise nearly anything
        raise UserError(f"{path} is not a TorchScript archive of weights: {type(error).__name__}: {error}") from None


def tensors_of(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Module) and isinstance(value.content, dict):
        for attribute, content in value.content.items():
            yield from tensors_of(content, f"{name}.{attribute}" if name else attribute)


class ModuleUnpickler(pickle.Unpickler):
    """Reads modules and tensors from data.pkl; calls no class or function that the file chooses."""

    def __init__(self, archive: zipfile.ZipFile, name: str):
        super().__init__(io.BytesIO(archive.read(name)))
        self.archive, self.root = archive, name.removesuffix(".pkl")
        self.contents: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__"):
            return Module
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            # A tensor over the stored elements; RuntimeError if it reaches beyond them.
            return lambda content, offset, size, stride, *_: content.as_strided(size, stride, offset)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch.jit._pickle":
            return lambda content, *_: content  # lists with the type of their elements
        raise UserError(f"it refers to {module}.{name}")

    def persistent_load(self, pid: Any) -> Tensor:
        _, dtype, key, *_ = pid
        if key not in self.contents:
            file = self.archive.getinfo(f"{self.root}/{key}")
            if file.compress_type != zipfile.ZIP_STORED:
                raise UserError(f"{file.filename} is compressed")
            self.contents[key] = torch.frombuffer(bytearray(self.archive.read(file)), dtype=dtype)
        return self.contents[key]
