"""open_clip's models and tokenizers, by name or by config. Every size is checked; nothing is downloaded.

Shapes: B captions, T text positions.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from dalle_lean.clip.picture_tower import PatchResNet
from dalle_lean.clip.torchscript import is_torchscript, torchscript_weights
from dalle_lean.errors import UserError
from dalle_lean.io.safetensors_io import load_strictly, refuse_infinite
from dalle_lean.require import require
from dalle_lean.tokenizer import Tokenizer

Architecture = str | Mapping[str, Any]
"""The name of an open_clip architecture ("ViT-B-32"), or its model config: embed_dim, vision_cfg, text_cfg, ...

A vision_cfg with "widths" is for this package's own tower: it has the arguments of `picture_tower.PatchResNet`."""

OPENAI_SIZES = ("input_resolution", "context_length", "vocab_size")  # buffers in OpenAI's archives that are not weights

# A small image tower that is built only to be replaced.
PLACEHOLDER = {"image_size": 32, "patch_size": 32, "width": 32, "head_width": 32, "layers": 1}

# Beyond any known architecture: larger numbers mean a damaged or hostile file.
LARGEST = {
    "embed_dim": 8192,
    "width": 8192,
    "widths": 8192,
    "blocks": 256,
    "layers": 256,
    "heads": 256,
    "head_width": 1024,
    "mlp_ratio": 64,
    "image_size": 4096,
    "patch_size": 512,
    "context_length": 4096,
    "vocab_size": 2**20,
    "attn_pooler_queries": 4096,
}


def model_config(architecture: Architecture) -> dict[str, Any]:
    """A new copy of open_clip's model config, every size checked; ValueError if it cannot be built here."""
    open_clip = require("open_clip", extra="demo")
    if isinstance(architecture, str):
        if architecture not in open_clip.list_models():
            raise UserError(
                f"{architecture!r} is not an architecture of open_clip {open_clip.__version__}; "
                "name one such as ViT-B-32, without a hub address or a pretrained tag"
            )
        config = open_clip.get_model_config(architecture)
    elif isinstance(architecture, Mapping):
        config = copy.deepcopy(dict(architecture))
    else:
        raise UserError(f"architecture must be a name or a model config, not {type(architecture).__name__}")
    for name in ("vision_cfg", "text_cfg"):
        if not isinstance(config.get(name), dict):
            raise UserError(f"architecture: {name} must be an object with the sizes of that tower")
    check_sizes("architecture", config)
    if config["text_cfg"].get("hf_model_name"):
        raise UserError("architecture: its text tower is on the hub; choose one that open_clip contains in full")
    if ":" in str(config["vision_cfg"].get("timm_model_name", "")):
        raise UserError(
            f"architecture: timm_model_name={config['vision_cfg']['timm_model_name']!r} is an address that timm would "
            "download; name a model that timm contains"
        )
    config["vision_cfg"].pop("timm_model_pretrained", None)  # otherwise timm downloads weights
    return config


def check_sizes(where: str, config: Mapping[str, Any]) -> None:
    """ValueError for a size, at any depth, that is not a positive number up to its limit in LARGEST."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            check_sizes(f"{where}.{name}", value)
        elif name in LARGEST and value is not None:
            for number in value if isinstance(value, list | tuple) else [value]:
                is_number = isinstance(number, int | float) and not isinstance(number, bool)
                if not is_number or not 0 < number <= LARGEST[name]:
                    raise UserError(f"{where}.{name}={value!r}: must be positive and at most {LARGEST[name]}")


def build_clip(config: Mapping[str, Any]) -> Any:
    """The float32 model of a config from `model_config`, initialised by torch's global generator."""
    open_clip = require("open_clip", extra="demo")
    settings = copy.deepcopy(dict(config))
    name = "CustomTextCLIP" if settings.pop("custom_text", False) else "CLIP"
    kind = getattr(open_clip, "CoCa" if "multimodal_cfg" in settings else name)
    own_tower = settings["vision_cfg"] if "widths" in settings["vision_cfg"] else None
    if own_tower is not None:
        settings["vision_cfg"] = PLACEHOLDER
    try:
        model = kind(**settings)
        if own_tower is not None:
            model.visual = PatchResNet(settings["embed_dim"], **own_tower)
        return model
    except Exception as error:  # open_clip raises AssertionError, TypeError, RuntimeError and others
        raise UserError(f"architecture: it cannot be built: {type(error).__name__}: {error}") from None


def load_clip_weights(model: nn.Module, weights: str | Path | Mapping[str, Tensor]) -> None:
    """Load a file or a state dict of any dtype strictly into `model`; ValueError names the file."""
    source = "state dict of this CLIP" if isinstance(weights, Mapping) else str(weights)
    if not isinstance(weights, Mapping) and is_torchscript(Path(weights)):
        of_archive = torchscript_weights(Path(weights))
        weights = {name: value for name, value in of_archive.items() if name not in OPENAI_SIZES}
    if isinstance(weights, Mapping):
        load_strictly(model, weights, source)
    elif not Path(weights).is_file():
        raise UserError(f"no weights file at {source}; pretrained tags are not downloaded, give a file")
    else:
        try:
            # It knows the key names of the published CLIPs, and never unpickles.
            require("open_clip", extra="demo").load_checkpoint(model, source, strict=True, weights_only=True)
        except Exception as error:  # each format raises its own exceptions
            raise UserError(f"{source} does not hold the weights of this CLIP: {error}") from None
    refuse_infinite(model.state_dict(), source)


def caption_encoder(config: Mapping[str, Any], tokenizer: Tokenizer | None) -> Callable[[Sequence[str]], Tensor]:
    """A function from captions to ids [B, T] by `tokenizer`; if it is None, by open_clip's tokenizer. ValueError if the
    tokenizer is not available offline or does not fit the text tower."""
    open_clip = require("open_clip", extra="demo")
    text: Mapping[str, Any] = {"context_length": 77, "vocab_size": 49408, **config["text_cfg"]}
    if tokenizer is not None:
        ids_in_use = tokenizer.vocab_size
        if text.get("pool_type") != "eos" or text.get("eos_id") != tokenizer.padding_id:
            raise UserError(
                "architecture: with a tokenizer.json, captions end at the first padding id, so text_cfg needs "
                f"pool_type='eos' and eos_id={tokenizer.padding_id}"
            )
    elif text.get("hf_tokenizer_name"):
        raise UserError(
            f"architecture: its tokenizer {text['hf_tokenizer_name']!r} is on the hub; "
            "choose an architecture that open_clip contains in full"
        )
    else:
        options = text.get("tokenizer_kwargs", {})
        try:
            simple = open_clip.SimpleTokenizer(context_length=text["context_length"], **options)
        except Exception as error:  # wrong options raise various exceptions
            raise UserError(f"architecture: tokenizer_kwargs={options!r}: {type(error).__name__}: {error}") from None
        ids_in_use = simple.vocab_size
    if ids_in_use > text["vocab_size"]:
        raise UserError(f"architecture: vocab_size={text['vocab_size']} is less than the tokenizer's {ids_in_use}")
    if tokenizer is None:
        return lambda captions: simple(list(captions))
    length, end = text["context_length"] - 1, tokenizer.padding_id
    # The first padding id marks the end of the caption. The text tower is causal and pools there, so it sees the whole
    # caption and none of the later padding.
    return lambda captions: F.pad(tokenizer.encode(captions, length), (0, 1), value=end)
