"""Reconnects a DHT node to peers that it lost.

hivemind's node forgets a peer at the first unanswered request. If a link fails for a while, both sides forget each
other for good, and one swarm remains split in two.
"""

import asyncio
import logging
import random
from collections.abc import Collection, Mapping
from itertools import islice

import hivemind
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from training.swarm.network.node import run_until_shutdown

PING_INTERVAL_S = 5.0
MAX_PINGS = 4  # lost peers pinged at once, in addition to the named ones
MAX_REMEMBERED = 64
SEARCHES = 3  # DHT searches after an answer: the peer that answered may still be reconnecting itself
MAX_UNANSWERED = 60  # pings in a row before the node gives up a peer that was not named


async def reconnect_lost_peers(_dht: hivemind.DHT, node: DHTNode, named: set[PeerID]) -> None:
    """Have the node ping `named` peers, and others it knew, while its routing table lacks them."""
    run_until_shutdown(node, ping_lost_peers(node, named))


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
                await node.find_nearest_nodes([node.node_id])  # learns the peers that the answering ones know
        except Exception:  # an untrusted answer may raise anything
            logging.getLogger("hivemind").exception("pinging lost peers failed")


def remembered(unanswered: Mapping[PeerID, int], present: Collection[PeerID]) -> dict[PeerID, int]:
    """Unanswered pings in a row by peer, lost peers first; at most MAX_REMEMBERED."""
    lost = {peer: pings for peer, pings in unanswered.items() if peer not in present and pings < MAX_UNANSWERED}
    return dict(islice({**lost, **dict.fromkeys(present, 0)}.items(), MAX_REMEMBERED))
