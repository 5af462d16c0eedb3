"""The models that the calculator prices, read as training reads them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dalle_lean import DalleConfig, MemoryPlan
from dalle_lean.errors import UserError
from dalle_lean.io.folder_config import MODEL_FORMAT, read_folder_config
from dalle_lean.memory.published_models import PRESETS
from dalle_lean.memory.report import PricedModel
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.memory.shapes import TransformerShape
from dalle_lean.words import perhaps
from training.run.recipe import (
    DataRecipe,
    MemoryRecipe,
    OptimizerRecipe,
    Recipe,
    load_recipe,
    parse_recipe,
    recipe_names,
)


def find_subject(
    name: str,
    *,
    precision: str | None = None,
    optimizer: str | None = None,
    plan: MemoryPlan | None = None,
    model: Mapping[str, Any] | None = None,
) -> PricedModel:
    """Find the model called `name`, with the given settings in place of its own.

    Args:
        name: a recipe or preset, a TOML file, a model folder, or a recipe's TOML, which ends with a line break.
        model: fields of its DalleConfig or TransformerShape.

    ValueError lists the known names, or says what is wrong with a recipe, in the words of `train`.
    """
    fields = model or {}
    setup = TrainingSetup.of_precision(precision or "fp32", optimizer=optimizer or TrainingSetup.optimizer)
    if name in PRESETS:
        plan = MemoryPlan(activations="keep", loss_tokens=None)
        subject = PricedModel(name, PRESETS[name], plan, setup, precision or "fp32")
        return dataclasses.replace(subject, model=changed_model(subject, fields))
    title, recipe = ("your recipe", parse_recipe(name)) if name.endswith("\n") else (Path(name).stem, recipe_at(name))
    changed_model(of_recipe(title, recipe), fields)
    memory = recipe.memory
    if plan is not None:
        memory = dataclasses.replace(memory, **dataclasses.asdict(plan))
    recipe = dataclasses.replace(
        recipe,
        model={**recipe.model, **fields},
        memory=dataclasses.replace(memory, precision=precision or memory.precision),
        optimizer=optimizer_of(optimizer, recipe.optimizer),
    )
    return of_recipe(title, recipe)


def recipe_at(name: str) -> Recipe:
    path = Path(name)
    if name not in recipe_names() and not path.exists():
        known = [*recipe_names(), *PRESETS]
        said = f"no model {name!r}{perhaps(name, known)}"
        raise UserError(f"{said}: it is neither a file or folder nor one of {', '.join(known)}")
    return recipe_of_folder(path) if path.is_dir() and name not in recipe_names() else load_recipe(name)


def changed_model(subject: PricedModel, fields: Mapping[str, Any]) -> DalleConfig | TransformerShape:
    """The subject's model with other values of its fields; only a TransformerShape has `tokens`."""
    if isinstance(subject.model, DalleConfig) and "tokens" in fields:
        raise UserError(
            f"--tokens {fields['tokens']}: a sample of {subject.name} always has {subject.tokens}; leave it out"
        )
    return dataclasses.replace(subject.model, **fields)


def optimizer_of(optimizer: str | None, recipe: OptimizerRecipe) -> OptimizerRecipe:
    """The recipe with the optimizer of this name in the calculator; settings that it lacks are dropped."""
    if optimizer is None:
        return recipe
    if optimizer in ("lamb", "lamb8bit"):
        return dataclasses.replace(recipe, name="lamb", eight_bit=optimizer == "lamb8bit")
    return OptimizerRecipe(name=optimizer)


def of_recipe(name: str, recipe: Recipe) -> PricedModel:
    """One micro-batch of a recipe; sizes of pictures and codebook that it leaves to the data are the paper's."""
    paper = DalleConfig.paper()
    config = recipe.model_config(
        image_side=recipe.model.get("image_side", paper.image_side),
        image_vocab_size=recipe.model.get("image_vocab_size", paper.image_vocab_size),
        text_vocab_size=recipe.model.get("text_vocab_size", recipe.data.text_vocab_size),
    )
    names = [spec.name for spec in dataclasses.fields(MemoryPlan)]
    plan = MemoryPlan(**{name: getattr(recipe.memory, name) for name in names})
    return PricedModel(name, config, plan, recipe.training_setup(), recipe.memory.precision)


def recipe_of_folder(folder: Path) -> Recipe:
    """One sample of a model folder's model; only config.json is read."""
    path = folder / "config.json"
    fields: Any = read_folder_config(folder, MODEL_FORMAT).get("dalle")
    if not isinstance(fields, dict):
        raise UserError(f"{path} has no section dalle, the model's configuration")
    plain = MemoryRecipe(grads_in_place=False, master_weights=False)  # the folder does not say how to train it
    try:
        return Recipe(model=fields, memory=plain, data=DataRecipe(batch_size=1))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
