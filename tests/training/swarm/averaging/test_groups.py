"""Real averagers on loopback: who leads and reduces, and who is left out."""

import asyncio
from contextlib import ExitStack

import pytest
import torch

from training.swarm.averaging.averagers import FilteredAverager
from training.swarm.averaging.finite_mean import FiniteMean
from training.swarm.host_peers import HostPeers
from training.swarm.network.dht import open_dht
from training.swarm.observe.peer_metrics import protect_records

pytestmark = pytest.mark.swarm
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
TIMES = {"min_matchmaking_time": 6.0, "request_timeout": 4.0, "next_chunk_timeout": 8.0, "allreduce_timeout": 60.0}
TENSORS, SIZE = 12, 1000
"""Enough tensors that each member reduces some where all may."""


class Garbage(FiniteMean):
    """What an enemy returns for the parts that it reduces."""

    def check_current_part_finished(self):
        if self.current_part_accumulated_from == self.num_current_senders:
            self.accumulator.fill_(1e6)
        super().check_current_part_finished()


async def say_nothing(*_, **__):
    await asyncio.sleep(3600)


@pytest.fixture
def averagers(tmp_path):
    """A helper and listening peers; each brings its place in the list as all values, and may be given a rule."""
    with ExitStack() as stack:

        def make(*rules, ghost=None):
            nodes = []
            for number in range(1 + len(rules)):
                addresses = [str(nodes[0].get_visible_maddrs()[0])] if nodes else []
                node = open_dht(addresses, client_mode=False, listen=LISTEN, identity=tmp_path / str(number))
                protect_records(node, "test")
                stack.callback(node.shutdown)
                nodes.append(node)
            host = HostPeers(helpers=frozenset({nodes[0].peer_id}))
            made = []
            for number, (node, rule) in enumerate(zip(nodes, (FiniteMean, *rules), strict=True)):
                averager = FilteredAverager(
                    [torch.full((SIZE,), float(number)) for _ in range(TENSORS)],
                    node,
                    prefix="test_grad_averager",
                    client_mode=False,
                    rule=rule,
                    host=host,
                    start=False,
                    **TIMES,
                )
                if number == ghost:
                    averager._run_allreduce_inplace_ = say_nothing
                averager.run_in_background(await_ready=True)
                stack.callback(averager.shutdown)
                made.append(averager)
            return made

        yield make


def average(averagers, weights):
    """The group and the values of each after a round."""
    steps = [
        averager.step(weight=weight, wait=False, timeout=40.0)
        for averager, weight in zip(averagers, weights, strict=True)
    ]
    results = [step.result(120.0) for step in steps]
    values = []
    for averager in averagers:
        with averager.get_tensors() as tensors:
            values.append(torch.stack(list(tensors)))
    return results, values


def test_a_peer_that_returns_garbage_for_its_parts_is_given_none(averagers):
    peers = averagers(FiniteMean, Garbage)
    groups, values = average(peers, (0.0, 1.0, 1.0))
    assert all(set(group) == {peer.peer_id for peer in peers} for group in groups)
    for value in values:
        torch.testing.assert_close(value, torch.full((TENSORS, SIZE), 1.5))
    assert not any(peer.dropped_tensors for peer in peers)


@pytest.mark.timeout(280)
def test_a_peer_that_says_nothing_is_in_one_group_only(averagers):
    helper, honest, ghost = averagers(FiniteMean, FiniteMean, ghost=2)
    ghost.step(wait=False, timeout=40.0)
    (first, _), _ = average([helper, honest], (0.0, 1.0))
    ghost.step(wait=False, timeout=40.0)  # beside the first one, in which it still says nothing
    (second, _), values = average([helper, honest], (0.0, 1.0))
    assert ghost.peer_id in first
    assert set(second) == {helper.peer_id, honest.peer_id}
    torch.testing.assert_close(values[1], torch.ones(TENSORS, SIZE))
