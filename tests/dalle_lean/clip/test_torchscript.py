"""OpenAI's archives: their weights are read, and nothing in them runs."""

import os
import pickle
import zipfile

import pytest
import torch

from dalle_lean.clip.torchscript import is_torchscript, torchscript_weights
from dalle_lean.errors import UserError
from tests.dalle_lean.clip.archives import write_archive

STATE = {
    "positional_embedding": torch.randn(3, 4).half(),
    "visual.conv1.weight": torch.randn(2, 3, 2, 2).half(),
    "transformer.resblocks.0.attn.in_proj_weight": torch.randn(4, 6).t(),
    "logit_scale": torch.tensor(4.6),
}


@pytest.fixture
def archive(tmp_path):
    write_archive(STATE, tmp_path / "ViT-B-32.pt")
    return tmp_path / "ViT-B-32.pt"


def rewrite(archive, change, name_ends="/data.pkl"):
    """The archive with a file changed."""
    with zipfile.ZipFile(archive) as old:
        files = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(archive, "w") as new:
        for name, content in files.items():
            new.writestr(name, change(content) if name.endswith(name_ends) else content)


def test_the_weights_come_as_they_were_stored(archive):
    weights = torchscript_weights(archive)
    assert weights.keys() == {*STATE, "input_resolution", "context_length", "vocab_size"}
    for name, value in STATE.items():
        assert torch.equal(weights[name], value)
        assert weights[name].dtype == value.dtype


def test_other_files_are_no_archives(tmp_path):
    torch.save(STATE, tmp_path / "plain.pt")
    (tmp_path / "text.pt").write_text("PK no")
    assert not is_torchscript(tmp_path / "plain.pt")
    assert not is_torchscript(tmp_path / "text.pt")


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile",)


def test_what_an_archive_would_run_is_refused(archive, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rewrite(archive, lambda _: pickle.dumps(Hostile(), protocol=2))
    with pytest.raises(UserError, match=r"ViT-B-32\.pt is not a TorchScript archive of weights: .*posix\.mkdir"):
        torchscript_weights(archive)
    assert not (tmp_path / "hostile").exists()


def test_a_tensor_beyond_its_bytes_is_refused(archive):
    rewrite(archive, lambda content: content[:2], "/data/0")
    with pytest.raises(UserError, match="out of bounds"):
        torchscript_weights(archive)


def test_a_cut_archive_is_refused(archive):
    rewrite(archive, lambda content: content[: len(content) // 2])
    with pytest.raises(UserError, match="is not a TorchScript archive of weights"):
        torchscript_weights(archive)
