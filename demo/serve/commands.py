"""The command `dalle-lean serve`."""

import os
import signal
import threading
from contextlib import ExitStack
from typing import Annotated

import typer

from dalle_lean.ending import terminate
from dalle_lean.errors import UserError
from dalle_lean.terminal import echo, waiting_told, warn
from dalle_lean.words import counted


def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="Model folder or hub id. [default: $DALLE_LEAN_MODEL, else the bundled model]"),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Copies of the model; each has its share of GPUs or CPUs.", min=1)] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(help="Up to this many while prompts wait. [default: --replicas]", min=1)
    ] = None,
    waiting: Annotated[int, typer.Option(help="Prompts that may wait; more are turned away.", min=0)] = 100,
    host: Annotated[str, typer.Option(help="Address to listen on; there is no password.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port.", min=1, max=65535)] = 8000,
    metrics_port: Annotated[int, typer.Option(help="TCP port of /metrics, for Prometheus.", min=1, max=65535)] = 8001,
    scorer: Annotated[str, typer.Option(help="Scorer that ranks the pictures, as in `generate`.")] = "clip",
    precision: Annotated[str | None, typer.Option(help="As in `generate`.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Pictures that a replica draws at once. [default: 128 on a GPU, else 32]", min=1),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; the replicas share all GPUs.")] = "auto",
) -> None:
    """Draw for pages and programs with several replicas until Ctrl+C or SIGTERM; SIGHUP reloads MODEL."""
    from dalle_lean.io.model_folder import check_parts, find_model
    from demo.serve.cluster import EngineSettings, engine_running
    from demo.server import free_port

    settings = EngineSettings(
        *(replicas, max_replicas, waiting, host, port, metrics_port, device, scorer, precision, batch_size)
    )
    own_cluster = "RAY_ADDRESS" not in os.environ
    free_port(host, port, tries=1)
    if own_cluster:
        free_port(host, metrics_port, tries=1, option="--metrics-port")
    folder = find_model(model)
    check_parts(folder)
    reload = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: reload.set())
    signal.signal(signal.SIGTERM, terminate)
    echo(f"starting {counted(replicas, 'replica')} of {folder} ...")
    try:
        with ExitStack() as stack:
            with waiting_told() as wait_for:
                engine = stack.enter_context(engine_running(folder, settings, wait_for))
            metrics = f", its metrics are on port {metrics_port}" if own_cluster else ""
            echo(f"the engine is at http://{host}:{port}{metrics} (Ctrl+C ends it)")
            while True:
                # With a timeout, so that signals are handled.
                if not reload.wait(1.0):
                    continue
                reload.clear()
                echo("reloading the model ...")
                try:
                    engine.load(find_model(model))
                    echo("the new model draws")
                except (UserError, OSError) as error:
                    warn(f"the previous model stays: {' '.join(str(error).split()) or type(error).__name__}")
    finally:
        echo("the engine has ended")
