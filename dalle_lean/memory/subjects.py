"""What the calculator can be asked about: a recipe, a model folder, a published transformer."""

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalle_lean.config import DalleConfig
from dalle_lean.files import read_json
from dalle_lean.memory.cost import Cost, cost_of
from dalle_lean.memory.plan import MemoryPlan
from dalle_lean.memory.presets import PRESETS
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.memory.shape_cost import shape_cost
from dalle_lean.memory.shapes import TransformerShape

RECIPES = Path(__file__).parents[2] / "training" / "recipes"
OPTIMIZER_OF = {("lamb", True): "lamb8bit", ("lamb", False): "lamb"}


@dataclass(frozen=True)
class Subject:
    """A model and how its recipe, if there is one, trains it."""

    name: str
    model: DalleConfig | TransformerShape
    plan: MemoryPlan = field(default_factory=MemoryPlan)
    setup: TrainingSetup = field(default_factory=TrainingSetup)
    precision: str = "fp32"

    @property
    def tokens(self) -> int:
        """Of a sample."""
        return self.model.sequence_len if isinstance(self.model, DalleConfig) else self.model.tokens

    def changed(self, *, tokens: int | None, shared_blocks: int | None) -> "Subject":
        """With samples of another length (published transformers only) and other sharing of weights."""
        fields = {"tokens": tokens, "shared_blocks": shared_blocks}
        wanted: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        if isinstance(self.model, DalleConfig) and tokens is not None:
            raise ValueError(f"--tokens {tokens}: a sample of {self.name} always has {self.tokens}")
        return dataclasses.replace(self, model=dataclasses.replace(self.model, **wanted)) if wanted else self

    def cost(self, plan: MemoryPlan, setup: TrainingSetup) -> Cost:
        """Of one step."""
        if isinstance(self.model, DalleConfig):
            return cost_of(self.model, plan, setup)
        return shape_cost(self.model, plan, setup)


def recipe_names() -> list[str]:
    """The recipes that come with the program."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def find_subject(name: str) -> Subject:
    """By the name of a recipe or preset, a TOML file, or a model folder; ValueError says what there is."""
    if name in recipe_names():
        return of_recipe(name, RECIPES / f"{name}.toml")
    if name in PRESETS:
        return Subject(name, PRESETS[name], MemoryPlan(activations="keep", loss_tokens=None))
    path = Path(name)
    if path.is_file():
        return of_recipe(path.stem, path)
    if path.is_dir():
        return of_folder(path)
    known = ", ".join([*recipe_names(), *PRESETS])
    raise ValueError(f"no model {name!r}: it is no file or folder, and none of {known}")


def of_folder(folder: Path) -> Subject:
    """The model of a model folder; only its config.json is read."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    content = read_json(folder / "config.json")
    fields = content.get("dalle") if isinstance(content, dict) else None
    if not isinstance(fields, dict):
        raise ValueError(f"{folder}/config.json does not name the model's configuration")
    return Subject(folder.name, config_of(fields, folder / "config.json"))


def of_recipe(name: str, path: Path) -> Subject:
    """The model of a recipe, its plan, and one of its micro-batches; what only data fixes is as in the paper."""
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no recipe: {error}") from None
    parts = {part: recipe.get(part, {}) for part in ("model", "memory", "optimizer", "data")}
    if not isinstance(recipe.get("model"), dict) or not all(isinstance(part, dict) for part in parts.values()):
        raise ValueError(f"{path} is no recipe: it has no section [model]")
    memory, data, optimizer = parts["memory"], parts["data"], parts["optimizer"]
    vocabulary = {"text_vocab_size": data["text_vocab_size"]} if "text_vocab_size" in data else {}
    config = config_of({**vocabulary, **parts["model"]}, path)
    try:
        precision = memory.get("precision", "fp32")
        setup = TrainingSetup.of_precision(
            precision,
            batch=max(1, data.get("batch_size", 1) // memory.get("micro_batches", 1)),
            optimizer=OPTIMIZER_OF.get(
                (optimizer.get("name", "lamb"), optimizer.get("eight_bit", True)), optimizer.get("name", "lamb")
            ),
            delayed=optimizer.get("delayed", False),
        )
        return Subject(name, config, plan_of(memory), setup, precision)
    except (TypeError, ZeroDivisionError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def config_of(fields: dict[str, Any], source: Path) -> DalleConfig:
    """The config of these fields; ValueError names where they come from."""
    try:
        return DalleConfig.from_dict(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from None


def plan_of(memory: dict[str, Any]) -> MemoryPlan:
    """The plan of a recipe's [memory], where 0 and "" stand for None; a recipe's defaults are the leaner ones."""
    names = {spec.name for spec in dataclasses.fields(MemoryPlan)}
    given = {name: value for name, value in memory.items() if name in names}
    none = ("", 0)
    sized: dict[str, Any] = {k: None if v in none and v is not False else v for k, v in given.items()}
    return MemoryPlan(**{"grads_in_place": True, "master_weights": True, **sized})
