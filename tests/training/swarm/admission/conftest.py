"""Guarded nodes on loopback."""

import time
from contextlib import ExitStack

import pytest

from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import SigningKey
from training.swarm.admission.passes import Pass
from training.swarm.admission.service import begin_admission
from training.swarm.network.addresses import make_identity, peer_id_in
from training.swarm.network.dht import open_dht

LISTEN = ["/ip4/127.0.0.1/tcp/0"]


class Network:
    """Nodes of a run with a key, and strangers."""

    def __init__(self, folder, stack):
        self.folder, self.stack = folder, stack
        self.key = SigningKey.load_or_create(folder / "run.key")
        self.addresses, self.gates = [], []

    def gate(self, name, role="trainer", lasts_s=3600, key=None, **fields):
        """A gate with a pass for a new identity."""
        folder = self.folder / name
        folder.mkdir()
        make_identity(folder / "identity")
        peer = peer_id_in(folder / "identity")
        given = Pass(peer=peer, role=role, name=name, ends=int(time.time() + lasts_s), **fields)
        (folder / "pass").write_bytes(given.signed(key or self.key))
        return Gate(self.key.public, folder / "pass", folder / "bans")

    def open(self, name, *, gate=None, client_mode=False, **options):
        """A node; `gate` is None for a stranger."""
        identity = None if gate is None else self.folder / name / "identity"
        node = open_dht(self.addresses, client_mode=client_mode, listen=LISTEN, identity=identity, gate=gate, **options)
        self.stack.callback(node.shutdown)
        if gate is not None:
            begin_admission(node, [])
            self.gates.append(gate)
        return node

    def member(self, name, *, client_mode=False, **fields):
        """A node with a pass."""
        return self.open(name, gate=self.gate(name, **fields), client_mode=client_mode)

    def helper(self):
        """The first node, through which the others join the DHT."""
        node = self.member("helper", role="helper")
        self.addresses = [str(node.get_visible_maddrs()[0])]
        return node


@pytest.fixture
def run_key(tmp_path):
    return SigningKey.load_or_create(tmp_path / "run.key")


@pytest.fixture
def other_key(tmp_path):
    return SigningKey.load_or_create(tmp_path / "other.key")


@pytest.fixture
def gate(run_key, tmp_path):
    return Gate(run_key.public, tmp_path / "pass", tmp_path / "bans")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with ExitStack() as stack:
        network = Network(tmp_path_factory.mktemp("network"), stack)
        network.host = network.helper()
        yield network
