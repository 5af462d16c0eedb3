"""Has a DHT node look for peers that it lost.

hivemind's node forgets another at the first unanswered request. If a link fails for a while, both sides forget each
other and never ask again: one swarm would remain split in two.
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

from training.swarm.network.addresses import peer_of

PING_INTERVAL_S = 5.0
MAX_PINGS = 4
"""Lost peers pinged at once, besides the named ones."""
MAX_REMEMBERED = 64
SEARCHES = 3
"""Searches of the network after an answer: the peer that answered may itself only just be meeting the others."""
MAX_UNANSWERED = 60
"""Pings in a row before a peer that was not named is given up."""


def reconnect_lost_peers(dht: hivemind.DHT, addresses: Collection[str]) -> None:
    """Have the node ping peers at `addresses`, and others it met, while they are missing from its routing table."""
    dht.run_coroutine(partial(start_pinging, peers=set(map(peer_of, addresses))))


async def start_pinging(_dht: hivemind.DHT, node: DHTNode, peers: set[PeerID]) -> None:
    """Runs in the node's process."""
    pinging, shutdown = asyncio.create_task(ping_lost_peers(node, peers)), node.shutdown

    async def stop_pinging() -> None:
        pinging.cancel()
        await shutdown()

    node.shutdown = stop_pinging


async def ping_lost_peers(node: DHTNode, named: set[PeerID]) -> None:
    """Until the node ends."""
    unanswered: dict[PeerID, int] = {}
    searches_left = 0
    while True:
        await asyncio.sleep(PING_INTERVAL_S)
        present = set(node.protocol.routing_table.uid_to_peer_id.values())
        unanswered = remembered(unanswered, present)
        lost = set(unanswered) - present - named
        chosen = [*(named - present - {node.peer_id}), *random.sample(list(lost), min(MAX_PINGS, len(lost)))]
        try:
            answers = await asyncio.gather(*map(node.protocol.call_ping, chosen), return_exceptions=True)
            for peer, answer in zip(chosen, answers, strict=True):
                if isinstance(answer, DHTID):
                    node.blacklist.register_success(peer)
                elif peer in lost:
                    unanswered[peer] += 1
            if any(isinstance(answer, DHTID) for answer in answers):
                searches_left = SEARCHES
            if searches_left:
                searches_left -= 1
                await node.find_nearest_nodes([node.node_id])  # learns whom the peers that answered know
        except Exception:  # a stranger's answer may raise anything
            logging.getLogger("hivemind").exception("pinging lost peers failed")


def remembered(unanswered: Mapping[PeerID, int], present: Collection[PeerID]) -> dict[PeerID, int]:
    """Peers and their unanswered pings in a row, lost ones first; at most MAX_REMEMBERED."""
    lost = {peer: pings for peer, pings in unanswered.items() if peer not in present and pings < MAX_UNANSWERED}
    return dict(islice({**lost, **dict.fromkeys(present, 0)}.items(), MAX_REMEMBERED))
