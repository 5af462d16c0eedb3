"""Conversion of checkpoint files, for `dalle-lean convert`."""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from dalle_lean.clip.scorer import ClipScorer
from dalle_lean.convert.dalle_pytorch import from_dalle_pytorch, to_dalle_pytorch
from dalle_lean.convert.taming import from_taming
from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.files import atomic_write, read_json, read_text
from dalle_lean.io.model_folder import load_model, save_model
from dalle_lean.io.safetensors_io import read_weights
from dalle_lean.model.config import DalleConfig

LIGHTNING_CALLBACK = "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint"


class Callback:
    """Stands for the callback class that PyTorch Lightning's checkpoints, such as the published VQGANs, refer to."""


def import_dalle(
    source: Path, out: Path, config: Path | None, *, tokenizer: Path | None = None, vqgan: Path | None = None
) -> None:
    """A published DALL-E state dict -> a model folder. `config`: JSON of DalleConfig fields; None is the paper's."""
    fields = read_json(config) if config is not None else {}
    if not isinstance(fields, dict):
        raise UserError(f"{config} must hold a JSON object of DalleConfig fields")
    model = from_dalle_pytorch(read_state_dict(source), DalleConfig.from_dict(fields))
    fingerprint = VQGAN.load(vqgan).codes_fingerprint() if vqgan is not None else None
    save_model(model, out, tokenizer=tokenizer, vqgan=vqgan, vqgan_fingerprint=fingerprint)


def import_vqgan(source: Path, out: Path, config: Path | None) -> None:
    """A published taming-transformers checkpoint and its config.yaml -> a VQGAN folder."""
    if config is None:
        raise UserError("a VQGAN needs --config, the config.yaml published with its checkpoint")
    try:
        content = yaml.safe_load(read_text(config))
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{config} is not YAML: {error}") from None
    if not isinstance(content, dict) or "model" not in content:
        raise UserError(f"{config} has no section `model`")
    from_taming(read_state_dict(source), content["model"]).save(out)


def import_clip(source: Path, out: Path, architecture: str) -> None:
    """Published weights of an open_clip architecture, with open_clip's or OpenAI's key names -> a CLIP folder."""
    ClipScorer(architecture, source).save(out)


def export_dalle(folder: Path, out: Path, generation: str, prefix: str) -> None:
    """A model folder -> a torch.save file with the published key names, in which aliases share their storage."""
    state = to_dalle_pytorch(load_model(folder), generation, prefix)
    with atomic_write(out) as temporary:
        torch.save(state, temporary)


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a safetensors or torch.save file (weights-only), with or without a `state_dict` level."""
    if not path.is_file():
        raise UserError(f"{path} is not a file")
    try:
        if path.suffix == ".safetensors":
            content: Any = read_weights(path)
        else:
            with torch.serialization.safe_globals([(Callback, LIGHTNING_CALLBACK)]):
                content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise nearly anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{path} cannot be read as weights: {reason}") from None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise UserError(f"{path} does not hold a state dict (names and tensors)")
    return content
