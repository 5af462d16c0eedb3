"""A ban reaches the cut-off half of a network once it is reconnected, and takes effect there."""

import json
import time
from contextlib import ExitStack

import pytest

from dalle_lean.io.files import read_json
from tests.training.swarm import wires
from tests.training.swarm.admission.conftest import Network
from tests.training.swarm.harness import Member, wait_for
from tests.training.swarm.wires import Wires
from training.swarm.admission.bans import Bans, change_bans
from training.swarm.network.addresses import peer_id_in

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(wires.why_not()), reason=wires.why_not() or "nothing"),
]
NAMES = ("helper", "near", "far", "enemy")
PORT = 4000
PARTED_S = 20.0
"""Ten times as long as a ban takes from one peer to the next."""


@pytest.fixture
def parted(tmp_path, nursery):
    """Four members in network namespaces, and their folders."""
    with Wires(NAMES, bits_per_s=20e6, delay_s=0.02) as laid, ExitStack() as stack:
        network = Network(tmp_path, stack)
        network.wires = laid
        addresses: list[str] = []
        for name in NAMES:
            gate = network.gate(name, role="helper" if name == "helper" else "trainer")
            namespace, host = laid.hosts[name]
            listen = f"/ip4/{host}/tcp/{PORT}"
            spec = {"role": "bystander", "folder": str(tmp_path / name), "namespace": namespace, "listen": listen}
            member = Member(
                name, tmp_path / name, nursery.fork({**spec, "run_key": gate.run_key, "addresses": addresses})
            )
            stack.callback(member.kill)
            wait_for((tmp_path / name / "gate.json").exists, 240, f"{name} to be in the network")
            addresses = addresses or [f"{listen}/p2p/{peer_id_in(tmp_path / name / 'identity')}"]
        yield network


def test_a_ban_reaches_a_half_that_was_cut_off_when_it_comes_back(parted):
    enemy = peer_id_in(parted.folder / "enemy" / "identity")

    def knows(name):
        file = parted.folder / name / "bans"
        return file.exists() and enemy in Bans.read(file.read_bytes(), parted.key.public).banned

    parted.wires.part(["helper", "near"], ["far", "enemy"])
    assert change_bans(parted.folder / "helper", parted.key, enemy, banned=True)
    wait_for(lambda: knows("near"), 60, "the ban in the half where it was made")
    time.sleep(PARTED_S)
    assert not knows("far")
    assert not knows("enemy")
    refused = read_json(parted.folder / "far" / "gate.json")["refused"]
    parted.wires.part()
    healed_s = time.monotonic()
    wait_for(lambda: knows("far"), 120, "the ban in the half that comes back")
    print(json.dumps({"fault": "a ban while parted", "known_after_s": round(time.monotonic() - healed_s, 1)}))
    wait_for(
        lambda: read_json(parted.folder / "far" / "gate.json")["refused"] > refused, 60, "the enemy to be refused there"
    )
    wait_for(
        lambda: "banned" in read_json(parted.folder / "enemy" / "gate.json")["own_refusal"], 60, "the enemy to know"
    )
