"""Who counts in an all-reduce, between a helper's runner and streams that a test writes."""

import asyncio
import math
from types import SimpleNamespace

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import PeerID, ServicerBase
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import as_aiter

from training.swarm.averaging.aggregation_rules import PartReducer
from training.swarm.averaging.averagers import RuleRunner
from training.swarm.host_peers import HostPeers

HELPER, ANNA, ENEMY = (PeerID(bytes([n]) * 34) for n in (1, 2, 3))


def part_of_a_stream(value):
    part = serialize_torch_tensor(torch.full((4,), value), runtime_pb2.NONE)
    return averaging_pb2.AveragingData(
        code=averaging_pb2.PART_FOR_AVERAGING, group_id=b"group", tensor_part=part, weight=1.0
    )


async def answers(runner, peer, value):
    """The answers to a stream with one part."""
    stream = runner.rpc_aggregate_part(as_aiter(part_of_a_stream(value)), SimpleNamespace(remote_id=peer))
    return [answer async for answer in stream]


class HelpersAverager(ServicerBase):
    """What a RuleRunner asks of its averager."""

    _p2p = SimpleNamespace(peer_id=HELPER)
    prefix, rule, host = "test", PartReducer, HostPeers(helpers=frozenset({HELPER}))
    max_weight, max_shift, least_own_weight = math.inf, math.inf, 1e-3
    preferred: frozenset[PeerID] = frozenset()

    def excluded_from(self, group_info):
        return set()


def test_a_sender_counts_once_however_many_streams_it_opens():
    group = GroupInfo(b"group", (HELPER, ANNA, ENEMY), ())
    options = {"modes": [AveragingMode.NODE, AveragingMode.CLIENT, AveragingMode.CLIENT], "weight": 0.0}

    async def averaged():
        mine = torch.zeros(4)
        runner = RuleRunner(
            HelpersAverager(), group, tensors=[mine], group_id=b"group", peer_fractions=(1.0, 0.0, 0.0), **options
        )
        running = asyncio.create_task(collected(runner))
        enemy = [asyncio.create_task(answers(runner, ENEMY, 9.0)) for _ in range(3)]
        await asyncio.sleep(0.1)
        honest = await answers(runner, ANNA, 1.0)
        return await running, [await one for one in enemy], honest, runner

    async def collected(runner):
        return [update async for update in runner]

    [update], [taken, *refused], [honest], runner = asyncio.run(averaged())
    assert torch.equal(update, torch.full((4,), 5.0))
    assert torch.equal(deserialize_torch_tensor(honest.tensor_part), torch.full((4,), 4.0))
    assert [answer.code for answer in taken] == [averaging_pb2.AVERAGED_PART]
    assert [[answer.code for answer in one] for one in refused] == [[averaging_pb2.PROTOCOL_VIOLATION]] * 2
    assert not runner.banned_senders


def test_a_round_without_tensors_ends_at_once():
    """PowerSGD compresses no matrix where its rank is too high for all of them."""
    group = GroupInfo(b"group", (HELPER, ANNA), ())

    async def averaged():
        runner = RuleRunner(HelpersAverager(), group, tensors=[], group_id=b"group", peer_fractions=(1.0, 0.0))
        return [update async for update in runner], runner.complete_receipts, runner.averaged_weights()

    assert asyncio.run(averaged()) == ([], {}, {})
