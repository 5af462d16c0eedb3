"""A process of a test's swarm: a real helper, donor or trainer that logs events as JSON lines, and slows down or
misbehaves as specified."""

import dataclasses
import hashlib
import json
import logging
import math
import multiprocessing as mp
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.proto import averaging_pb2

from dalle_lean.io.files import write_json
from dalle_lean.tokenizer import Tokenizer
from tests.training.swarm.enemy import LIES, hand_out_noise, upload_slowly
from tests.training.swarm.nursery import DIE
from training.data.catalog import find_shards
from training.data.heldout import heldout_rows
from training.data.loader import Batch, collate
from training.swarm.admission.gate import Gate
from training.swarm.admission.service import begin_admission
from training.swarm.averaging import averagers
from training.swarm.averaging.averagers import RuleRunner
from training.swarm.averaging.state_validation import StateRefused
from training.swarm.config import read_settings
from training.swarm.host.checkpointer import Checkpointer
from training.swarm.host.checkpoints import Checkpoints
from training.swarm.host.host_config import HostConfig
from training.swarm.host.roles import run_donor, run_helper
from training.swarm.network.dht import log_to, open_dht
from training.swarm.network.orphan_reaper import guard_children
from training.swarm.network.run_records import keep_own_records
from training.swarm.optimizer.swarm_optimizer import SwarmOptimizer
from training.swarm.peer.trainer import Peer

HELDOUT_SAMPLES = 512


class Shared:
    """Shared between a member's main process and its averagers; created for each member, or all would share it."""

    def __init__(self) -> None:
        self.lies = mp.Value("b", False)
        self.sent_bytes = mp.Value("q", 0)
        """Bytes of all-reduce messages."""


shared: Shared


class Diary:
    """events.jsonl, and the parameters after each step."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.file = open(folder / "events.jsonl", "a", buffering=1)  # noqa: SIM115
        self.lock = threading.Lock()

    def tell(self, event: str, **content: object) -> None:
        """Append an event with the time."""
        with self.lock:
            self.file.write(json.dumps({"time": time.time(), "event": event, **content}) + "\n")

    def keep(self, optimizer: SwarmOptimizer, step: int) -> str:
        """Save the parameters after a step of the swarm; returns their hash."""
        parameters = optimizer.state_averager.main_parameters
        values = torch.cat([parameter.detach().flatten() for parameter in parameters]).numpy()
        (self.folder / "parameters").mkdir(exist_ok=True)
        path = self.folder / "parameters" / f"{step}.npy"
        np.save(path.with_suffix(".tmp.npy"), values)
        path.with_suffix(".tmp.npy").rename(path)
        return hashlib.sha256(values.tobytes()).hexdigest()[:16]


def live(spec: dict) -> None:
    """Run the member that `harness.Swarm.start` specifies, until SIGINT or the end of the run."""
    global shared
    if spec["role"] == "bystander":
        stand_by(spec)
        return
    shared = Shared()
    folder, run = Path(spec["folder"]), Path(spec["run"])
    settings = read_settings(run / "swarm.toml")
    guard_children()
    log_to(folder / "log")
    if spec.get("slow_upload"):
        upload_slowly()
    if spec.get("misbehaviour") in LIES:
        LIES[spec["misbehaviour"]](lambda: bool(shared.lies.value))
    if spec.get("misbehaviour") == "ruined_state":
        hand_out_noise()
    if os.environ.get("SWARM_DEBUG"):
        logging.getLogger("hivemind").setLevel(logging.DEBUG)
    diary = Diary(folder)
    WatchedRunner.folder, averagers.RuleRunner = folder, WatchedRunner
    client = spec.get("client_mode", False)
    listen = [f"/ip4/{spec.get('host', '127.0.0.1')}/tcp/0"]
    dht = open_dht(spec["addresses"], client_mode=client, listen=listen, identity=folder / "id")
    keep_own_records(dht, settings)
    addresses = [] if client else [str(address) for address in dht.get_visible_maddrs()]
    diary.tell("here", addresses=addresses, peer=dht.peer_id.to_base58())
    stop = threading.Event()
    try:
        if spec["role"] == "trainer":
            train(spec, settings, dht, diary)
        else:
            signal.signal(signal.SIGINT, lambda *_: stop.set())

            def wait(seconds: float) -> bool:
                if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # hivemind did that
                    signal.signal(signal.SIGINT, lambda *_: stop.set())
                return stop.wait(seconds)

            if spec["role"] == "helper":
                run_helper(settings, dht, wait)
            else:
                give_state(spec, settings, dht, diary, wait)
    except Exception as error:
        diary.tell("failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        dht.shutdown()
        diary.tell("left")


def stand_by(spec: dict) -> None:
    """Run a member of a run with a key that only queries the DHT, and write its gate's state to gate.json."""
    folder = Path(spec["folder"])
    guard_children()
    log_to(folder / "log")
    gate = Gate(spec["run_key"], folder / "pass", folder / "bans")
    options = {"listen": [spec["listen"]], "identity": folder / "identity", "gate": gate}
    dht = open_dht(spec["addresses"], client_mode=False, **options)
    begin_admission(dht, spec["addresses"])
    while True:
        dht.get("anything", latest=True)  # calls the others, who may refuse it
        write_json(folder / "gate.json", {"refused": gate.refused, "own_refusal": gate.own_refusal})
        time.sleep(0.5)


def give_state(spec: dict, settings, dht, diary: Diary, wait) -> None:
    """A donor; it writes checkpoints like the run's own donor if `checkpoints` names a folder, and judges
    states by their held-out loss if it `judges`."""
    checkpointer = None
    if spec.get("checkpoints"):

        def notice(text: str) -> None:
            diary.tell("notice", text=text)

        def change() -> None:
            diary.tell("checkpoint", saved_step=checkpointer.saved_step, failed=checkpoints.failed)

        checkpoints = Checkpoints(Path(spec["checkpoints"]), settings, HostConfig(ports={}), notice)
        heldout = measured_on(settings, Path(spec["run"])) if spec.get("judges") else None
        checkpointer = Checkpointer(checkpoints, heldout, on_change=change)

    told = [0]

    def on_round(optimizer: SwarmOptimizer) -> None:
        epoch = optimizer.local_epoch
        if epoch != told[-1]:
            told.append(epoch)
            diary.tell("step", epoch=epoch, sha=diary.keep(optimizer, epoch), parameters_of=epoch)

    run_donor(
        settings,
        dht,
        wait,
        on_round=on_round,
        checkpointer=checkpointer,
        on_notice=lambda text: diary.tell("notice", text=text),
    )


def measured_on(settings, run: Path) -> Batch:
    """Held-out samples."""
    rows = heldout_rows(find_shards(settings.swarm.data), settings.recipe.data.heldout_share, HELDOUT_SAMPLES)
    return collate(rows, Tokenizer.from_file(run / "tokenizer.json"), settings.recipe.model["text_len"])


def train(spec: dict, settings, dht, diary: Diary) -> None:
    run, folder = Path(spec["run"]), Path(spec["folder"])
    shards, tokenizer = find_shards(settings.swarm.data), Tokenizer.from_file(run / "tokenizer.json")
    heldout = measured_on(settings, run)
    epochs, measured = [-1], []

    def on_step(done) -> None:
        content = {name: None if value != value else value for name, value in dataclasses.asdict(done).items()}
        if done.epoch == epochs[-1]:
            diary.tell("batch", **content)
            return
        epochs.append(done.epoch)
        # When a step begins, the weights contain the delayed step before it, and everything just downloaded.
        step = done.epoch - 1 if settings.wire.delayed and peer.adopted_epoch != done.epoch else done.epoch
        found = {"sha": diary.keep(peer.optimizer, step), "parameters_of": step, "sent_bytes": shared.sent_bytes.value}
        if "measure_at" in spec and done.epoch >= spec["measure_at"] and not measured:
            measured.append(peer.gradients.measure(heldout)["heldout_loss"])
            found["heldout_loss"] = measured[0]
        diary.tell("step", **content, **found)
        if spec.get("stop_at") and done.epoch >= spec["stop_at"]:
            os.kill(os.getpid(), signal.SIGINT)

    peer = MeasuredPeer(
        settings,
        dht,
        shards,
        tokenizer,
        folder=folder,
        batch_size=spec.get("batch_size", 8),
        memory=dataclasses.replace(settings.recipe.memory, micro_batches=1),
        on_step=on_step,
        on_download=lambda received, total, donor: diary.tell("download", received=received, total=total, donor=donor),
        on_notice=lambda notice: diary.tell("notice", text=notice),
    )
    peer.spec, peer.diary = spec, diary
    peer.observe()
    diary.tell("ready", epoch=peer.optimizer.local_epoch)
    peer.run()


class MeasuredPeer(Peer):
    """A Peer with a fixed speed in samples per second that misbehaves as specified."""

    spec: dict
    diary: Diary
    adopted_epoch = -1

    def observe(self) -> None:
        averager = self.optimizer.state_averager
        adopt = averager.adopt

        def told_adopt(metadata, tensors, *limits) -> None:
            try:
                adopt(metadata, tensors, *limits)
            except StateRefused as refusal:
                self.diary.tell("refused", reason=str(refusal))
                raise
            self.adopted_epoch = metadata["epoch"]
            self.diary.tell("adopted", epoch=metadata["epoch"])

        averager.adopt = told_adopt
        threading.Thread(target=self.watch_stages, daemon=True).start()

    def watch_stages(self) -> None:
        """Log the stages of gradient averaging, and die in matchmaking if specified."""
        stage = None
        while True:
            time.sleep(0.01)
            control = self.optimizer.scheduled_grads
            now = None if control is None else control.stage
            if now != stage:
                stage = now
                self.diary.tell("stage", stage=None if now is None else now.name)
                if now == AveragingStage.LOOKING_FOR_GROUP and self.told_to_die("matchmaking"):
                    time.sleep(0.3)
                    die()

    def told_to_die(self, stage: str) -> bool:
        path = Path(self.spec["folder"]) / DIE
        return path.exists() and path.read_text() == stage

    def compute(self, batch, epoch: int) -> float:
        started = time.perf_counter()
        misbehaviour = self.spec.get("misbehaviour")
        first, steps = self.spec.get("from_step", 0), self.spec.get("for_steps", math.inf)
        bad = misbehaviour is not None and first <= epoch < first + steps
        if bad and misbehaviour == "own_nan":
            with poisoned(self.model):
                loss = super().compute(batch, epoch)
        else:
            loss = super().compute(batch, epoch)
        shared.lies.value = bad and misbehaviour in LIES
        if bad:
            self.diary.tell("misbehaves", epoch=epoch)
        rate = self.spec.get("samples_per_s")
        if rate:
            time.sleep(max(0.0, len(batch.text_ids) / rate - (time.perf_counter() - started)))
        if self.told_to_die("compute"):
            die()
        return loss


class poisoned:
    """A model whose next gradients are nan, as after an overflow in half precision."""

    def __init__(self, model: torch.nn.Module):
        self.parameter = next(iter(model.parameters()))

    def __enter__(self) -> None:
        self.kept = self.parameter.detach().clone()
        with torch.no_grad():
            self.parameter.fill_(math.inf)

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            self.parameter.copy_(self.kept)


def die() -> None:
    """kill -9 this member and all its processes."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


class WatchedRunner(RuleRunner):
    """An all-reduce that counts the bytes it sends, and in which a member can be killed after its first part."""

    folder: Path

    async def _generate_input_for_peer(self, peer_index: int):
        async for message in super()._generate_input_for_peer(peer_index):
            count(message)
            yield message
            path = self.folder / DIE
            if path.exists() and path.read_text() == "all-reduce":
                die()

    async def _accumulate_parts_streaming(self, stream, sender_index: int):
        async for message in super()._accumulate_parts_streaming(stream, sender_index):
            count(message)
            yield message


def count(message: averaging_pb2.AveragingData) -> None:
    """Count a sent message."""
    with shared.sent_bytes.get_lock():
        shared.sent_bytes.value += message.ByteSize()
