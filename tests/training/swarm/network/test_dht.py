"""A node that joins, and the logs of this machine's peers."""

import logging

import pytest

pytest.importorskip("hivemind")

from dalle_lean.errors import UserError
from training.swarm.network import dht as network
from training.swarm.network.dht import HANDLER, LOGGERS, NO_PING, log_to, open_dht
from training.swarm.network.node import Node
from training.swarm.observe.log import LOG_BYTES


@pytest.fixture(autouse=True)
def _loggers_as_before():
    before = {name: (list(logging.getLogger(name).handlers), logging.getLogger(name).propagate) for name in LOGGERS}
    yield
    for name, (handlers, propagate) in before.items():
        logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, propagate


def test_who_joins_again_and_again_logs_each_line_once(tmp_path):
    for _ in range(3):
        log_to(tmp_path / "log")
    logging.getLogger("hivemind").warning("heard")
    assert (tmp_path / "log").read_text().count("heard") == 1
    for name in LOGGERS:
        assert [handler.get_name() for handler in logging.getLogger(name).handlers].count(HANDLER) == 1


def test_another_log_takes_the_place_of_the_one_before(tmp_path):
    log_to(tmp_path / "first")
    log_to(tmp_path / "second")
    logging.getLogger("hivemind").warning("heard")
    assert (tmp_path / "first").read_text() == ""
    assert "heard" in (tmp_path / "second").read_text()


def test_the_log_of_a_long_run_stays_small(tmp_path):
    log_to(tmp_path / "log")
    for _ in range(300):
        logging.getLogger("hivemind").info("x" * 100_000)
    logging.getLogger("hivemind").info("the last line")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * LOG_BYTES + 200_000
    assert (tmp_path / "log").read_text().endswith("the last line\n")


@pytest.mark.swarm
@pytest.mark.parametrize(("unanswered", "joins"), [(1, True), (2, False)])
def test_peers_too_busy_for_the_first_ping_are_asked_once_more(dht, monkeypatch, unanswered, joins):
    tries = []

    def start(**options):
        tries.append(options)
        if len(tries) <= unanswered:
            raise RuntimeError(f"DHTNode bootstrap failed: {NO_PING} to a ping.")
        return Node(**options)

    monkeypatch.setattr(network, "Node", start)
    addresses = [str(address) for address in dht.get_visible_maddrs()]
    if joins:
        open_dht(addresses, client_mode=True).shutdown()
    else:
        with pytest.raises(UserError, match="cannot join the swarm through"):
            open_dht(addresses, client_mode=True)
    assert len(tries) == 2
