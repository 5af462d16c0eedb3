"""Opens this machine's DHT node, and sets up logs and signals of hivemind's processes."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hivemind
import torch
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils.logging import use_hivemind_log_handler

from dalle_lean.errors import UserError
from training.swarm.admission.gate import Gate
from training.swarm.network.addresses import peer_of
from training.swarm.network.node import Node
from training.swarm.network.orphan_reaper import guard_children
from training.swarm.network.owner_keys import IdentityKey
from training.swarm.network.reconnect import reconnect_lost_peers
from training.swarm.observe.log import BoundedFileHandler

LOGGERS = ("hivemind", "asyncio", "py.warnings")
HANDLER = "dalle-lean"
CONNECT_TIMEOUT_S = 15.0
"""For libp2p's daemon to start and to reach one of the addresses."""
NO_PING = "none of the initial_peers responded"
"""What hivemind says if no peer answers its first ping, be it busy or not willing."""


def open_dht(
    addresses: Sequence[str],
    *,
    client_mode: bool,
    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
    announce: Sequence[str] = (),
    identity: Path | None = None,
    gate: Gate | None = None,
    must_bootstrap: bool = True,
    reads_all: bool = False,
) -> hivemind.DHT:
    """Start a DHT node, which signs its records with the key of its identity, its attribute `private_key`.

    Args:
        addresses: of peers already in the DHT; none for its first node.
        client_mode: accept no connections.
        listen: where to accept connections, as /ip4/ADDRESS/tcp/PORT; port 0 is any free one.
        announce: the addresses that others use, if they differ.
        identity: file of the private key, created if missing; by default a temporary one.
        gate: for a run with a key, which admits only peers with a pass.
        must_bootstrap: raise ValueError unless the node joins the DHT. A newcomer without a pass cannot, and only calls
            helpers.
        reads_all: sign and check no records. Else a node leaves out all of another's answer if one record is forged.

    Raises ValueError if none of `addresses` answers or the port is taken.
    """
    with ExitStack() as stack:
        if identity is None:
            identity = Path(stack.enter_context(TemporaryDirectory())) / "identity"

        def start_node() -> Node:
            return Node(
                gate=gate,
                initial_peers=list(addresses) or None,
                client_mode=client_mode,
                host_maddrs=None if client_mode else list(listen),
                announce_maddrs=list(announce) or None,
                no_listen=client_mode,
                identity_path=str(identity),
                use_relay=False,
                nat_port_map=False,
                ensure_bootstrap_success=must_bootstrap,
                startup_timeout=CONNECT_TIMEOUT_S,
                start=True,
            )

        try:
            try:
                dht = start_node()
            except Exception as error:
                # A busy peer may answer after the three seconds that hivemind waits.
                if NO_PING not in str(error) or (gate is not None and gate.own_refusal):
                    raise
                dht = start_node()
        except Exception as error:  # hivemind passes on any exception of its process
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if addresses:
                where = ", ".join(addresses)
                if "failed to connect to bootstrap peers" in reason:
                    reason = (
                        "no answer; is the host up, the address complete and its port open? "
                        "A run that is finished has no host any more"
                    )
                elif gate is not None and NO_PING in reason:
                    reason = f"no peer there admits this machine: {gate.own_refusal or 'ask its host why'}"
                raise UserError(f"cannot join the swarm through {where}: {reason}") from None
            raise UserError(f"cannot listen on {', '.join(listen)}: {reason}") from None
        dht.private_key = IdentityKey(identity)
    if not reads_all:
        dht.add_validators([RSASignatureValidator(dht.private_key)])  # before any other: a node signs with its first
    dht.run_coroutine(partial(reconnect_lost_peers, named=set(map(peer_of, addresses))))
    return dht


def log_to(path: Path | None, *, output: bool = False) -> None:
    """Log hivemind and its processes to this size-limited file instead of the screen; None discards the logs.

    A later call replaces the file. `output` sends this process's stdout and stderr there too.
    """
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
    """Call before hivemind forks. No child outlives this process or waits for threads that do not survive a fork, and
    errors in hivemind's threads and destructors go to its log, which is discarded until `log_to` names a file."""
    os.register_at_fork(after_in_child=begin_child)
    threading.excepthook = log_failure
    sys.unraisablehook = log_failure
    guard_children()
    log_to(None)


def log_failure(failure: Any) -> None:
    """Log an exception that ended a thread or that Python could not raise."""
    exc_info = (failure.exc_type, failure.exc_value, failure.exc_traceback)
    logging.getLogger("hivemind").error("unexpected", exc_info=exc_info)


def begin_child() -> None:
    """In a forked process, end by SIGTERM whatever the parent's handler, and do not use OpenMP's threads: they do not
    survive the fork, and the first operation would wait for them forever."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
