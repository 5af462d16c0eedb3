"""Files of weights that say what is not so: refused for what their first bytes tell, and for their size."""

import json
import os
import resource
import time
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

from dalle_lean.errors import UserError
from dalle_lean.io.safetensors_io import MOST_HEADER_BYTES, is_finite, read_shapes, read_weights

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0, 4), "c": torch.tensor(1, dtype=torch.int64)}


@contextmanager
def little_time_and_memory():
    """100 MB and five seconds at most."""
    before, started_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    yield
    assert time.monotonic() - started_s < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def write(path, header, size_bytes=0, length=None):
    """A safetensors file with this header, as long as is said, of zeros behind the header."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(content) if length is None else length).to_bytes(8, "little") + content)
    os.truncate(path, max(size_bytes, path.stat().st_size))
    return path


def tensor(shape, end, dtype="F32"):
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


def test_the_header_tells_the_shapes(tmp_path):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8):
        save_file({name: value.to(dtype) for name, value in TENSORS.items()}, tmp_path / "w", {"made": "here"})
        assert read_shapes(tmp_path / "w") == {"a": (2, 3), "b": (0, 4), "c": ()}
        assert read_weights(tmp_path / "w")["a"].dtype == dtype


@pytest.mark.parametrize(
    ("header", "options", "words"),
    [
        (b"", {}, "its header cannot have 0 bytes"),
        (b"{}", {"length": 2**60}, "its header cannot have 1,152,921,504,606,846,976 bytes"),
        (b"", {"length": MOST_HEADER_BYTES + 1, "size_bytes": 2**36}, "its header cannot have 16,777,217 bytes"),
        (b"", {"length": MOST_HEADER_BYTES, "size_bytes": 2**36}, "expected value"),
        (b"[" * 100_000, {}, "invalid type: sequence"),
        (b"\xff\xfe", {}, "invalid UTF-8"),
        (b"[]", {}, "invalid type: sequence"),
        (b'{"a": 3}', {}, "invalid type: integer"),
        (tensor([2, 3], 24), {}, r"file not fully covered \(it has 73 bytes\); get a complete copy"),
        (tensor([2, 3], 24), {"size_bytes": 2**36}, r"not fully covered \(it has 68,719,476,736 bytes\)"),
        (tensor([2, 3], 20), {"size_bytes": 100}, "invalid shape, data type, or offset"),
        (tensor([2, -3], -24), {"size_bytes": 100}, "integer `-3`, expected usize"),
        (tensor([2.0, 3], 24), {"size_bytes": 100}, "floating point `2.0`, expected usize"),
        (tensor([2, 3], 24, "F7"), {"size_bytes": 100}, "unknown variant `F7`"),
        (tensor([True, 4], 4), {"size_bytes": 100}, "boolean `true`, expected usize"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(tmp_path, header, options, words):
    path = write(tmp_path / "model.safetensors", header, **options)
    with little_time_and_memory(), pytest.raises(UserError, match=f"model.safetensors is not a safetensors.*{words}"):
        read_weights(path)


def test_tensors_that_are_not_wanted_are_not_read(tmp_path):
    numbers = 2**34
    header = tensor([numbers], 4 * numbers)
    path = write(tmp_path / "w", header, 8 + len(json.dumps(header)) + 4 * numbers)
    with little_time_and_memory(), pytest.raises(UserError, match=r"key a has shape \[17179869184\]; must be \[2, 3\]"):
        read_weights(path, {"a": TENSORS["a"]})


def test_more_than_the_machine_holds_is_refused_with_both_figures(tmp_path):
    numbers = 2**43
    header = tensor([numbers], numbers, "U8")
    path = write(tmp_path / "w", header, 8 + len(json.dumps(header)) + numbers)
    with little_time_and_memory(), pytest.raises(UserError, match=r"has 8\.8 TB, and only .* of memory are free"):
        read_weights(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64])
def test_one_number_that_is_not_finite_is_found_in_any_type(dtype):
    assert is_finite(torch.zeros(0).to(dtype))
    assert is_finite(torch.tensor([[-448.0, 1], [0, 448]]).to(dtype))
    if dtype.is_floating_point:
        assert not is_finite(torch.tensor([[1.0, 2], [torch.nan, 3]]).to(dtype))
    if dtype.is_floating_point and dtype.itemsize > 1:
        assert not is_finite(torch.tensor([1.0, torch.inf]).to(dtype))
        assert not is_finite(torch.tensor([1.0, -torch.inf]).to(dtype))
