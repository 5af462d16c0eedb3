"""GPT-2's published weights -> LanguageModel: a folder with config.json and model.safetensors, as on the hub.

GPT-2 has neither LayerScale nor a bias of the output layer; they are set to 1 and 0.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json
from dalle_lean.io.safetensors_io import read_weights, refuse_other_shapes
from dalle_lean.language.model import LanguageConfig, LanguageModel
from dalle_lean.memory import MemoryPlan

FFN_ACTIVATION_OF = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
"""Name in published configurations -> name here."""
EXPECTED: dict[str, Any] = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}
"""The only values of these fields that LanguageModel supports."""


def load_gpt2(
    folder: str | Path, plan: MemoryPlan | None = None, *, device: torch.device | str = "cpu"
) -> LanguageModel:
    """GPT-2 from a folder, in float32; ValueError names the file and what is missing or unsupported in it."""
    folder = Path(folder)
    config = read_config(folder / "config.json")
    with torch.device("meta"):
        model = LanguageModel(config, plan)
    path = folder / "model.safetensors"
    weights = {name.removeprefix("transformer."): tensor for name, tensor in read_weights(path).items()}
    # Some files also hold the masks, and the output layer, which is the input table.
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith((".attn.bias", ".masked_bias"))}
    head = weights.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, weights.get("wte.weight", head)):
        raise UserError(f"{path}: lm_head.weight differs from wte.weight, but GPT-2 ties them")
    empty, names = model.state_dict(), dict(published_names(config))
    need = {published: tuple(other_layout(published, empty[ours]).shape) for ours, published in names.items()}
    refuse_other_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, need, str(path))
    state = {
        name: (torch.ones if name.endswith(".scale") else torch.zeros)(tensor.shape)
        for name, tensor in empty.items()
        if name not in names
    }
    for ours, published in names.items():
        state[ours] = other_layout(published, weights.pop(published)).float().contiguous()
    model.load_state_dict(state, assign=True)
    return model.to(device)


def read_config(path: Path) -> LanguageConfig:
    """The configuration of a published GPT-2; ValueError if it describes another function."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a configuration: it must be a JSON object")
    for name, value in EXPECTED.items():
        if content.get(name, value) != value:
            raise UserError(f"{path}: {name} = {content[name]!r}; only {value!r} is supported")
    activation = content.get("activation_function", "gelu_new")
    if activation not in FFN_ACTIVATION_OF:
        raise UserError(f"{path}: activation_function = {activation!r}; must be one of {', '.join(FFN_ACTIVATION_OF)}")
    try:
        width, heads = content["n_embd"], content["n_head"]
        inner = content.get("n_inner") or 4 * width
        if not heads or width % heads or inner % width:
            sizes = f"n_head = {heads}, and n_inner = {inner} one of n_embd"
            raise ValueError(f"n_embd = {width} must be a multiple of {sizes}")
        return LanguageConfig(
            text_vocab_size=content["vocab_size"],
            text_len=content["n_positions"],
            hidden_size=width,
            num_layers=content["n_layer"],
            num_heads=heads,
            head_size=width // heads,
            ffn_multiplier=inner // width,
            ffn_activation=FFN_ACTIVATION_OF[activation],
        )
    except KeyError as error:
        raise UserError(f"{path}: {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def published_names(config: LanguageConfig) -> Iterator[tuple[str, str]]:
    """(name here, published name) of every parameter that GPT-2 has."""
    yield from (("output.weight", "wte.weight"), ("positions", "wpe.weight"))
    for layer in range(config.num_layers):
        parts = {
            f"layers.{layer}.attention.norm": "ln_1",
            f"blocks.{layer}.attention.qkv": "attn.c_attn",
            f"blocks.{layer}.attention.out": "attn.c_proj",
            f"layers.{layer}.feed_forward.norm": "ln_2",
            f"blocks.{layer}.feed_forward.up": "mlp.c_fc",
            f"blocks.{layer}.feed_forward.down": "mlp.c_proj",
        }
        for ours, published in parts.items():
            yield from ((f"{ours}.{part}", f"h.{layer}.{published}.{part}") for part in ("weight", "bias"))
    yield from (("norm.weight", "ln_f.weight"), ("norm.bias", "ln_f.bias"))


def other_layout(published: str, weight: Tensor) -> Tensor:
    """A weight converted between the published layout, projections as [inputs, outputs], and ours."""
    return weight.t() if ".c_" in published and published.endswith(".weight") else weight
