"""The engine's processes on a Ray cluster: starts them, swaps them for those of another model, and ends them."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.io.model_folder import check_parts
from dalle_lean.progress import OnNotice, silent
from dalle_lean.require import require
from dalle_lean.words import counted

OBJECT_STORE_BYTES = 2**28  # for a cluster started on this machine; holds only pictures on their way to a client
LARGEST_BATCH = {"cuda": 128, "cpu": 32}
PROMPTS_PER_REPLICA = 3  # drawn at once, so that every replica always has work
BATCHES_PER_REPLICA = 2  # given to a replica at once: one to draw, and one to follow without a pause
SLOW_START_S = 120
START_TRIES = 3
DRAIN_POLL_S = 0.5
FRONT_ANSWER_S = 30.0  # left to the front for a short answer
SWITCH_S = 1800.0  # left to the front to find a new model and learn its speed
SEE_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
STOP_S = 10.0  # left to drawings in progress when the engine ends


@dataclass(frozen=True)
class EngineSettings:
    """How to run an engine, with `replicas` to `max_replicas` replicas, as many as the queue needs."""

    replicas: int = 1
    max_replicas: int | None = None
    waiting: int = 100
    host: str = "127.0.0.1"
    port: int = 8000
    metrics_port: int = 8001
    device: str = "auto"
    scorer: str = "clip"
    precision: str | None = None
    batch_size: int | None = None  # pictures that a replica draws at once; None is 128 on a GPU, 32 on a CPU

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise UserError(f"--device {self.device}: choose auto, cpu or cuda; the replicas share all GPUs")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise UserError(f"max_replicas={self.max_replicas} is less than replicas={self.replicas}")


@contextmanager
def engine_running(folder: Path, settings: EngineSettings, wait_for: OnNotice = silent) -> Iterator["RunningEngine"]:
    """An engine that draws with the model in `folder`; all its processes end with the block.

    It joins the cluster at RAY_ADDRESS, or starts one on this machine. `wait_for` is told what the start waits for.
    """
    # Ray reads these when it is imported. On a busy machine its processes start more slowly than it expects.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(SLOW_START_S))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # drawing is no background work
    ray, serve = require("ray", extra="serve"), require("ray.serve", extra="serve")
    from demo.serve.front import DRAWERS, FRONT

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        options["_metrics_export_port"] = settings.metrics_port
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        wait_for("Ray")
        start_ray(options)
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has replaced it
        try:
            location = "HeadOnly" if address is None else "EveryNode"
            wait_for("Ray Serve")
            serve.start(
                proxy_location=location,
                http_options={"host": settings.host, "port": settings.port},
                logging_config={"log_level": "ERROR"},
            )
            engine = RunningEngine(settings)
            engine.load(folder, wait_for)
            yield engine
        finally:
            wait_for("the engine's processes to end")
            if address is None:
                with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # Ray reports what it ends as failed
                    serve.shutdown()
            else:  # the cluster may have other applications
                for name in serve.status().applications:
                    if name == FRONT or name.startswith(DRAWERS):
                        serve.delete(name)
    finally:
        ray.shutdown()


def start_ray(options: dict[str, Any]) -> None:
    """`ray.init`, with retries for machines too busy for Ray's timeouts; UserError if they fail too."""
    import ray

    for attempt in range(START_TRIES):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises plain Exceptions
            ray.shutdown()
            if attempt == START_TRIES - 1:
                raise UserError(f"cannot start Ray: {error}") from error


class RunningEngine:
    """An engine on the Ray cluster that this process has joined."""

    def __init__(self, settings: EngineSettings):
        import ray

        from demo.serve.drawer import UNIT

        self.settings = settings
        self.most_replicas = settings.max_replicas or settings.replicas
        resources = ray.cluster_resources()
        self.gpus = 0 if settings.device == "cpu" else resources.get("GPU", 0)
        if settings.device == "cuda" and not self.gpus:
            raise UserError("--device cuda: this cluster has no GPU")
        self.cpus = resources.get("CPU", 1)
        self.device = "cuda" if self.gpus else "cpu"
        self.batch_size = settings.batch_size or LARGEST_BATCH[self.device]
        self.units_per_replica = BATCHES_PER_REPLICA * max(1, self.batch_size // UNIT)  # the most given at once

    def load(self, folder: Path, wait_for: OnNotice = silent) -> None:
        """Draw with the model in this folder from now on. Prompts in progress finish with the previous model.

        Raises:
            UserError: the folder is incomplete, no replica can load it, or the front does not switch to it; the
                previous model stays.
        """
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        from demo.serve.front import DRAWERS, FRONT, Front

        folder = folder.resolve()
        sha256 = check_parts(folder)["parts"]["model.safetensors"]
        name = f"{DRAWERS}{sha256[:16]}-{time.time_ns()}"
        wait_for(f"{counted(self.settings.replicas, 'replica')} to load the model")
        try:
            serve.run(self.drawers(folder, sha256), name=name, route_prefix=None)
        except RuntimeError as error:
            serve.delete(name)
            raise UserError(f"no replica could load {folder}: {' '.join(str(error).split())[:500]}") from None
        wait_for("the engine's front to learn the model's speed")
        if FRONT not in serve.status().applications:
            at_once, waiting = PROMPTS_PER_REPLICA * self.most_replicas, self.settings.waiting
            front: Any = serve.deployment(
                Front,
                name="Front",
                max_ongoing_requests=2 * (at_once + waiting) + 16,
                max_queued_requests=max(1, waiting),  # Ray allows no 0; the front keeps to `waiting` itself
                ray_actor_options={"num_cpus": 0},
                graceful_shutdown_timeout_s=STOP_S,
            )
            serve.run(front.bind(at_once, waiting, self.most_replicas * self.units_per_replica), name=FRONT)
        handle, due_s, has_switched = serve.get_app_handle(FRONT), time.monotonic() + SWITCH_S, False
        while True:
            # The front or Ray Serve may be busy, or may have died and start again; then the next round tries again.
            with suppress(TimeoutError, RayError, RayServeException):
                newest, prompts = handle.in_use.remote().result(timeout_s=FRONT_ANSWER_S)
                if newest == name:
                    has_switched = True
                    # Of the cluster, not of the front: one that has been restarted knows no previous model.
                    previous = [old for old in serve.status().applications if old.startswith(DRAWERS) and old != name]
                    if not previous:
                        return
                    for old in previous:
                        if not prompts.get(old):
                            serve.delete(old)
            if not has_switched and time.monotonic() > due_s:
                serve.delete(name)
                raise UserError(f"the engine's front did not switch to {folder} in {SWITCH_S:.0f} s; try again")
            time.sleep(DRAIN_POLL_S)

    def drawers(self, folder: Path, sha256: str) -> Any:
        """The replicas of a model.

        Each requests half of its share of the GPUs or CPUs from Ray; the other half is for its successor while one
        model replaces another.
        """
        from ray import serve

        from demo.serve.drawer import Drawer

        settings, most = self.settings, self.most_replicas
        kind, count = ("num_gpus", self.gpus) if self.gpus else ("num_cpus", self.cpus)
        scaling: dict[str, Any] = {"num_replicas": settings.replicas}
        if most > settings.replicas:
            bounds = {"min_replicas": settings.replicas, "max_replicas": most}
            # A replica with one batch to draw and another to follow is at its limit.
            scaling = {"autoscaling_config": {**bounds, "target_ongoing_requests": self.units_per_replica / 2}}
        drawers: Any = serve.deployment(
            Drawer,
            name="Drawer",
            max_ongoing_requests=self.units_per_replica,
            ray_actor_options={
                "num_cpus": 0,
                kind: min(1.0, count / most) / 2,
                "runtime_env": {"env_vars": {SEE_ALL_GPUS: "1"}},
            },
            graceful_shutdown_timeout_s=STOP_S,
            **scaling,
        )
        threads = max(1, int(self.cpus // most))
        where = str(folder), sha256, self.device
        return drawers.bind(*where, settings.precision, settings.scorer, threads, self.batch_size)
