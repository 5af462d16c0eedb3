"""Recipes: the settings of a training run, as TOML with [model], [memory], [optimizer], [schedule] and [data]."""

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

from dalle_lean import DalleConfig, MemoryPlan
from dalle_lean.errors import UserError
from dalle_lean.fields import NonNegativeInt, PositiveInt, Range, Share, check
from dalle_lean.io.files import parse, read_text
from dalle_lean.memory.setup import OPTIMIZERS, PRECISIONS, TrainingSetup
from dalle_lean.optim.lamb_settings import check_settings
from dalle_lean.words import perhaps
from training.run.rates import learning_rate

RECIPES = Path(__file__).parents[1] / "recipes"
LAMB_ONLY = ("clamp_weight_norm", "bias_correction", "eight_bit", "block_size", "min_eight_bit_numel")
MOST_RECIPE_BYTES = 2**20
SHARED_SCHEDULE = ("total_steps", "peak_lr", "warmup_steps", "hold_steps", "length_warmup")
"""The fields of a schedule that decide what is learnt; the others are intervals."""


@dataclass(frozen=True, kw_only=True)
class MemoryRecipe(MemoryPlan):
    """A MemoryPlan, where 0 and "" mean None, with further settings that trade memory for time. All change the result
    by rounding only. Fused attention is left out where a GPU cannot run it.

    Args:
        precision: "fp32"; "bf16" or "fp16", autocast with float32 weights; "bf16-weights", whose only float32 weights
            are Lamb's copies on the CPU. fp16 has a gradient scale for each branch (dalle_lean.model.grad_scales), and
            so needs activations that are recomputed.
        micro_batches: parts of a batch computed one after another, with their gradients accumulated.
        compile: run forward and backward through torch.compile.
    """

    grads_in_place: bool = True
    fused_attention: bool = True
    master_weights: bool = True
    precision: Annotated[str, tuple(PRECISIONS)] = "fp32"
    micro_batches: PositiveInt = 1
    compile: bool = False

    def __post_init__(self) -> None:
        check(self, " = ")

    def activations_for(self, config: DalleConfig) -> str:
        """As MemoryPlan's; also ValueError if they do not go with the precision."""
        activations = super().activations_for(config)
        if self.precision == "fp16" and activations not in ("checkpoint", "reversible"):
            raise UserError(
                f"precision = 'fp16' with activations = {activations!r}: gradient scales need branches that "
                "are recomputed; choose checkpoint or reversible"
            )
        return activations


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """The optimizer, by default the paper's. dalle_lean.optim.lamb.Lamb explains the fields not listed here.

    Args:
        name: "lamb", "adamw" (torch's), "adamw8bit" (bitsandbytes') or "muon" (torch's for the blocks' matrices, AdamW
            for the rest). Only lamb takes the fields after clip_norm.
        max_skipped_in_row: consecutive non-finite steps that end the run.
        clip_norm: largest gradient norm; longer gradients are scaled down to it.
    """

    name: Annotated[str, OPTIMIZERS] = "lamb"
    betas: tuple[float, ...] = (0.9, 0.96)
    eps: float = 1e-6
    weight_decay: float = 0.045
    max_skipped_in_row: PositiveInt = 20
    clip_norm: float = 4.0
    clamp_weight_norm: float = 1e4
    bias_correction: bool = False
    eight_bit: bool = True
    block_size: int = 4096
    min_eight_bit_numel: int = 65536

    def __post_init__(self) -> None:
        check(self, " = ")
        check_settings(vars(self))
        if not self.clip_norm > 0:
            raise UserError(f"clip_norm = {self.clip_norm}: must be above 0")
        for spec in dataclasses.fields(self):
            if self.name != "lamb" and spec.name in LAMB_ONLY and getattr(self, spec.name) != spec.default:
                raise UserError(f"{spec.name}: {self.name} has no such setting; leave it out or choose lamb")


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe:
    """Learning rates and intervals, all in optimizer steps; an interval of 0 means never.

    Args:
        peak_lr: learning rate at the end of the warm-up.
        warmup_steps: steps of the linear rise from 0.
        hold_steps: steps at the peak after the warm-up. Until they end, total_steps may still be raised: the steps
            taken so far stay the same.
        total_steps: the learning rate falls linearly to 0 after these.
        length_warmup: (until_step, text_len, image_side) in ascending order of until_step. Up to that step, a sample is
            the first text_len ids of its caption and a random square of image_side x image_side codes; after the last
            one, samples are whole.
        log_every, heldout_every, sample_every, checkpoint_every: intervals; at the last step, all are due.
    """

    peak_lr: Annotated[float, Range(0)] = 2.5e-3
    warmup_steps: NonNegativeInt = 3125
    hold_steps: NonNegativeInt = 0
    total_steps: PositiveInt = 31250
    length_warmup: tuple[tuple[int, int, int], ...] = ()
    log_every: PositiveInt = 10
    heldout_every: NonNegativeInt = 500
    sample_every: NonNegativeInt = 500
    checkpoint_every: NonNegativeInt = 500

    def __post_init__(self) -> None:
        check(self, " = ")
        if self.warmup_steps + self.hold_steps > self.total_steps:
            raise UserError(
                f"warmup_steps = {self.warmup_steps} and hold_steps = {self.hold_steps}: their sum must not exceed "
                f"total_steps = {self.total_steps}"
            )
        ends = [until_step for until_step, _, _ in self.length_warmup]
        if ends != sorted(set(ends)) or not all(1 <= end <= self.total_steps for end in ends):
            raise UserError(f"length_warmup ends at the steps {ends}: must be ascending within 1..{self.total_steps}")

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        return learning_rate(
            step,
            peak=self.peak_lr,
            warmup_steps=self.warmup_steps,
            hold_steps=self.hold_steps,
            total_steps=self.total_steps,
        )

    def check_lengths(self, config: DalleConfig) -> None:
        """ValueError if a stage of `length_warmup` exceeds the model's captions or pictures."""
        for until_step, text_len, image_side in self.length_warmup:
            if not (1 <= text_len <= config.text_len and 1 <= image_side <= config.image_side):
                raise UserError(
                    f"length_warmup = {[until_step, text_len, image_side]}: this model needs text_len in "
                    f"1..{config.text_len} and image_side in 1..{config.image_side}"
                )

    def with_steps(self, steps: int) -> Self:
        """The schedule for another number of steps; warm-ups and hold keep their shares."""

        def share(step: int) -> int:
            return round(step * steps / self.total_steps)

        stages = {share(until_step): (text_len, side) for until_step, text_len, side in self.length_warmup}
        lengths = tuple((until_step, *length) for until_step, length in stages.items() if until_step)
        return dataclasses.replace(
            self,
            total_steps=steps,
            warmup_steps=share(self.warmup_steps),
            hold_steps=share(self.warmup_steps + self.hold_steps) - share(self.warmup_steps),
            length_warmup=lengths,
        )


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """The batches.

    Args:
        batch_size: samples in an optimizer step.
        text_vocab_size: vocabulary size of the tokenizer trained on the captions if none is given.
        shuffle_buffer: samples held in memory and shuffled together.
        shuffle_shards: shards read side by side to fill the shuffle buffer.
        heldout_share: share of the rows, by the hash of their keys, to measure on if no held-out shards are given.
        heldout_samples: rows to measure, at most.
        caption_dropout: share of the captions, 0..1, to replace by the empty caption for classifier-free guidance;
            held-out samples keep theirs.
        seed: of the order of the data, the initial weights, the dropped captions and the drawn samples.
    """

    batch_size: PositiveInt = 4096
    text_vocab_size: PositiveInt = 4096
    shuffle_buffer: PositiveInt = 10_000
    shuffle_shards: PositiveInt = 8
    heldout_share: Share = 0.01
    heldout_samples: NonNegativeInt = 512
    caption_dropout: Annotated[float, Range(0, 1)] = 0.0
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        check(self, " = ")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run. `model` holds fields of DalleConfig, where those that data and tokenizer determine are optional."""

    model: dict[str, Any] = field(default_factory=dict)
    memory: MemoryRecipe = MemoryRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    schedule: ScheduleRecipe = ScheduleRecipe()
    data: DataRecipe = DataRecipe()

    def __post_init__(self) -> None:
        self.memory.activations_for(DalleConfig.from_dict(self.model))
        if self.memory.precision == "bf16-weights" and self.optimizer.name != "lamb":
            raise UserError(
                f"precision = 'bf16-weights' with optimizer {self.optimizer.name!r}: steps too small for bfloat16 are "
                "lost without the float32 copies that only lamb keeps"
            )
        if self.data.batch_size % self.memory.micro_batches:
            sizes = f"batch_size = {self.data.batch_size}, micro_batches = {self.memory.micro_batches}"
            raise UserError(f"{sizes}: batch_size must be a multiple of micro_batches")

    @classmethod
    def from_dict(cls, sections: dict[str, Any]) -> Self:
        """A recipe from its sections; ValueError names an unknown section or key, or a value of wrong type or range."""
        parts: dict[str, Any] = {}
        known = {spec.name: spec.default for spec in dataclasses.fields(cls)}
        for name, values in sections.items():
            if name not in known:
                raise UserError(f"unknown section [{name}]; a recipe has {', '.join(f'[{part}]' for part in known)}")
            if not isinstance(values, dict):
                raise UserError(f"{name} = {values!r}: must be a section")
            try:
                if name == "optimizer":
                    values = dict(values)
                    if (delayed := values.pop("delayed", False)) is not False:  # an option that earlier versions had
                        raise UserError(f"delayed = {delayed!r}: this option is gone; leave it out")
                parts[name] = values if name == "model" else typed_section(type(known[name]), values)
            except ValueError as error:
                raise UserError(f"[{name}] {error}") from None
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
        """The recipe with the given values; warm-ups and hold keep their shares of `steps`."""
        schedule = self.schedule if steps is None else self.schedule.with_steps(steps)
        return dataclasses.replace(
            self,
            schedule=replace_given(schedule, peak_lr=lr),
            data=replace_given(self.data, batch_size=batch_size, seed=seed),
            memory=replace_given(self.memory, precision=precision),
        )

    def share_of(self, world: int) -> Self:
        """The recipe of each of `world` processes that share every batch, with micro-batches no larger than before.

        UserError if `world` does not divide the batch size.
        """
        if self.data.batch_size % world:
            raise UserError(f"batch_size = {self.data.batch_size}: must be a multiple of the {world} processes")
        share, fewest = self.data.batch_size // world, -(-self.memory.micro_batches // world)
        return dataclasses.replace(
            self,
            data=dataclasses.replace(self.data, batch_size=share),
            memory=dataclasses.replace(
                self.memory, micro_batches=next(parts for parts in range(fewest, share + 1) if share % parts == 0)
            ),
        )

    def training_setup(self, device: str = "cuda") -> TrainingSetup:
        """The settings that the cost of a micro-batch depends on; device is "cuda" or "cpu"."""
        chosen = self.optimizer
        return TrainingSetup.of_precision(
            self.memory.precision,
            batch=self.data.batch_size // self.memory.micro_batches,
            optimizer="lamb8bit" if chosen.name == "lamb" and chosen.eight_bit else chosen.name,
            block_size=chosen.block_size,
            min_eight_bit_numel=chosen.min_eight_bit_numel,
            device=device,
        )

    def model_config(self, *, image_side: int, image_vocab_size: int, text_vocab_size: int) -> DalleConfig:
        """The model for this data and tokenizer; ValueError if the recipe contradicts them."""
        found = {"image_side": image_side, "image_vocab_size": image_vocab_size, "text_vocab_size": text_vocab_size}
        for name, value in found.items():
            if self.model.get(name, value) != value:
                origin = "tokenizer" if name == "text_vocab_size" else "data"
                raise UserError(f"the recipe's model has {name} = {self.model[name]}, but the {origin} has {value}")
        config = DalleConfig.from_dict({**self.model, **found})
        self.schedule.check_lengths(config)
        return config


def replace_given(section: Any, **values: Any) -> Any:
    """`dataclasses.replace` with the values that are not None."""
    return dataclasses.replace(section, **{name: value for name, value in values.items() if value is not None})


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(name_or_file: str | Path, *, needs_model: bool = True) -> Recipe:
    """Load a bundled recipe by name, or a recipe's file; ValueError names the file and what is wrong with it.

    Args:
        needs_model: whether [model] is required, as it is unless training starts from a model.
    """
    path = RECIPES / f"{name_or_file}.toml"
    if not path.exists():
        path = Path(name_or_file)
    if not path.is_file():
        known = recipe_names()
        said = f"no recipe {name_or_file!r}{perhaps(str(name_or_file), known)}"
        raise UserError(f"{said}: it is neither a file nor one of {', '.join(known)}")
    try:
        return parse_recipe(read_text(path, MOST_RECIPE_BYTES), needs_model=needs_model)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def parse_recipe(text: str, *, needs_model: bool = True) -> Recipe:
    """Parse a recipe's TOML; ValueError says what is wrong with it."""
    sections = parse(tomllib.loads, text, "it is not TOML")
    recipe = Recipe.from_dict(sections)
    if needs_model and not recipe.model:
        raise UserError("its [model] is missing or empty; fill it in, or name the recipe paper for the paper's model")
    for name in ("offload_optimizer", "master_weights"):
        if recipe.optimizer.name != "lamb" and sections.get("memory", {}).get(name):
            raise UserError(
                f"[memory] {name}: {recipe.optimizer.name} has no such setting; leave it out or choose lamb"
            )
    return recipe


def typed_section(section: type, values: dict[str, Any]) -> Any:
    """Return `section(**values)`; UserError for an unknown key or a value of the wrong type, by name."""
    hints = get_type_hints(section)
    given = {}
    for name, value in values.items():
        if name not in hints:
            raise UserError(f"{name}: unknown key; known are {', '.join(hints)}")
        try:
            given[name] = typed(value, hints[name])
        except (TypeError, ValueError):
            hint = str(hints[name]) if get_args(hints[name]) else hints[name].__name__
            raise UserError(f"{name} = {value!r}: must be of type {hint}") from None
    return section(**given)


def typed(value: Any, hint: Any) -> Any:
    """Convert a TOML or JSON value to a field's type; 0 and "" become None if the field may be None. TypeError or
    ValueError if it does not fit."""
    arguments = get_args(hint)
    if type(None) in arguments:
        unset = value is None or (value in (0, "") and not isinstance(value, bool))
        return None if unset else typed(value, arguments[0])
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError
        items = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(typed(part, item) for part, item in zip(value, items, strict=True))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError
    return value
