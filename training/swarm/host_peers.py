"""The peers that a whole run trusts: the host's own, as swarm.toml names them."""

from dataclasses import dataclass

from hivemind.p2p import PeerID

from training.swarm.config import SwarmSection
from training.swarm.network.addresses import peer_of


@dataclass(frozen=True)
class HostPeers:
    """The host's peer ids by role; empty in a run that names none."""

    donors: frozenset[PeerID] = frozenset()
    helpers: frozenset[PeerID] = frozenset()

    @property
    def all(self) -> frozenset[PeerID]:
        return self.donors | self.helpers


def host_peers(swarm: SwarmSection) -> HostPeers:
    """The run's donors and helpers; ValueError if an address does not end in a peer id."""
    return HostPeers(
        donors=frozenset(map(PeerID.from_base58, swarm.donors)), helpers=frozenset(map(peer_of, swarm.addresses))
    )
