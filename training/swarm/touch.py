"""A DHT node that looks for peers which did not answer.

hivemind's forgets a node at the first request that it leaves without an answer. Where a line is gone for a while, both
sides forget each other, and nobody would ever ask again: one swarm would be two for good.
"""

import asyncio
import random
from collections.abc import Collection
from functools import partial

import hivemind
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

TOUCH_S = 5.0
MOST_CALLS = 4
"""Silent peers that are called at once."""
MOST_REMEMBERED = 64


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
    met: set[PeerID] = set()
    while True:
        await asyncio.sleep(TOUCH_S)
        present = set(node.protocol.routing_table.uid_to_peer_id.values())
        met = set(list(present | met)[:MOST_REMEMBERED])
        lost = list((named | met) - present - {node.peer_id})
        chosen = random.sample(lost, min(MOST_CALLS, len(lost)))
        answers = await asyncio.gather(*(node.protocol.call_ping(peer) for peer in chosen))
        for peer, answer in zip(chosen, answers, strict=True):
            if answer is not None:
                node.blacklist.register_success(peer)
        if any(answer is not None for answer in answers):
            await node.find_nearest_nodes([node.node_id])  # and, by them, those whom they know
