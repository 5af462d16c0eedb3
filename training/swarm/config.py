"""swarm.toml: what all peers of a run share. Nothing in it is secret.

It holds [swarm], [wire] and [timing], then a recipe's sections.
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
from dalle_lean.io.files import parse, read_text, write_bytes
from dalle_lean.require import require
from training.run.fields import check_at_least, check_one_of, typed_section
from training.run.recipe import MOST_RECIPE_BYTES, Recipe

SWARM_TOML = "swarm.toml"
PROTOCOL = 2
"""Peers with different protocols cannot work together."""
MODES = ("gradients", "diloco")
COMPRESSIONS = ("fp32", "fp16", "8bit")
ADMISSION_KEYS = ("run_key", "admission")
ADMISSIONS = ("open", "invite", "list")
AGGREGATIONS = ("centred_clipping", "trimmed_mean", "median", "mean")
SHARED_SCHEDULE = ("peak_lr", "warmup_steps", "hold_steps", "total_steps", "length_warmup")


@dataclass(frozen=True, kw_only=True)
class SwarmSection:
    """Identifies the run.

    Args:
        name: lower-case letters, digits and hyphens.
        protocol: see PROTOCOL.
        addresses: of the helpers, as /ip4/.../tcp/PORT/p2p/PEER; a newcomer needs one of them.
        donors: peer ids to ask for the state first.
        min_peers: trainers required before the first step.
        data: URL or path of the shards; volunteers with a copy name it with --data.
        data_fingerprint: SHA-256 of the data's dataset.json.
        tokenizer_fingerprint: SHA-256 of tokenizer.json, which helpers hand out with this file.
        first_weights: SHA-256 of the model.safetensors of the folder that the run began with: it names the run,
            peers fetch a checkpoint; empty where a seed gives the weights.
        run_key: public key, in hexadecimal, that signs passes; empty in a run that anybody takes part in without one.
        admission: who gets a pass, see training.swarm.admission.desk.
    """

    name: str = "run"
    protocol: int = PROTOCOL
    addresses: tuple[str, ...] = ()
    donors: tuple[str, ...] = ()
    min_peers: int = 1
    data: str = ""
    data_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    first_weights: str = ""
    run_key: str = ""
    admission: str = "open"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", self.name):
            raise UserError(f"name = {self.name!r}: must be 1..64 lower-case letters, digits and hyphens")
        check_at_least(1, min_peers=self.min_peers)
        check_one_of(ADMISSIONS, admission=self.admission)
        for key in ("first_weights", "run_key"):
            value = getattr(self, key)
            if not re.fullmatch(r"([0-9a-f]{64})?", value):
                raise UserError(f"{key} = {value[:80]!r}: must be 64 hexadecimal digits")
        if self.protocol != PROTOCOL:
            raise UserError(
                f"protocol = {self.protocol}: this version of dalle-lean speaks {PROTOCOL}; install the run's version"
            )

    @property
    def rollbacks(self) -> int:
        """How often the run was rolled back, by its name: emoji, emoji-back1, emoji-back2, ..."""
        match = re.search(r"-back([0-9]+)$", self.name)
        return int(match[1]) if match else 0


@dataclass(frozen=True, kw_only=True)
class WireSection:
    """What peers send each other.

    Args:
        mode: "gradients" averages gradients at each step; "diloco" (Douillard et al. 2023, arXiv 2311.08105) averages
            weight changes after `inner_steps` local steps.
        compression: of averaged tensors; "8bit" sends tensors of at least `min_eight_bit_numel` elements in 8 bits and
            others in 16, as in the paper's run.
        power_sgd_rank: send gradients as products of matrices of this rank (Vogels et al. 2019); 0 turns it off.
        aggregation: the rule that reduces many tensors to one; see training.swarm.averaging.robust_rules.
        average_state_every: steps between averages of the weights.
        delayed: the optimizer's step runs while the next gradients are computed, with the weights before the step.
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
                f"outer_lr = {self.outer_lr}, outer_momentum = {self.outer_momentum}: "
                "outer_lr must be in (0, 2], outer_momentum in [0, 1)"
            )
        if self.mode == "diloco" and self.power_sgd_rank:
            raise UserError(f"power_sgd_rank = {self.power_sgd_rank}: only with mode = 'gradients'")


@dataclass(frozen=True, kw_only=True)
class TimingSection:
    """How long peers wait for each other, in seconds; over the Internet. See docs/host-your-own.md.

    Args:
        matchmaking_time_s: to find a group; a step should take at least five times as long.
        request_timeout_s: for an answer from a group's leader; less than matchmaking_time_s.
        averaging_timeout_s: for a whole all-reduce; about twice what it takes.
        next_chunk_timeout_s: a peer that sends nothing for this long counts as gone.
        load_state_timeout_s: to download the state from one donor.
        load_state_attempts: downloads that a peer which is behind attempts before it gives up.
        progress_expiration_s: a peer that reports nothing for this long no longer counts.
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
                f"optimizer name = {self.recipe.optimizer.name!r}: a swarm shares the state of LAMB; give --config a "
                'recipe with name = "lamb" and a rate for it'
            )
        if self.recipe.memory.precision == "bf16-weights":
            raise UserError("precision = 'bf16-weights': a swarm averages float32 weights, choose fp32, bf16 or fp16")

    @classmethod
    def from_dict(cls, sections: dict[str, Any]) -> Self:
        """Parse the sections; ValueError names an unknown section or key, a wrong type, or a value out of range."""
        parsed: dict[str, Any] = {}
        for name, kind in {"swarm": SwarmSection, "wire": WireSection, "timing": TimingSection}.items():
            values = sections.get(name, {})
            if not isinstance(values, dict):
                raise UserError(f"{name} = {values!r}: must be a section")
            try:
                parsed[name] = typed_section(kind, values)
            except ValueError as error:
                raise UserError(f"[{name}] {error}") from None
        return cls(
            **parsed, recipe=Recipe.from_dict({name: part for name, part in sections.items() if name not in parsed})
        )

    def to_dict(self) -> dict[str, Any]:
        """The sections; `from_dict` takes them back."""
        first = {name: dataclasses.asdict(getattr(self, name)) for name in ("swarm", "wire", "timing")}
        return {**first, **self.recipe.to_dict()}

    @property
    def model(self) -> DalleConfig:
        """The recipe's model, which is complete in a swarm.toml."""
        return DalleConfig.from_dict(self.recipe.model)

    @property
    def total_steps(self) -> int:
        """Of the schedule; a "diloco" step of the swarm consists of `inner_steps` of them."""
        return self.recipe.schedule.total_steps

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the schedule per step of the swarm."""
        return self.wire.inner_steps if self.wire.mode == "diloco" else 1

    @property
    def first_epoch(self) -> int:
        """The step of the swarm at which the run began: 1 where its first weights have to be downloaded.

        A peer at step 0 is then behind the others, and fetches their state.
        """
        return 1 if self.swarm.first_weights else 0

    @property
    def last_epoch(self) -> int:
        """The step of the swarm that ends the schedule."""
        return -(-self.total_steps // self.steps_per_epoch)

    @property
    def target_batch_size(self) -> int:
        """Samples of all peers together per step of the swarm."""
        return self.recipe.data.batch_size * self.steps_per_epoch

    @property
    def fingerprints(self) -> dict[str, str]:
        """Short hashes of what all peers must agree on, by part."""
        recipe = self.recipe.to_dict()
        # What trades memory for time, and intervals of logging, may differ between peers.
        schedule = {name: recipe["schedule"][name] for name in SHARED_SCHEDULE}
        parts = {
            "protocol": self.swarm.protocol,
            "model": self.model.to_dict(),
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
        # A run without one of these keeps its run id.
        if self.swarm.first_weights:
            parts["first weights"] = self.swarm.first_weights
        if self.swarm.run_key:
            parts["key"] = self.swarm.run_key
        return {name: digest(part) for name, part in parts.items()}

    @property
    def run_id(self) -> str:
        """The name under which peers find each other: it hashes what they must agree on."""
        return f"{self.swarm.name}-{digest(self.fingerprints)}"

    def differences(self, other: "SwarmSettings") -> list[str]:
        """The parts on which the settings disagree."""
        theirs = other.fingerprints
        ours = self.fingerprints
        return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def digest(content: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def write_settings(path: Path, settings: SwarmSettings) -> None:
    text = require("tomli_w", extra="training").dumps(for_toml(settings.to_dict()))
    write_bytes(path, f"# What a volunteer needs to take part in this run; nothing here is secret.\n\n{text}".encode())


def parse_settings(text: str, name: str) -> SwarmSettings:
    """Parse the text of a swarm.toml; ValueError names the file and what is wrong with it."""
    try:
        return SwarmSettings.from_dict(parse(tomllib.loads, text, "it is not TOML"))
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def read_settings(path: Path) -> SwarmSettings:
    """Read a swarm.toml, or the one in a folder; ValueError as `parse_settings`."""
    path = path / SWARM_TOML if path.is_dir() else path
    try:
        text = read_text(path, MOST_RECIPE_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; give the swarm.toml of a run, or an address of it") from None
    return parse_settings(text, str(path))


def for_toml(sections: dict[str, Any]) -> dict[str, Any]:
    """TOML has no None: the model's fields are left out, elsewhere in a recipe 0 means None."""
    model = {name: value for name, value in sections["model"].items() if value is not None}
    others = {
        section: {name: 0 if value is None else value for name, value in values.items()}
        for section, values in sections.items()
    }
    # Older versions read the runs that they can take part in.
    unused: tuple[str, ...] = ADMISSION_KEYS if not others["swarm"]["run_key"] else ()
    unused += () if others["swarm"]["first_weights"] else ("first_weights",)
    others["swarm"] = {name: value for name, value in others["swarm"].items() if name not in unused}
    return {**others, "model": model}
