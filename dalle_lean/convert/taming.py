"""Published VQGAN checkpoints (taming-transformers' `model.ckpt` and `config.yaml`) -> `VQGAN`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN, VQGANConfig
from dalle_lean.io.safetensors_io import load_strictly

QUANTIZERS = {"taming.models.vqgan.GumbelVQ": "gumbel", "taming.models.vqgan.VQModel": "vq"}
TRAINING_ONLY = ("loss.",)  # discriminator and LPIPS weights
FIXED = {"double_z": False, "in_channels": 3, "out_ch": 3, "resamp_with_conv": True}
DDCONFIG = {
    "z_channels": "z_channels",
    "resolution": "picture_side",
    "ch": "channels",
    "ch_mult": "channel_multipliers",
    "num_res_blocks": "num_res_blocks",
    "attn_resolutions": "attention_resolutions",
}


def from_taming(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> VQGAN:
    """The model of a published checkpoint, in eval mode, weights as float32: of the entry "state_dict" of `model.ckpt`,
    whose keys that begin with "loss." are ignored, and the section `model` of the YAML. ValueError names the key that
    is unknown, missing or misshapen."""
    model = VQGAN(taming_config(config))
    weights = {name: weight for name, weight in state_dict.items() if not name.startswith(TRAINING_ONLY)}
    load_strictly(model, weights, "state_dict")
    return model.eval()


def taming_config(config: Mapping[str, Any]) -> VQGANConfig:
    """Translate the YAML's section `model`; ValueError names the first field that this VQGAN cannot represent."""
    target = config.get("target")
    if target not in QUANTIZERS:
        raise UserError(f"target={target!r}: must be one of {sorted(QUANTIZERS)}")
    params = section(config, "params")
    ddconfig = section(params, "ddconfig")
    for name, only in FIXED.items():
        if ddconfig.get(name, only) != only:
            raise UserError(f"ddconfig.{name}={ddconfig[name]!r}: only {only!r} is supported")
    if unknown := sorted(ddconfig.keys() - DDCONFIG.keys() - FIXED.keys() - {"dropout"}):
        raise UserError(f"ddconfig: unknown field {unknown[0]!r}")
    if params.get("remap") is not None:
        raise UserError(f"remap={params['remap']!r}: a remapped codebook is not supported")
    return VQGANConfig(
        quantizer=QUANTIZERS[target],  # type: ignore[arg-type]
        codebook_size=required(params, "n_embed"),
        code_width=required(params, "embed_dim"),
        **{ours: required(ddconfig, theirs) for theirs, ours in DDCONFIG.items()},
    )


def section(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    content = required(parent, name)
    if not isinstance(content, Mapping):
        raise UserError(f"{name}={content!r}: must be a section")
    return content


def required(parent: Mapping[str, Any], name: str) -> Any:
    if name not in parent:
        raise UserError(f"missing field {name!r}")
    return parent[name]
