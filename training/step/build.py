"""Builds the parts of a run, each checked against the data."""

import dataclasses
from pathlib import Path

from dalle_lean import Dalle, DalleConfig, load_model
from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.files import read_json
from dalle_lean.io.model_folder import bundled_model, check_parts
from preprocessing.shards.manifest import Counts, DatasetInfo
from training.data.catalog import ShardSet
from training.run.recipe import Recipe


def new_config(recipe: Recipe, info: DatasetInfo, vocab_size: int) -> DalleConfig:
    """The recipe's model for this data and vocabulary; ValueError if the recipe contradicts them."""
    return recipe.model_config(
        image_side=info.image_side, image_vocab_size=info.codebook_size, text_vocab_size=vocab_size
    )


def with_model_of(recipe: Recipe, init: Path | None) -> Recipe:
    """The recipe, with the model of the folder `init` instead of its own if there is one."""
    return recipe if init is None else dataclasses.replace(recipe, model=check_parts(init)["dalle"])


def build_model(recipe: Recipe, info: DatasetInfo, vocab_size: int, init: Path | None) -> Dalle:
    """The recipe's model with new weights, or with those of `init`, whose model the recipe has (see `with_model_of`);
    ValueError if it does not fit data and tokenizer."""
    config = new_config(recipe, info, vocab_size)
    return Dalle(config) if init is None else load_init(init, info)


def load_init(init: Path, info: DatasetInfo) -> Dalle:
    """The model of a folder, to continue training; ValueError if it was trained on codes of another VQGAN."""
    recorded = read_json(init / "config.json").get("vqgan_fingerprint")
    if recorded not in (None, info.vqgan) and not holds_vqgan_of(init, info):
        raise UserError(
            f"{init} was trained on codes of the VQGAN {recorded[:12]}, but the data has codes of {info.vqgan[:12]}; "
            "preprocess the data with the model's VQGAN"
        )
    return load_model(init)


def bundled_vqgan(info: DatasetInfo) -> Path | None:
    """The bundled model's VQGAN, if it is the one that made the codes of these shards."""
    try:
        folder = bundled_model()
    except UserError:  # not installed
        return None
    return folder / "vqgan" if holds_vqgan_of(folder, info) else None


def holds_vqgan_of(model_folder: Path, info: DatasetInfo) -> bool:
    """Whether a model folder contains the VQGAN that made the codes of these shards."""
    folder = model_folder / "vqgan"
    return (folder / "config.json").exists() and VQGAN.load(folder).reads_codes_of(info.vqgan)


def stated_codes(recipe: Recipe, vqgan: Path | None) -> DatasetInfo | None:
    """What the codes of a data set without dataset.json mean, if recipe and VQGAN say so."""
    if vqgan is None or not {"image_side", "image_vocab_size"} <= set(recipe.model):
        return None
    encoder = VQGAN.load(vqgan)
    return DatasetInfo(
        image_side=recipe.model["image_side"],
        codebook_size=recipe.model["image_vocab_size"],
        vqgan=encoder.codes_fingerprint(),
        picture_side=recipe.model["image_side"] * encoder.config.downscale,
        counts=Counts(),
        shards=(),
    )


def check_same_codes(heldout: ShardSet, data: ShardSet) -> None:
    """ValueError unless the codes of `heldout` and `data` mean the same."""
    for name in ("vqgan", "image_side", "codebook_size"):
        theirs, ours = getattr(heldout.info, name), getattr(data.info, name)
        if theirs != ours:
            raise UserError(
                f"{heldout.name} has {name} {theirs}, but {data.name} has {ours}; "
                "preprocess both with the same --vqgan and --picture-side"
            )


def matching_vqgan(folder: Path, info: DatasetInfo) -> VQGAN:
    """The VQGAN of a folder; ValueError unless it is the one that made the codes."""
    vqgan = VQGAN.load(folder)
    advice = "; name the one that the data was preprocessed with"
    vqgan.check_reads(info.vqgan, f"{folder} is another VQGAN: the data has codes", advice)
    return vqgan
