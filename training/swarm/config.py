"""swarm.toml: the settings that all peers of a run share. Nothing in it is secret.

It has the sections [swarm], [wire] and [timing], then those of a recipe.
"""

import dataclasses
import hashlib
import json
import re
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from dalle_lean import DalleConfig
from dalle_lean.errors import UserError
from dalle_lean.fields import NonNegativeInt, PositiveInt, Range, Share, check
from dalle_lean.io.files import parse, read_text, write_bytes
from dalle_lean.require import require
from training.data.catalog import is_url
from training.run.recipe import MOST_RECIPE_BYTES, SHARED_SCHEDULE, Recipe, typed_section

SWARM_TOML = "swarm.toml"
PROTOCOL = 2
"""Peers with different protocols cannot work together."""
COMPRESSIONS = ("fp32", "fp16", "8bit")
ADMISSIONS = ("open", "invite", "list")
AGGREGATIONS = ("centred_clipping", "trimmed_mean", "median", "mean")
Seconds = Annotated[float, Range(above=0, below=10**6)]


@dataclass(frozen=True, kw_only=True)
class SwarmSection:
    """Identifies the run.

    Args:
        name: lower-case letters, digits and hyphens.
        protocol: see PROTOCOL.
        addresses: of the helpers, as /ip4/.../tcp/PORT/p2p/PEER; a newcomer needs one.
        donors: peer ids to ask for the state first.
        min_peers: trainers required before the first step.
        data: URL or path of the shards; of a path, other machines get the name alone, and volunteers name a copy with
            --data.
        data_fingerprint: SHA-256 of the data's dataset.json.
        tokenizer_fingerprint: SHA-256 of tokenizer.json, which helpers serve with this file.
        first_weights: SHA-256 of the model.safetensors that the run began with; peers download these weights from a
            donor. Empty if the recipe's seed determines them.
        run_key: public key, in hexadecimal, of the key that signs passes; empty in a run without passes.
        admission: who gets a pass, see training.swarm.admission.pass_issuer.
    """

    name: str = "run"
    protocol: int = PROTOCOL
    addresses: tuple[str, ...] = ()
    donors: tuple[str, ...] = ()
    min_peers: PositiveInt = 1
    data: str = ""
    data_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    first_weights: str = ""
    run_key: str = ""
    admission: Annotated[str, ADMISSIONS] = "open"

    def __post_init__(self) -> None:
        check(self, " = ")
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", self.name):
            raise UserError(f"name = {self.name!r}: must be 1..64 lower-case letters, digits and hyphens")
        for key in ("first_weights", "run_key"):
            value = getattr(self, key)
            if not re.fullmatch(r"([0-9a-f]{64})?", value):
                raise UserError(f"{key} = {value[:80]!r}: must be 64 hexadecimal digits")
        if self.protocol != PROTOCOL:
            raise UserError(
                f"protocol = {self.protocol}: this version of dalle-lean uses {PROTOCOL}; install the run's version"
            )

    def join_arguments(self, addresses: Sequence[str], *, is_public: bool = False) -> str:
        """What volunteers write after `dalle-lean join`.

        If the data is a folder, they name theirs: the run's own if the addresses lead to this machine only, else COPY
        stands for it.

        Args:
            is_public: name no folder of this machine.
        """
        named = shlex.quote(self.data) if is_local(addresses) and not is_public else "COPY"
        return " ".join([*addresses, *(["--data", named] if self.names_folder else [])])

    @property
    def names_folder(self) -> bool:
        """Whether the data is a folder of the host's machine."""
        return bool(self.data) and not is_url(self.data)

    @property
    def first_name(self) -> str:
        """The run's name before any rollback."""
        return re.sub(r"-back[0-9]+$", "", self.name)

    @property
    def rollbacks(self) -> int:
        """How often the run was rolled back, from its name: emoji, emoji-back1, emoji-back2, ..."""
        match = re.search(r"-back([0-9]+)$", self.name)
        return int(match[1]) if match else 0


@dataclass(frozen=True, kw_only=True)
class WireSection:
    """What peers exchange, and how they average it.

    Args:
        mode: "gradients" averages gradients at each step; "diloco" (Douillard et al. 2023, arXiv 2311.08105) averages
            weight changes after `inner_steps` local steps.
        compression: of averaged tensors; "8bit" sends tensors of at least `min_eight_bit_numel` elements in 8 bits,
            others in 16, as in the paper's run.
        power_sgd_rank: rank to which PowerSGD compresses gradients (Vogels et al. 2019); 0 disables it.
        aggregation: the averaging rule; see training.swarm.averaging.aggregation_rules.
        average_state_every: steps between averages of the weights.
        delayed: run the optimizer's step while the next gradients are computed with the weights before it.
        inner_steps, outer_lr, outer_momentum: of "diloco".
    """

    mode: Annotated[str, ("gradients", "diloco")] = "gradients"
    compression: Annotated[str, COMPRESSIONS] = "8bit"
    min_eight_bit_numel: NonNegativeInt = 2**16
    power_sgd_rank: NonNegativeInt = 0
    aggregation: Annotated[str, AGGREGATIONS] = "centred_clipping"
    average_state_every: PositiveInt = 1
    delayed: bool = True
    inner_steps: PositiveInt = 50
    outer_lr: Annotated[float, Range(above=0, most=2)] = 0.7
    outer_momentum: Share = 0.9

    def __post_init__(self) -> None:
        check(self, " = ")
        if self.mode == "diloco" and self.power_sgd_rank:
            raise UserError(f"power_sgd_rank = {self.power_sgd_rank}: needs mode = 'gradients'")


@dataclass(frozen=True, kw_only=True)
class TimingSection:
    """How long peers wait for each other, in seconds; the defaults suit the Internet. See docs/host-your-own.md.

    Args:
        matchmaking_time_s: to find a group; a step should take at least five times as long.
        request_timeout_s: for the answer of a group's leader; less than matchmaking_time_s.
        averaging_timeout_s: for matchmaking and a whole all-reduce; about twice what they take.
        next_chunk_timeout_s: a peer that sends nothing for this long counts as gone.
        load_state_timeout_s: to download the state from one donor.
        load_state_attempts: download attempts before a peer that is behind gives up.
        progress_expiration_s: a peer that reports nothing for this long no longer counts.
    """

    matchmaking_time_s: Seconds = 15.0
    request_timeout_s: Seconds = 5.0
    averaging_timeout_s: Seconds = 120.0
    next_chunk_timeout_s: Seconds = 15.0
    load_state_timeout_s: Seconds = 600.0
    load_state_attempts: Annotated[int, Range(1, below=10**6)] = 5
    progress_expiration_s: Seconds = 60.0

    def __post_init__(self) -> None:
        check(self, " = ")
        if self.request_timeout_s >= self.matchmaking_time_s:
            raise UserError(
                f"request_timeout_s = {self.request_timeout_s}: must be less than matchmaking_time_s = "
                f"{self.matchmaking_time_s}"
            )
        if self.matchmaking_time_s >= self.averaging_timeout_s:
            raise UserError(
                f"matchmaking_time_s = {self.matchmaking_time_s}: must be less than averaging_timeout_s = "
                f"{self.averaging_timeout_s}, which includes it"
            )


def check_precision(precision: str) -> None:
    """UserError unless the weights of a model in this precision are float32."""
    if precision == "bf16-weights":
        raise UserError("precision = 'bf16-weights': a swarm averages float32 weights; choose fp32, bf16 or fp16")


@dataclass(frozen=True, kw_only=True)
class SwarmSettings:
    """The content of a swarm.toml."""

    swarm: SwarmSection = SwarmSection()
    wire: WireSection = WireSection()
    timing: TimingSection = TimingSection()
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        if self.recipe.optimizer.name != "lamb":
            raise UserError(
                f"optimizer name = {self.recipe.optimizer.name!r}: a swarm shares the state of LAMB; name a recipe "
                'with name = "lamb", and a learning rate for it, with --config'
            )
        check_precision(self.recipe.memory.precision)

    @classmethod
    def from_dict(cls, sections: dict[str, Any]) -> Self:
        """Parse the sections; ValueError names an unknown section or key, a wrong type or a value out of range."""
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
        first = {name: dataclasses.asdict(getattr(self, name)) for name in ("swarm", "wire", "timing")}
        return {**first, **self.recipe.to_dict()}

    @property
    def model(self) -> DalleConfig:
        """The recipe's model; a swarm.toml has all its fields."""
        return DalleConfig.from_dict(self.recipe.model)

    @property
    def total_steps(self) -> int:
        """Steps of the schedule; a step of the swarm in "diloco" mode is `inner_steps` of them."""
        return self.recipe.schedule.total_steps

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the schedule per step of the swarm."""
        return self.wire.inner_steps if self.wire.mode == "diloco" else 1

    @property
    def first_epoch(self) -> int:
        """The step of the swarm at which the run began: 1 if the first weights must be downloaded, else 0.

        A peer at step 0 is then behind, and downloads the others' state.
        """
        return 1 if self.swarm.first_weights else 0

    @property
    def last_epoch(self) -> int:
        return -(-self.total_steps // self.steps_per_epoch)

    @property
    def target_batch_size(self) -> int:
        """Samples per step of the swarm, over all peers."""
        return self.recipe.data.batch_size * self.steps_per_epoch

    @property
    def fingerprints(self) -> dict[str, str]:
        """Short hashes of what all peers must agree on, by part."""
        recipe = self.recipe.to_dict()
        # Memory plans and logging intervals may differ between peers.
        schedule = {name: recipe["schedule"][name] for name in SHARED_SCHEDULE}
        parts = {
            "protocol": self.swarm.protocol,
            "model": self.model.to_dict(),
            "optimizer": {**recipe["optimizer"], "delayed": False},  # in the run ids of earlier versions
            "schedule": schedule,
            "batch size": recipe["data"]["batch_size"],
            "caption dropout": recipe["data"]["caption_dropout"],
            "held-out share": recipe["data"]["heldout_share"],
            "seed of the first weights": recipe["data"]["seed"],
            "wire settings": dataclasses.asdict(self.wire),
            "data": self.swarm.data_fingerprint,
            "tokenizer": self.swarm.tokenizer_fingerprint,
        }
        # Left out if empty, so that older runs keep their run ids.
        if self.swarm.first_weights:
            parts["first weights"] = self.swarm.first_weights
        if self.swarm.run_key:
            parts["key"] = self.swarm.run_key
        return {name: digest(part) for name, part in parts.items()}

    @property
    def run_id(self) -> str:
        """The name under which peers find each other, with a hash of what they must agree on."""
        return f"{self.swarm.name}-{digest(self.fingerprints)}"

    def differences(self, other: "SwarmSettings") -> list[str]:
        ours, theirs = self.fingerprints, other.fingerprints
        return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def is_local(addresses: Sequence[str]) -> bool:
    """Whether all addresses lead to this machine only."""
    return all(address.startswith("/ip4/127.") for address in addresses)


def public_text(text: str, swarm: SwarmSection) -> str:
    """The text of a swarm.toml as other machines get it: a folder of the host's goes by its name alone."""
    if not swarm.names_folder or is_local(swarm.addresses):
        return text
    name = json.dumps(Path(swarm.data).name, ensure_ascii=False)
    return re.sub("^data = .*$", lambda _: f"data = {name}", text, count=1, flags=re.MULTILINE)


def digest(content: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def write_settings(path: Path, settings: SwarmSettings) -> None:
    """Write a swarm.toml. TOML lacks None: fields of the model are left out, in the other sections 0 means None."""
    sections = settings.to_dict()
    sections["model"] = {name: value for name, value in sections["model"].items() if value is not None}
    sections = {
        section: {name: 0 if value is None else value for name, value in values.items()}
        for section, values in sections.items()
    }
    # Left out if unused, so that older versions can read the file.
    swarm = sections["swarm"]
    if not swarm["run_key"]:
        del swarm["run_key"], swarm["admission"]
    if not swarm["first_weights"]:
        del swarm["first_weights"]
    text = require("tomli_w", extra="training").dumps(sections)
    write_bytes(path, f"# What a volunteer needs to take part in this run; nothing here is secret.\n\n{text}".encode())


def parse_settings(text: str, name: str) -> SwarmSettings:
    """Parse the text of a swarm.toml; ValueError names the file and what is wrong with it."""
    try:
        return SwarmSettings.from_dict(parse(tomllib.loads, text, "it is not TOML"))
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def read_settings(path: Path) -> SwarmSettings:
    """Read a swarm.toml, or the one in a folder; ValueError as in `parse_settings`."""
    path = path / SWARM_TOML if path.is_dir() else path
    expected = "name a run's swarm.toml, its folder on the host, or one of its addresses"
    try:
        text = read_text(path, MOST_RECIPE_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {expected}") from None
    if not re.search(r"^\s*\[swarm\]", text, re.MULTILINE):
        raise UserError(f"{path} is no swarm.toml: it has no section [swarm]; {expected}")
    return parse_settings(text, str(path))
