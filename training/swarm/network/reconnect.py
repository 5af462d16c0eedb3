"""A DHT node that looks for peers which did not answer.

hivemind's forgets a node at the first request that it leaves without an answer. Where a line is gone for a while, both
sides forget each other, and nobody would ever ask again: one swarm would be two for good.
"""

import asyncio
import logging
import random
from collections.abc import Collection, Mapping
from functools import partial
from itertools import islice

import hivemind
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

TOUCH_S = 5.0
MOST_CALLS = 4
"""Silent peers that are called at once, beside those that were named."""
MOST_REMEMBERED = 64
LOOKS = 3
"""Times that a node looks around after an answer: who answered may itself only just be meeting the others."""
MOST_UNANSWERED = 60
"""Calls in a row: who was only met and leaves so many without an answer is called no more."""


def keep_in_touch(dht: hivemind.DHT, addresses: Collection[str]) -> None:
    """Have the node call those at `addresses`, and others that it has met, whenever they are not in its table."""
    peers = {PeerID.from_base58(Multiaddr(address)["p2p"]) for address in addresses}
    dht.run_coroutine(partial(begin_calling, peers=peers))


async def begin_calling(_dht: hivemind.DHT, node: DHTNode, peers: set[PeerID]) -> None:
    """Runs in the node's process."""
    calls, shutdown = asyncio.create_task(call_the_lost(node, peers)), node.shutdown

    async def stop_calling() -> None:
        calls.cancel()
        await shutdown()

    node.shutdown = stop_calling


async def call_the_lost(node: DHTNode, named: set[PeerID]) -> None:
    """Until the node ends."""
    unanswered: dict[PeerID, int] = {}
    looks_left = 0
    while True:
        await asyncio.sleep(TOUCH_S)
        present = set(node.protocol.routing_table.uid_to_peer_id.values())
        unanswered = remembered(unanswered, present)
        lost = set(unanswered) - present - named
        chosen = [*(named - present - {node.peer_id}), *random.sample(list(lost), min(MOST_CALLS, len(lost)))]
        try:
            answers = await asyncio.gather(*map(node.protocol.call_ping, chosen), return_exceptions=True)
            for peer, answer in zip(chosen, answers, strict=True):
                if isinstance(answer, DHTID):
                    node.blacklist.register_success(peer)
                elif peer in lost:
                    unanswered[peer] += 1
            if any(isinstance(answer, DHTID) for answer in answers):
                looks_left = LOOKS
            if looks_left:
                looks_left -= 1
                await node.find_nearest_nodes([node.node_id])  # by those who answered, others whom they know
        except Exception:  # of whatever kind a stranger's answer makes; the others are called again
            logging.getLogger("hivemind").exception("looking for lost peers")


def remembered(unanswered: Mapping[PeerID, int], present: Collection[PeerID]) -> dict[PeerID, int]:
    """Peers that were met and the calls in a row that each has not answered: first those that are lost, then those
    that are there; at most MOST_REMEMBERED."""
    lost = {peer: calls for peer, calls in unanswered.items() if peer not in present and calls < MOST_UNANSWERED}
    return dict(islice({**lost, **dict.fromkeys(present, 0)}.items(), MOST_REMEMBERED))
