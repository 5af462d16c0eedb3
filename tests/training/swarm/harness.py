"""Starts a tiny swarm of real processes, watches it by the diaries that its members write, and ends all of it.

    with Swarm(folder) as swarm:
        helper = swarm.start("helper")
        trainer = swarm.start("trainer", samples_per_s=16)
        trainer.wait_for_step(3)

Where the body fails, what every member printed is printed too.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
from hivemind.p2p import P2P, PeerID

from dalle_lean.io.files import sha256_file
from dalle_lean.tokenizer import Tokenizer
from tests.training.conftest import write_shards
from tests.training.swarm.nursery import DIE, ROOT, processes_of, send
from training.data.catalog import find_shards
from training.data.loader import Batch, TrainingData
from training.run.recipe import load_recipe
from training.swarm.config import SwarmSection, SwarmSettings, TimingSection, WireSection, write_settings

POLL_S = 0.05
START_TIMEOUT_S = 120.0
TIMING = TimingSection(
    matchmaking_time_s=2.0,
    request_timeout_s=1.5,
    averaging_timeout_s=20.0,
    next_chunk_timeout_s=4.0,
    load_state_timeout_s=20.0,
    progress_expiration_s=10.0,
)
"""Timing for loopback, where everything is fast."""


class Nursery:
    """The process that forks members, see nursery.py."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.training.swarm.nursery"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def fork(self, spec: dict) -> int:
        """Fork a member; returns its process id."""
        self.process.stdin.write(json.dumps(spec) + "\n")
        self.process.stdin.flush()
        while (line := self.process.stdout.readline()) == "ready\n":
            pass
        return int(line)

    def close(self) -> None:
        """End it, and all members that still run."""
        # Closing stdin is not enough: processes that pytest has forked since hold it too.
        self.process.stdin.write("end\n")
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


class Member:
    """A peer of the swarm and its processes."""

    def __init__(self, name: str, folder: Path, pid: int):
        self.name, self.folder, self.pid = name, folder, pid

    def events(self, kind: str | None = None) -> list[dict]:
        """Its logged events, oldest first."""
        path = self.folder / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in found if kind in (None, event["event"])]

    def last(self, kind: str) -> dict:
        """The newest event of a kind."""
        return self.events(kind)[-1]

    @property
    def step(self) -> int:
        """Steps of the swarm that it has taken."""
        steps = self.events("step")
        return steps[-1]["epoch"] if steps else -1

    @property
    def log(self) -> str:
        """Its hivemind log."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def output(self) -> str:
        """Its output."""
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def alive(self) -> bool:
        """Whether its main process runs."""
        return psutil.pid_exists(self.pid) and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE

    @property
    def processes(self) -> list[psutil.Process]:
        """All processes of its session."""
        return processes_of(self.pid)

    @property
    def memory_bytes(self) -> int:
        """Resident memory of its processes, in bytes; pages that they share count in each.

        Compare it with an earlier one only. Unshared memory would also grow where a fork writes to inherited pages.
        """
        total = 0
        for process in self.processes:
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue  # it has just ended
        return total

    def parameters(self, step: int) -> np.ndarray:
        """All parameters after a step, flat."""
        return np.load(self.folder / "parameters" / f"{step}.npy")

    def steps_kept(self) -> set[int]:
        """Steps after which the parameters were saved."""
        return {int(path.stem) for path in (self.folder / "parameters").glob("*.npy") if path.stem.isdigit()}

    def kill(self) -> None:
        """kill -9 all its processes at once, as in a power cut."""
        for process in self.processes:
            send(process.pid, signal.SIGKILL)

    def kill_main(self) -> None:
        """kill -9 its main process only."""
        send(self.pid, signal.SIGKILL)

    def kill_in(self, stage: str, timeout_s: float = 30.0) -> float:
        """kill -9 all its processes in "compute", "matchmaking" or "all-reduce"; returns the time of the kill."""
        path = self.folder / DIE
        path.with_suffix(".tmp").write_text(stage)
        path.with_suffix(".tmp").rename(path)
        wait_for(lambda: not self.alive, timeout_s, f"{self.name} to be killed in {stage}")
        self.kill()
        return time.time()

    def interrupt(self) -> None:
        """Ctrl+C."""
        send(self.pid, signal.SIGINT)

    def freeze(self) -> None:
        """Suspend all its processes, as on a sleeping machine."""
        for process in self.processes:
            send(process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume its processes."""
        for process in self.processes:
            send(process.pid, signal.SIGCONT)

    def wait_for_event(self, kind: str, timeout_s: float = START_TIMEOUT_S) -> dict:
        """Wait for the first event of this kind."""
        self.wait(lambda: self.events(kind), timeout_s, kind)
        return self.events(kind)[0]

    def wait_for_step(self, step: int, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait for a step of the swarm; returns when it was taken."""
        self.wait(lambda: self.step >= step, timeout_s, f"step {step}")
        return next(event["time"] for event in self.events("step") if event["epoch"] >= step)

    def wait(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Wait until the condition holds; AssertionError after a timeout, or if the member dies."""
        wait_for(lambda: condition() or not self.alive, timeout_s, f"{self.name}: {what} (it is at step {self.step})")
        assert condition(), f"{self.name} ended before {what}"


class Swarm:
    """A run's folder and its members; leaving it ends them all.

    Args:
        folder: an empty one, for everything.
        wire, timing, batch_size, ...: of swarm.toml; the model is a tiny one unless `recipe`, a name or file, is given.
        hosts: from a member's name to (network namespace, address); without it all are on loopback.
    """

    def __init__(
        self,
        folder: Path,
        *,
        wire: WireSection = WireSection(),
        timing: TimingSection = TIMING,
        batch_size: int = 64,
        total_steps: int = 500,
        warmup_steps: int = 5,
        peak_lr: float = 1e-2,
        checkpoint_every: int = 0,
        recipe: str = "tiny",
        shards: Path | None = None,
        hosts: dict[str, tuple[str, str]] | None = None,
        nursery: Nursery | None = None,
    ):
        self.folder, self.hosts = folder, hosts or {}
        self.members: list[Member] = []
        self.addresses: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        shards = shards or write_shards(folder / "shards")
        schedule = {
            "total_steps": total_steps,
            "warmup_steps": warmup_steps,
            "peak_lr": peak_lr,
            "checkpoint_every": checkpoint_every,
        }
        self.settings = make_settings(folder, shards, recipe, wire, timing, batch_size, schedule)
        write_settings(folder / "swarm.toml", self.settings)
        self.own_nursery = nursery is None
        self.nursery = nursery or Nursery()

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            print(self.report())
        for member in self.members:
            member.thaw()  # a suspended process dies only when it resumes
            member.kill()
        if self.own_nursery:
            self.nursery.close()
        left = [process for member in self.members for process in member.processes]
        psutil.wait_procs(left, timeout=5)

    def start(self, role: str, name: str | None = None, *, wait: bool = True, **spec: object) -> Member:
        """A helper, donor or trainer; see member.live and its MeasuredPeer for what it can be told.

        Args:
            wait: until it is in the network; helpers' addresses are kept for those who come later.
        """
        name = name or f"{role}{sum(member.name.startswith(role) for member in self.members) + 1}"
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        spec.setdefault("addresses", list(self.addresses))
        if name in self.hosts:
            spec["namespace"], spec["host"] = self.hosts[name]
        content = {"role": role, "run": str(self.folder), "folder": str(folder), **spec}
        member = Member(name, folder, self.nursery.fork(content))
        self.members.append(member)
        if wait or role == "helper":
            here = member.wait_for_event("here")
            if role == "helper":
                self.addresses.append(here["addresses"][0])
        return member

    def name_donors(self, *donors: "Member") -> None:
        """The donors that newcomers ask for the state first."""
        peers = tuple(donor.wait_for_event("here")["peer"] for donor in donors)
        self.rewrite(donors=peers)

    def name_host(self, *names: str) -> None:
        """Create identities of future helpers and donors, and name them in swarm.toml as a host does."""
        peers: dict[str, list[str]] = {"helper": [], "donor": []}
        for name in names:
            identity = self.folder / name / "id"
            identity.parent.mkdir()
            P2P.generate_identity(str(identity))
            peers[name.rstrip("0123456789")].append(PeerID.from_identity(identity.read_bytes()).to_base58())
        self.rewrite(
            addresses=tuple(f"/ip4/127.0.0.1/tcp/1/p2p/{peer}" for peer in peers["helper"]),
            donors=tuple(peers["donor"]),
        )

    def rewrite(self, **swarm: object) -> None:
        """Change [swarm] in swarm.toml, for members that start later."""
        self.settings = dataclasses.replace(self.settings, swarm=dataclasses.replace(self.settings.swarm, **swarm))
        write_settings(self.folder / "swarm.toml", self.settings)

    def start_usual(self, helpers: int = 2, trainers: int = 2, samples_per_s: float = 16.0) -> list[Member]:
        """Start helpers, a donor and trainers; returns the trainers after a common step."""
        self.name_host(*(f"helper{number}" for number in range(1, helpers + 1)), "donor1")
        for _ in range(helpers):
            self.start("helper")
        self.rewrite(min_peers=trainers)
        self.start("donor", wait=False)
        started = [self.start("trainer", wait=False, samples_per_s=samples_per_s) for _ in range(trainers)]
        self.wait_for_common_step(started, 2)
        return started

    def go_on(self, members: Sequence[Member], since: float, steps: int = 3, timeout_s: float = 90.0) -> float:
        """Wait until all have taken `steps` steps since that time; returns the seconds until the first of these."""
        before = max(event["epoch"] for member in members for event in member.events("step") if event["time"] < since)
        common_at = self.wait_for_common_step(members, before + 1, timeout_s)
        self.wait_for_common_step(members, before + steps, timeout_s)
        return common_at - since

    def member(self, name: str) -> Member:
        """The member of this name."""
        return next(member for member in self.members if member.name == name)

    def wait_for_common_step(self, members: Sequence[Member], step: int, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait until all have taken a step; returns when the last one did."""
        return max(member.wait_for_step(step, timeout_s) for member in members)

    def report(self, lines: int = 25) -> str:
        """Print the output and events of every member."""
        parts = []
        for member in self.members:
            events = (member.folder / "events.jsonl").read_text().splitlines() if member.events() else []
            steps = [line for line in events if '"batch"' not in line]
            parts += [f"==== {member.name}, process {member.pid}, {'alive' if member.alive else 'ended'}"]
            parts += [*steps[-lines:], "-- printed:", *member.output.splitlines()[-lines:]]
            parts += ["-- logged:", *member.log.splitlines()[-lines:]]
        return "\n".join(parts)


def make_settings(
    folder: Path,
    shards: Path,
    recipe_name: str,
    wire: WireSection,
    timing: TimingSection,
    batch_size: int,
    schedule: dict[str, float],
) -> SwarmSettings:
    """The content of swarm.toml; also writes tokenizer.json beside it."""
    found = find_shards(shards)
    recipe = load_recipe(recipe_name)
    data = TrainingData(found, recipe.data)
    tokenizer = Tokenizer.train(data.captions(), recipe.data.text_vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    config = recipe.model_config(
        image_side=found.info.image_side,
        image_vocab_size=found.info.codebook_size,
        text_vocab_size=tokenizer.vocab_size,
    )
    recipe = dataclasses.replace(
        recipe,
        model=config.to_dict(),
        data=dataclasses.replace(recipe.data, batch_size=batch_size),
        schedule=dataclasses.replace(recipe.schedule, **schedule),
    )
    name = f"test-{os.getpid()}-{time.time_ns() % 10**9}"
    swarm = SwarmSection(
        name=name,
        data=str(shards),
        data_fingerprint=found.fingerprint,
        tokenizer_fingerprint=sha256_file(folder / "tokenizer.json"),
    )
    return SwarmSettings(recipe=recipe, swarm=swarm, wire=wire, timing=timing)


def batches_of(settings: SwarmSettings, folder: Path, peer: str, batch_size: int) -> Iterator[Batch]:
    """The batches in the order of a peer with this id; `folder` holds tokenizer.json."""
    data = TrainingData(find_shards(settings.swarm.data), settings.recipe.data, peer)
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    for batch, _ in data.batches(batch_size, tokenizer, settings.recipe.model["text_len"]):
        yield batch


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Wait until the condition holds; AssertionError names what did not happen in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s:.0f} s in vain for {what}"
        time.sleep(POLL_S)
