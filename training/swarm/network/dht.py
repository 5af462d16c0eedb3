"""This machine's place in the network: its DHT node, its identity, and what they say."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hivemind
import torch
import torch._dynamo  # takes so long that a peer would miss its first round
from hivemind.utils.logging import use_hivemind_log_handler

from dalle_lean.errors import UserError
from training.swarm.network.orphan_reaper import guard_children
from training.swarm.network.reconnect import keep_in_touch
from training.swarm.observe.log import BoundedFileHandler

LOGGERS = ("hivemind", "asyncio", "py.warnings")
HANDLER = "dalle-lean"


def open_dht(
    addresses: Sequence[str],
    *,
    client_mode: bool,
    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
    announce: Sequence[str] = (),
    identity: Path | None = None,
) -> hivemind.DHT:
    """A node of the DHT.

    Args:
        addresses: of peers that are there already; none for the first one.
        client_mode: take no connections.
        listen: where connections are taken, as /ip4/ADDRESS/tcp/PORT; port 0 is any free one.
        announce: the same as others reach it, where that differs.
        identity: file of the private key, made where it is missing; without it the identity lasts as long as the node.

    Raises ValueError where none of `addresses` answers or the port is taken.
    """
    try:
        dht = hivemind.DHT(
            initial_peers=list(addresses) or None,
            client_mode=client_mode,
            host_maddrs=None if client_mode else list(listen),
            announce_maddrs=list(announce) or None,
            no_listen=client_mode,
            identity_path=None if identity is None else str(identity),
            use_relay=False,
            nat_port_map=False,
            start=True,
        )
    except Exception as error:  # hivemind raises what its process met, of many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if addresses:
            where = ", ".join(addresses)
            if "failed to connect to bootstrap peers" in reason:
                reason = "nobody answers there; is the host up, the address whole and its port open?"
            raise UserError(f"no way into the swarm by {where}: {reason}") from None
        raise UserError(f"cannot listen on {', '.join(listen)}: {reason}") from None
    keep_in_touch(dht, addresses)
    return dht


def log_to(path: Path | None, *, output: bool = False) -> None:
    """What hivemind and its processes say goes to this file, which stays small, and to nobody's screen; None: nowhere.
    It takes the place of what was said before. `output`: what this process prints goes there too."""
    use_hivemind_log_handler("nowhere")
    logging.captureWarnings(True)
    handler: logging.Handler = logging.NullHandler() if path is None else BoundedFileHandler(path, output=output)
    handler.set_name(HANDLER)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for former in [former for former in logger.handlers if former.get_name() == HANDLER]:
            logger.removeHandler(former)
            former.close()
        logger.propagate = False
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def prepare_process() -> None:
    """First of all, before hivemind forks: nothing that is started later outlives this process, or waits for threads
    that a fork loses; what fails in hivemind's own threads and on its way out goes to the log."""
    os.register_at_fork(after_in_child=begin_child)
    threading.excepthook = log_failure
    sys.unraisablehook = log_failure
    guard_children()


def log_failure(failure: Any) -> None:
    """A thread's last exception, or one that nobody could be given."""
    about = (failure.exc_type, failure.exc_value, failure.exc_traceback)
    logging.getLogger("hivemind").error("unexpected", exc_info=about)


def begin_child() -> None:
    """A forked process ends by SIGTERM, whatever its parent does then; and it uses no thread of OpenMP: they are not
    there, and its first sum would wait for them for ever."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
