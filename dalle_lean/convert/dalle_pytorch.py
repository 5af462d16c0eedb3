"""State dicts of dalle-pytorch and of the training run's fork <-> Dalle.

The four generations of key names differ only in how many `.fn` wrappers stand between a layer and its inner module. The
loader ignores those and checks everything else. Shared modules are stored once per layer that uses them.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.dalle import Dalle
from dalle_lean.model.rope import rotary_angles

GENERATIONS = ("fork", "1.4")  # the training run's fork, and dalle-pytorch 1.4.0 to 1.6.6

WRAPPERS = re.compile(r"(?<=\.)(fn\.)+(?=to_|net\.)")
"""One or more wrappers between a layer and its inner module; their number differs between the generations."""
POSITIONS_KEY = "transformer.pos_emb"
# published name -> ours, for the attention and the feed-forward branch
OWN_LEAVES = {"scale": "scale", "fn.norm.weight": "norm.weight", "fn.norm.bias": "norm.bias"}
SHARED_LEAVES = (
    {"to_qkv.weight": "qkv.weight", "to_out.0.weight": "out.weight", "to_out.0.bias": "out.bias"},
    {"net.0.weight": "up.weight", "net.0.bias": "up.bias", "net.3.weight": "down.weight", "net.3.bias": "down.bias"},
)
BRANCHES = ("attention", "feed_forward")
OUTPUT_KEYS = {
    "to_logits.0.weight": "norm.weight",
    "to_logits.0.bias": "norm.bias",
    "to_logits.1.weight": "output.weight",
    "to_logits.1.bias": "output.bias",
}
TIED_ALIASES = {f"{kind}_emb.linear.{end}": f"output.{end}" for kind in ("text", "image") for end in ("weight", "bias")}


def from_dalle_pytorch(state_dict: dict[str, Tensor], config: DalleConfig) -> Dalle:
    """The model of a published state dict in any of the four generations of names, with or without the prefix `model.`.
    ValueError names the key that is missing, unknown or misshapen, differs from its alias, or holds another position
    table than this model's."""
    _check_convertible(config)
    model = Dalle(config)
    wanted = model.state_dict()
    published = _their_names(config, "fork")
    our_names = {WRAPPERS.sub("fn.", theirs): ours for ours, names in published.items() for theirs in names}
    found: dict[str, tuple[str, Tensor]] = {}
    input_tables: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        name = key.removeprefix("model.")
        if name == POSITIONS_KEY:
            _check_positions(key, value, config)
            continue
        if not config.tie_embeddings and name in ("text_emb.weight", "image_emb.weight"):
            input_tables[name] = value
            continue
        ours = our_names.get(WRAPPERS.sub("fn.", name))
        if ours is None:
            raise UserError(f"{key} does not belong to this model")
        value = value.reshape(-1) if ours.endswith(".scale") else value
        if value.shape != wanted[ours].shape:
            raise UserError(f"{key} has shape {list(value.shape)}; this model needs {list(wanted[ours].shape)}")
        earlier_key, earlier = found.setdefault(ours, (key, value))
        if earlier is not value and not torch.equal(earlier, value):
            raise UserError(f"{key} differs from {earlier_key}, but this model shares them")
    if not config.tie_embeddings:
        found["embedding.weight"] = ("text_emb.weight", _input_table(input_tables, config))
    for ours in wanted:
        if ours not in found:
            raise UserError(f"{published[ours][0]} is missing")
    model.load_state_dict({ours: value for ours, (_, value) in found.items()})
    return model


def to_dalle_pytorch(model: Dalle, generation: str = "fork", prefix: str = "") -> dict[str, Tensor]:
    """A model's tensors by their published names; aliases share their tensor.

    Args:
        generation: "fork" (the training run) or "1.4" (dalle-pytorch 1.4.0 to 1.6.6).
        prefix: put in front of every key; the run's files have "model.".
    """
    config = model.config
    _check_convertible(config)
    if generation not in GENERATIONS:
        raise UserError(f"generation={generation!r}: must be one of {', '.join(GENERATIONS)}")
    angles = rotary_angles(config.num_text_positions, config.image_side, config.head_size)
    published = {POSITIONS_KEY: angles.repeat_interleave(2, dim=-1)[None]}
    names = _their_names(config, generation)
    for ours, value in model.state_dict().items():
        if ours == "embedding.weight":
            published["text_emb.weight"], published["image_emb.weight"] = value.split(
                [config.num_text_tokens, config.image_vocab_size]
            )
        for theirs in names[ours]:
            published[theirs] = value.reshape(1, 1, -1) if ours.endswith(".scale") else value
    return {prefix + key: value for key, value in published.items()}


def _their_names(config: DalleConfig, generation: str) -> dict[str, list[str]]:
    """Our name -> its names in a published state dict, in order."""
    names: dict[str, list[str]] = {ours: [theirs] for theirs, ours in OUTPUT_KEYS.items()}
    if config.tie_embeddings:
        for alias, ours in TIED_ALIASES.items():
            names[ours].append(alias)
    else:
        names["embedding.weight"] = []
    for theirs, ours in _layer_names(config, generation):
        names.setdefault(ours, []).append(theirs)
    return names


def _layer_names(config: DalleConfig, generation: str) -> Iterator[tuple[str, str]]:
    wrappers = {"fork": (2, 2), "1.4": (3, 2)}[generation]
    if config.token_shift:
        wrappers = {"fork": (3, 3), "1.4": (5, 4)}[generation]
    for layer, block in enumerate(config.layer_blocks):
        for branch, name in enumerate(BRANCHES):
            prefix = f"transformer.layers.blocks.{layer}.{'fg'[branch]}.net."
            if not config.reversible:
                prefix = f"transformer.layers.layers.{layer}.{branch}."
            for theirs, ours in OWN_LEAVES.items():
                yield prefix + theirs, f"layers.{layer}.{name}.{ours}"
            for theirs, ours in SHARED_LEAVES[branch].items():
                yield prefix + "fn." * wrappers[branch] + theirs, f"blocks.{block}.{name}.{ours}"


def _input_table(tables: dict[str, Tensor], config: DalleConfig) -> Tensor:
    for name, rows in (("text_emb.weight", config.num_text_tokens), ("image_emb.weight", config.image_vocab_size)):
        if name not in tables:
            raise UserError(f"{name} is missing")
        if tables[name].shape != (rows, config.hidden_size):
            raise UserError(f"{name} has shape {list(tables[name].shape)}; needs {[rows, config.hidden_size]}")
    return torch.cat([tables["text_emb.weight"], tables["image_emb.weight"]])


def _check_positions(key: str, value: Tensor, config: DalleConfig) -> None:
    angles = rotary_angles(config.num_text_positions, config.image_side, config.head_size)
    ours = angles.repeat_interleave(2, dim=-1)[None]
    if value.shape != ours.shape or not torch.allclose(value.float(), ours, rtol=1e-6, atol=1e-5):
        raise UserError(f"{key} is not this configuration's rotary table; check text_len, image_side and head_size")


def _check_convertible(config: DalleConfig) -> None:
    if not config.rotary:
        raise UserError("rotary=False: the published formats only have rotary positions")
    if config.sandwich_norm:
        raise UserError("sandwich_norm=True: the published formats do not have it")
    if config.pixelfly_rank is not None:
        raise UserError(f"pixelfly_rank={config.pixelfly_rank}: the published formats only have dense projections")
    if not config.ffn_gated or config.ffn_activation != "gelu":
        raise UserError(
            f"ffn_activation={config.ffn_activation}, ffn_gated={config.ffn_gated}: the published formats only have "
            "a gated gelu"
        )
