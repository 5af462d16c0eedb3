"""What a run is for those who take part in it: swarm.toml. Nothing in it is secret.

It holds a recipe's sections and, before them, [swarm], [wire] and [timing].
"""

import dataclasses
import hashlib
import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dalle_lean import DalleConfig
from dalle_lean.errors import UserError
from dalle_lean.io.files import atomic_write, parse, read_text
from dalle_lean.require import require
from training.run.fields import check_at_least, check_one_of, typed_section
from training.run.recipe import MOST_RECIPE_BYTES, Recipe

NAME = "swarm.toml"
PROTOCOL = 1
"""Peers of different protocols do not understand each other."""
MODES = ("gradients", "diloco")
COMPRESSIONS = ("fp32", "fp16", "8bit")
AGGREGATIONS = ("centred_clipping", "trimmed_mean", "median", "mean")
SHARED_SCHEDULE = ("peak_lr", "warmup_steps", "total_steps", "length_warmup")


@dataclass(frozen=True, kw_only=True)
class SwarmSection:
    """Which run it is.

    Args:
        name: lower-case letters, digits and hyphens.
        protocol: see PROTOCOL.
        addresses: of the listening helpers, as /ip4/.../tcp/PORT/p2p/PEER; a newcomer needs one of them.
        donors: peer ids that are asked for the state first.
        min_peers: so many trainers must be there before the first step.
        data: where the shards are, a URL or a path; those who have a copy of their own name it with --data.
        data_fingerprint: SHA-256 of the data's dataset.json.
        tokenizer_fingerprint: SHA-256 of tokenizer.json, which the helpers hand out beside this file.
    """

    name: str = "run"
    protocol: int = PROTOCOL
    addresses: tuple[str, ...] = ()
    donors: tuple[str, ...] = ()
    min_peers: int = 1
    data: str = ""
    data_fingerprint: str = ""
    tokenizer_fingerprint: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", self.name):
            raise UserError(f"name = {self.name!r}: must be 1..64 lower-case letters, digits and hyphens")
        check_at_least(1, min_peers=self.min_peers)
        if self.protocol != PROTOCOL:
            raise UserError(
                f"protocol = {self.protocol}: this version of dalle-lean speaks {PROTOCOL}; install the run's version"
            )


@dataclass(frozen=True, kw_only=True)
class WireSection:
    """What peers send each other.

    Args:
        mode: "gradients", averaged for each step of the whole batch; or "diloco" (Douillard et al. 2023, arXiv
            2311.08105), where each peer takes `inner_steps` of its own and the way it went is averaged.
        compression: of what is averaged; "8bit" is 8 bits for tensors of at least `min_eight_bit_numel` elements and
            16 bits for the others, as in the paper's run.
        power_sgd_rank: gradients as products of matrices of this rank (Vogels et al. 2019); 0 is off.
        aggregation: the rule that makes one tensor of many; see training.swarm.averaging.aggregation.
        average_state_every: weights are averaged every so many steps.
        delayed: the optimizer's step runs beside the next gradients, which are taken at the weights before it.
        inner_steps, outer_lr, outer_momentum: of "diloco".
    """

    mode: str = "gradients"
    compression: str = "8bit"
    min_eight_bit_numel: int = 2**16
    power_sgd_rank: int = 0
    aggregation: str = "centred_clipping"
    average_state_every: int = 1
    delayed: bool = True
    inner_steps: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        check_one_of(MODES, mode=self.mode)
        check_one_of(COMPRESSIONS, compression=self.compression)
        check_one_of(AGGREGATIONS, aggregation=self.aggregation)
        check_at_least(0, power_sgd_rank=self.power_sgd_rank, min_eight_bit_numel=self.min_eight_bit_numel)
        check_at_least(1, average_state_every=self.average_state_every, inner_steps=self.inner_steps)
        if not (0 < self.outer_lr <= 2 and 0 <= self.outer_momentum < 1):
            raise UserError(
                f"outer_lr = {self.outer_lr}, outer_momentum = {self.outer_momentum}: must be in 0..2 and 0..1"
            )
        if self.mode == "diloco" and self.power_sgd_rank:
            raise UserError(f"power_sgd_rank = {self.power_sgd_rank}: only with mode = 'gradients'")


@dataclass(frozen=True, kw_only=True)
class TimingSection:
    """How long peers wait for each other, in seconds; over the Internet. See docs/host-your-own.md.

    Args:
        matchmaking_time_s: to find a group; a step should take at least five times as long.
        request_timeout_s: for an answer of a group's leader; less than matchmaking_time_s.
        averaging_timeout_s: for a whole all-reduce, about twice what it takes.
        next_chunk_timeout_s: without a byte from a peer, after which it counts as gone.
        load_state_timeout_s: for one donor's state.
        load_state_attempts: so often a peer that is behind asks for the state before it gives up.
        progress_expiration_s: a peer that says nothing for so long is no longer counted.
    """

    matchmaking_time_s: float = 15.0
    request_timeout_s: float = 5.0
    averaging_timeout_s: float = 120.0
    next_chunk_timeout_s: float = 15.0
    load_state_timeout_s: float = 600.0
    load_state_attempts: int = 5
    progress_expiration_s: float = 60.0

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            if not 0 < getattr(self, spec.name) < 1e6:
                raise UserError(f"{spec.name} = {getattr(self, spec.name)}: must be above 0 and below 1,000,000")
        if self.request_timeout_s >= self.matchmaking_time_s:
            raise UserError(
                f"request_timeout_s = {self.request_timeout_s}: must be less than matchmaking_time_s = "
                f"{self.matchmaking_time_s}"
            )
        if self.matchmaking_time_s >= self.averaging_timeout_s:
            raise UserError(
                f"matchmaking_time_s = {self.matchmaking_time_s}: must be less than averaging_timeout_s = "
                f"{self.averaging_timeout_s}, which holds both finding a group and averaging"
            )


@dataclass(frozen=True, kw_only=True)
class SwarmSettings:
    """A whole swarm.toml."""

    swarm: SwarmSection = SwarmSection()
    wire: WireSection = WireSection()
    timing: TimingSection = TimingSection()
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        if self.recipe.optimizer.name != "lamb":
            raise UserError(
                f"optimizer name = {self.recipe.optimizer.name!r}: a swarm shares the state of lamb, choose it"
            )
        if self.recipe.memory.precision == "bf16-weights":
            raise UserError("precision = 'bf16-weights': a swarm averages float32 weights, choose fp32, bf16 or fp16")

    @classmethod
    def from_dict(cls, sections: dict[str, Any]) -> Self:
        """ValueError for an unknown section or key, a wrong type, or a value out of range, by name."""
        own: dict[str, Any] = {}
        for name, kind in {"swarm": SwarmSection, "wire": WireSection, "timing": TimingSection}.items():
            values = sections.get(name, {})
            if not isinstance(values, dict):
                raise UserError(f"{name} = {values!r}: must be a section")
            try:
                own[name] = typed_section(kind, values)
            except ValueError as error:
                raise UserError(f"[{name}] {error}") from None
        return cls(**own, recipe=Recipe.from_dict({name: part for name, part in sections.items() if name not in own}))

    def to_dict(self) -> dict[str, Any]:
        """The sections; `from_dict` takes them back."""
        own = {name: dataclasses.asdict(getattr(self, name)) for name in ("swarm", "wire", "timing")}
        return {**own, **self.recipe.to_dict()}

    @property
    def total_steps(self) -> int:
        """Of the schedule; in "diloco" mode a step of the swarm holds `inner_steps` of them."""
        return self.recipe.schedule.total_steps

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the schedule between two rounds of averaging."""
        return self.wire.inner_steps if self.wire.mode == "diloco" else 1

    @property
    def last_epoch(self) -> int:
        """The swarm's step that ends the schedule."""
        return -(-self.total_steps // self.steps_per_epoch)

    @property
    def target_batch_size(self) -> int:
        """Samples of all peers together between two rounds of averaging."""
        return self.recipe.data.batch_size * self.steps_per_epoch

    @property
    def fingerprints(self) -> dict[str, str]:
        """What all peers must agree on, part by part: short hashes."""
        recipe = self.recipe.to_dict()
        # What only trades memory for time, and what is looked at on the way, is everybody's own.
        schedule = {name: recipe["schedule"][name] for name in SHARED_SCHEDULE}
        parts = {
            "protocol": self.swarm.protocol,
            "model": DalleConfig.from_dict(recipe["model"]).to_dict(),
            "optimizer": recipe["optimizer"],
            "schedule": schedule,
            "batch size": recipe["data"]["batch_size"],
            "caption dropout": recipe["data"]["caption_dropout"],
            "held-out share": recipe["data"]["heldout_share"],
            "seed of the first weights": recipe["data"]["seed"],
            "wire settings": dataclasses.asdict(self.wire),
            "data": self.swarm.data_fingerprint,
            "tokenizer": self.swarm.tokenizer_fingerprint,
        }
        return {name: digest(part) for name, part in parts.items()}

    @property
    def run_id(self) -> str:
        """The name under which peers find each other: only those that agree on everything do."""
        return f"{self.swarm.name}-{digest(self.fingerprints)}"

    def differences(self, other: "SwarmSettings") -> list[str]:
        """The parts on which two peers would not agree."""
        theirs = other.fingerprints
        return [name for name, value in self.fingerprints.items() if theirs[name] != value]


def digest(content: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def write_settings(path: Path, settings: SwarmSettings) -> None:
    """Write swarm.toml."""
    text = require("tomli_w", extra="training").dumps(for_toml(settings.to_dict()))
    with atomic_write(path) as temporary:
        temporary.write_text(f"# What a volunteer needs to take part in this run; nothing here is secret.\n\n{text}")


def parse_settings(text: str, name: str) -> SwarmSettings:
    """The settings of a swarm.toml's text; ValueError names the file and what is wrong with it."""
    try:
        return SwarmSettings.from_dict(parse(tomllib.loads, text, "it is not TOML"))
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def read_settings(path: Path) -> SwarmSettings:
    """The settings of a swarm.toml, or of the folder that holds one; ValueError as `parse_settings`."""
    path = path / NAME if path.is_dir() else path
    try:
        text = read_text(path, MOST_RECIPE_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; give the swarm.toml of a run, or an address of it") from None
    return parse_settings(text, str(path))


def for_toml(sections: dict[str, Any]) -> dict[str, Any]:
    """TOML has no None: a model's field is left out then, elsewhere in a recipe 0 stands for it."""
    model = {name: value for name, value in sections["model"].items() if value is not None}
    others = {
        section: {name: 0 if value is None else value for name, value in values.items()}
        for section, values in sections.items()
    }
    return {**others, "model": model}
