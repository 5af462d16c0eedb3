"""Scorers of how well a picture fits its prompt; the best pictures of a prompt have the highest scores.

CLIP is one. Your own is one class, named on the command line as `--scorer my_scorers:Darkest`:

    # my_scorers.py, in a folder that PYTHONPATH names
    import torch

    class Darkest:
        name = "darkness"

        def __init__(self, device: torch.device):
            self.weights = torch.tensor([0.299, 0.587, 0.114], device=device)  # luma of red, green and blue

        def score(self, pixels: torch.Tensor, prompt: str) -> torch.Tensor:
            return 1 - torch.einsum("nchw,c->n", pixels, self.weights) / pixels[0, 0].numel()

Shapes: N pictures, H x W pixels.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dalle_lean.clip.architecture import Architecture, caption_encoder, model_config
from dalle_lean.clip.scorer import IMAGE_MEAN, IMAGE_STD, ClipScorer
from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json
from dalle_lean.require import MissingPackage, require

SPECS = "clip, none, ARCHITECTURE:FILE, ARCHITECTURE:PRETRAINED_TAG, hf-hub:OWNER/NAME, MODULE:CLASS or a CLIP's FOLDER"


@runtime_checkable
class Scorer(Protocol):
    """Ranks pictures. A user's class is constructed with the torch.device of its pictures."""

    name: str  # shown beside a score

    def score(self, pixels: Tensor, prompt: str) -> Tensor:
        """Pictures [N, 3, H, W], float32 in 0..1 on the device -> scores [N] there, finite, higher is better.

        A picture's score must not depend on the others in the batch, which is padded with arbitrary ones. On CUDA,
        decoding continues meanwhile if nothing here waits for the device (`.item()`, `.cpu()`).
        """
        ...


def make_scorer(
    spec: str, clip_folder: Path | None, device: torch.device, *, role: str = "scorer", checked: bool = False
) -> Scorer | None:
    """The scorer that a user names; None ranks nothing. ValueError, with what to do, if it does not exist or load.

    Args:
        spec: "clip", the CLIP of `clip_folder`, or None without one; "none"; "ViT-B-32:/path/weights.pt", any
            architecture that open_clip contains in full, with a weights file (safetensors, or loaded weights-only);
            "ViT-B-32:laion2b_s34b_b79k" or "hf-hub:OWNER/NAME", downloaded by open_clip unless it is in its cache;
            "my_scorers:Darkest", a class called with `device`; the path of a CLIP folder.
        role: its name in error messages.
        checked: the hashes of the files in `clip_folder` were already verified.
    """
    if spec == "none":
        return None
    if spec == "clip":
        return None if clip_folder is None else ClipScorer.load(clip_folder, device, checked=checked)
    check_scorer_spec(spec, role=role)
    head, _, tail = spec.partition(":")
    try:
        if Path(spec).is_dir():
            clip = ClipScorer.load(spec, device)
            # The last part of the path is usually just "clip".
            clip.name = f"CLIP {'/'.join(Path(spec).resolve().parts[-2:])}"
            return clip
        if head == "hf-hub":
            return hub_clip(tail, device)
        if names_a_class(head, tail):
            return user_scorer(head, tail, device)
        return named_clip(head, tail, device)
    except UserError as error:
        raise UserError(f"{role}={spec!r}: {error}") from error


def check_scorer_spec(spec: str, *, role: str = "scorer") -> None:
    """ValueError if nothing that `make_scorer` takes is written like `spec`; loads nothing."""
    head, _, tail = spec.partition(":")
    is_folder = spec != "" and Path(spec).is_dir()
    if spec not in ("clip", "none") and not is_folder and not (head and tail):
        raise UserError(f"{role}={spec!r}: must be {SPECS}")


def names_a_class(module: str, attribute: str) -> bool:
    """Whether this is MODULE:CLASS, and not an architecture of open_clip such as RN50:openai."""
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        return False
    try:
        return module not in require("open_clip", extra="demo").list_models()
    except MissingPackage:
        return True


def user_scorer(module: str, attribute: str, device: torch.device) -> Scorer:
    """An instance of a user's class; ValueError for any exception in it."""
    try:
        scorer_class = getattr(importlib.import_module(module), attribute)
        scorer = scorer_class(device)
    except ModuleNotFoundError as error:
        raise UserError(f"no module {error.name}; install it, or name its folder in PYTHONPATH") from error
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{type(error).__name__}: {error}") from error
    if not isinstance(scorer, Scorer) or not isinstance(scorer.name, str):
        raise UserError(f"{attribute} is not a scorer: it needs a name (str) and score(pixels, prompt)")
    return scorer


def named_clip(architecture: str, weights: str, device: torch.device) -> ClipScorer:
    """An architecture of open_clip with a weights file, or with the published weights of a tag."""
    config = full_config(architecture)
    open_clip = require("open_clip", extra="demo")
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    name = f"CLIP {architecture} ({Path(weights).name})"
    if Path(weights).is_file():
        published = [preprocessing(open_clip.get_pretrained_cfg(architecture, tag)) for tag in tags]
        # A file does not say how its pictures were prepared; usually all weights of an architecture agree.
        usual = published[0] if published and all(each == published[0] for each in published) else preprocessing({})
        return ClipScorer(architecture, weights, **usual, name=name, device=device)
    if not open_clip.is_pretrained_cfg(architecture, weights):
        known = f"one of {', '.join(tags)}" if tags else "but it has none"
        raise UserError(f"{weights} is neither a file nor a tag of {architecture} ({known})")
    published_weights = open_clip.get_pretrained_cfg(architecture, weights)
    # Weights need the activation that they were trained with; open_clip's own loading only warns about another one.
    config["quick_gelu"] = published_weights.get("quick_gelu", False)
    file = downloaded(open_clip.download_pretrained, published_weights)
    return ClipScorer(config, file, **preprocessing(published_weights), name=name, device=device)


def hub_clip(address: str, device: torch.device) -> ClipScorer:
    """The CLIP OWNER/NAME on the hub, in open_clip's format."""
    open_clip = require("open_clip", extra="demo")
    path = downloaded(open_clip.pretrained.download_pretrained_from_hf, address, filename="open_clip_config.json")
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("model_cfg"), dict):
        raise UserError("its open_clip_config.json has no model_cfg")
    config, usual = full_config(content["model_cfg"]), preprocessing(content.get("preprocess_cfg") or {})
    weights = downloaded(open_clip.pretrained.download_pretrained_from_hf, address)
    return ClipScorer(config, weights, **usual, name=f"CLIP {address}", device=device)


def full_config(architecture: Architecture) -> dict[str, Any]:
    """The model config; ValueError, before any weights are downloaded, if open_clip does not contain it in full."""
    config = model_config(architecture)
    caption_encoder(config, None)
    return config


def downloaded(download: Any, *arguments: Any, **options: Any) -> Path:
    """The file from one of open_clip's download functions; ValueError if it fails."""
    try:
        return Path(download(*arguments, **options))
    except Exception as error:  # from the network, the hub or the disk
        reason = " ".join(str(error).split())
        raise UserError(
            f"it cannot be downloaded ({type(error).__name__}: {reason}); check its name and the network, "
            "or give ARCHITECTURE:FILE"
        ) from error


def preprocessing(published: Mapping[str, Any]) -> dict[str, Any]:
    """ClipScorer's arguments for open_clip's description of how pictures are prepared.

    Its resize_mode is ignored: it only concerns pictures that are not square.
    """
    interpolation = published.get("interpolation") or "bicubic"
    return {
        "image_mean": published.get("mean") or IMAGE_MEAN,
        "image_std": published.get("std") or IMAGE_STD,
        "interpolation": "bicubic" if interpolation == "random" else interpolation,
    }
