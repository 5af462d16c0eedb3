"""Recipes: what a training run is, as TOML with the sections [model] [memory] [optimizer] [schedule] [data]."""

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dalle_lean import DalleConfig, MemoryPlan

RECIPES = Path(__file__).parent / "recipes"


def check_at_least(minimum: float, **values: float) -> None:
    """ValueError that names the first of `values` below `minimum`."""
    for name, value in values.items():
        if not minimum <= value < float("inf"):
            raise ValueError(f"{name} = {value}: must be a finite number of at least {minimum}")


def check_one_of(allowed: tuple[str, ...], **values: str) -> None:
    """ValueError that names the first of `values` outside `allowed`."""
    for name, value in values.items():
        if value not in allowed:
            raise ValueError(f"{name} = {value!r}: must be one of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class MemoryRecipe:
    """What trades memory for time; it changes the result only by rounding.

    Args:
        activations: see MemoryPlan; "" takes the leanest that the model allows.
        precision: "fp32", or "bf16" for bfloat16 autocast over float32 weights.
        micro_batches: parts a batch is computed in; their gradients are accumulated.
        compile: run the forward and backward through torch.compile.
    """

    activations: str = ""
    precision: str = "fp32"
    micro_batches: int = 1
    compile: bool = False

    def __post_init__(self) -> None:
        check_one_of(("fp32", "bf16"), precision=self.precision)
        check_at_least(1, micro_batches=self.micro_batches)
        self.plan()

    def plan(self) -> MemoryPlan:
        """The model's part of it."""
        return MemoryPlan(activations=self.activations or None)


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """The optimizer; the defaults are the paper's. See dalle_lean.optim.Lamb for the fields they share.

    Args:
        name: "lamb", or "adamw": torch's, which takes none of the fields after clip_norm.
        clip_norm: the gradient's norm is cut to this.
        max_skipped_in_row: so many non-finite steps in a row end the run.
    """

    name: str = "lamb"
    betas: tuple[float, ...] = (0.9, 0.96)
    eps: float = 1e-6
    weight_decay: float = 0.045
    max_skipped_in_row: int = 20
    clip_norm: float = 4.0
    clamp_weight_norm: float = 1e4
    bias_correction: bool = False
    eight_bit: bool = True
    block_size: int = 4096
    min_eight_bit_numel: int = 65536

    def __post_init__(self) -> None:
        check_one_of(("lamb", "adamw"), name=self.name)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)}: must be two numbers of at least 0 and below 1")
        check_at_least(0, eps=self.eps, weight_decay=self.weight_decay, min_eight_bit_numel=self.min_eight_bit_numel)
        check_at_least(1, block_size=self.block_size, max_skipped_in_row=self.max_skipped_in_row)
        if not (self.clip_norm > 0 and self.clamp_weight_norm > 0):
            raise ValueError(
                f"clip_norm = {self.clip_norm}, clamp_weight_norm = {self.clamp_weight_norm}: must be above 0"
            )
        own = ("clamp_weight_norm", "bias_correction", "eight_bit", "block_size", "min_eight_bit_numel")
        for spec in dataclasses.fields(self):
            if self.name == "adamw" and spec.name in own and getattr(self, spec.name) != spec.default:
                raise ValueError(f"{spec.name}: adamw has no such setting, leave it out or choose lamb")


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe:
    """How long, how fast, what is looked at on the way; lengths in optimizer steps, an interval of 0 means never.

    Args:
        peak_lr: learning rate at the end of the warm-up.
        warmup_steps: linear rise from 0.
        total_steps: linear fall to 0 after the warm-up.
        log_every, heldout_every, sample_every, checkpoint_every: intervals; the last step always has all of them.
    """

    peak_lr: float = 2.5e-3
    warmup_steps: int = 3125
    total_steps: int = 31250
    log_every: int = 10
    heldout_every: int = 500
    sample_every: int = 500
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        check_at_least(0, peak_lr=self.peak_lr, warmup_steps=self.warmup_steps)
        check_at_least(1, total_steps=self.total_steps, log_every=self.log_every)
        check_at_least(
            0, heldout_every=self.heldout_every, sample_every=self.sample_every, checkpoint_every=self.checkpoint_every
        )
        if self.warmup_steps > self.total_steps:
            raise ValueError(f"warmup_steps = {self.warmup_steps}: more than total_steps = {self.total_steps}")


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """What a batch is made of.

    Args:
        batch_size: samples in one optimizer step.
        text_vocab_size: ids of the tokenizer that is made from the captions where none is given.
        shuffle_buffer: samples held in memory to shuffle among.
        heldout_share: share of the rows, by the hash of their keys, kept for measuring where no held-out shards are.
        heldout_samples: at most so many are measured.
        seed: of the order of the data, the first weights and the drawn samples.
    """

    batch_size: int = 4096
    text_vocab_size: int = 4096
    shuffle_buffer: int = 10_000
    heldout_share: float = 0.01
    heldout_samples: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(
            1, batch_size=self.batch_size, shuffle_buffer=self.shuffle_buffer, text_vocab_size=self.text_vocab_size
        )
        check_at_least(0, heldout_samples=self.heldout_samples, seed=self.seed)
        if not 0 <= self.heldout_share < 1:
            raise ValueError(f"heldout_share = {self.heldout_share}: must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run. `model` holds fields of DalleConfig; those that the data and the tokenizer fix may be left out."""

    model: dict[str, Any] = field(default_factory=dict)
    memory: MemoryRecipe = MemoryRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    schedule: ScheduleRecipe = ScheduleRecipe()
    data: DataRecipe = DataRecipe()

    def __post_init__(self) -> None:
        DalleConfig.from_dict(self.model)
        if self.data.batch_size % self.memory.micro_batches:
            sizes = f"batch_size = {self.data.batch_size}, micro_batches = {self.memory.micro_batches}"
            raise ValueError(f"{sizes}: the first must be a multiple of the second")

    @classmethod
    def from_dict(cls, sections: dict[str, Any]) -> Self:
        """ValueError for an unknown section or key, a value of the wrong type, or one out of range, by name."""
        parts: dict[str, Any] = {}
        known = {spec.name: spec.default for spec in dataclasses.fields(cls)}
        for name, values in sections.items():
            if name not in known:
                raise ValueError(f"unknown section [{name}]; a recipe has {', '.join(f'[{part}]' for part in known)}")
            if not isinstance(values, dict):
                raise ValueError(f"{name} = {values!r}: must be a section")
            try:
                parts[name] = values if name == "model" else typed_section(type(known[name]), values)
            except ValueError as error:
                raise ValueError(f"[{name}] {error}") from None
        return cls(**parts)

    def to_dict(self) -> dict[str, Any]:
        """The sections, ready for JSON; `from_dict` takes them back."""
        return dataclasses.asdict(self)

    def override(
        self,
        *,
        steps: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        seed: int | None = None,
        precision: str | None = None,
    ) -> Self:
        """The recipe with what is given put in its place; the warm-up keeps its share of `steps`."""
        schedule = self.schedule
        if steps is not None:
            warmup_steps = round(schedule.warmup_steps * steps / schedule.total_steps)
            schedule = dataclasses.replace(schedule, total_steps=steps, warmup_steps=warmup_steps)
        return dataclasses.replace(
            self,
            schedule=replace_given(schedule, peak_lr=lr),
            data=replace_given(self.data, batch_size=batch_size, seed=seed),
            memory=replace_given(self.memory, precision=precision),
        )

    def model_config(self, *, image_side: int, image_vocab_size: int, text_vocab_size: int) -> DalleConfig:
        """The model for this data and tokenizer; ValueError where the recipe says otherwise."""
        found = {"image_side": image_side, "image_vocab_size": image_vocab_size, "text_vocab_size": text_vocab_size}
        for name, value in found.items():
            if self.model.get(name, value) != value:
                origin = "tokenizer" if name == "text_vocab_size" else "data"
                raise ValueError(f"the recipe's model has {name} = {self.model[name]}, but the {origin} has {value}")
        return DalleConfig.from_dict({**self.model, **found})


def typed_section(section: type, values: dict[str, Any]) -> Any:
    """`section(**values)` once every key is known and every value has its default's type."""
    defaults = {spec.name: spec.default for spec in dataclasses.fields(section)}
    typed = {}
    for name, value in values.items():
        if name not in defaults:
            raise ValueError(f"{name}: unknown key; known are {', '.join(defaults)}")
        default = defaults[name]
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if isinstance(default, tuple) and isinstance(value, list):
            value = tuple(value)
        if type(value) is not type(default):
            raise ValueError(f"{name} = {value!r}: must be of type {type(default).__name__}")
        typed[name] = value
    return section(**typed)


def replace_given(section: Any, **values: Any) -> Any:
    """`dataclasses.replace` with the values that are not None."""
    return dataclasses.replace(section, **{name: value for name, value in values.items() if value is not None})


def recipe_names() -> list[str]:
    """The recipes that come with the program."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(name_or_file: str | Path) -> Recipe:
    """A recipe by its name here or by its file; ValueError names the file and what is wrong with it."""
    path = RECIPES / f"{name_or_file}.toml"
    if not path.exists():
        path = Path(name_or_file)
    if not path.is_file():
        raise ValueError(f"no recipe {name_or_file!r}: it is neither a file nor one of {', '.join(recipe_names())}")
    try:
        return Recipe.from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
