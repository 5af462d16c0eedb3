"""A DHT node outlives the processes that call it."""

import asyncio
import multiprocessing
import os
import signal
import time

import psutil
import pytest

pytest.importorskip("hivemind")

from hivemind.utils import get_dht_time

from tests.training.swarm.harness import wait_for
from training.swarm.network.dht import open_dht
from training.swarm.network.node import CallPipe, Node

pytestmark = pytest.mark.swarm


class Gone:
    """What a call holds of a caller that has ended."""

    def __reduce__(self):
        return open, ("/nowhere/its socket",)


def test_a_call_whose_caller_has_ended_is_none_and_the_next_one_is_read():
    read, write = multiprocessing.Pipe(duplex=False)
    write.send(("_store", [], {"future": Gone()}))
    write.send(("_get", ["key"], {}))
    method, arguments, options = CallPipe(read).recv()
    assert asyncio.run(getattr(Node, method)(None, *arguments, **options)) is None
    assert CallPipe(read).recv() == ("_get", ["key"], {})


def call_and_stop(dht):
    dht.get("key", return_future=True)
    os.kill(os.getpid(), signal.SIGSTOP)  # the reader of the call waits for this process to pass the answer's pipe


def test_a_node_goes_on_when_a_process_ends_while_its_call_is_read(capfd):
    dht = open_dht((), client_mode=False, listen=("/ip4/127.0.0.1/tcp/0",))
    try:
        caller = multiprocessing.get_context("fork").Process(target=call_and_stop, args=(dht,))
        os.kill(dht.pid, signal.SIGSTOP)
        caller.start()
        wait_for(lambda: psutil.Process(caller.pid).status() == psutil.STATUS_STOPPED, 60, "the call")
        os.kill(dht.pid, signal.SIGCONT)
        time.sleep(2)  # the node reads the call
        caller.kill()
        assert dht.store("key", 7, get_dht_time() + 60)
        assert dht.get("key").value == 7
    finally:
        dht.shutdown()
    assert "Process DHT" not in capfd.readouterr().err
