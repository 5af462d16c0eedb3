"""Untrusted records neither replace a run's records nor fill a node's memory."""

from dataclasses import replace

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from training.swarm.config import SwarmSettings
from training.swarm.network import run_records
from training.swarm.network.dht import open_dht
from training.swarm.network.owner_keys import owner_key, owner_peer
from training.swarm.network.run_records import (
    MAX_AGE_S,
    MAX_VALUE_BYTES,
    RoomForOwners,
    RunRecords,
    keep_own_records,
    key_of,
)

RUN = "emoji-0123456789abcdef"
GROUP = f"{RUN}_grad_averager.0b"
OWNERS = [RSASignatureValidator(RSAPrivateKey()).local_public_key for _ in range(3)]
dumps = DHTProtocol.serializer.dumps


def record(key=GROUP, subkey=OWNERS[0], value=b"x", age_s=60.0):
    return DHTRecord(key_of(key), dumps(subkey), value, get_dht_time() + age_s)


NAMES = [
    "progress",
    "metrics",
    "waiting",
    *(f"{kind}_averager.{name}" for kind in ("grad", "state") for name in ("0b", "complaints")),
]


@pytest.mark.parametrize("name", NAMES)
def test_what_an_owner_says_under_the_runs_keys_is_kept(name):
    assert RunRecords(RUN).validate(record(f"{RUN}_{name}"))


@pytest.mark.parametrize(
    "refused",
    [
        pytest.param(record("another-run_progress"), id="another run's key"),
        pytest.param(record(f"{RUN}_anything"), id="no key of the run"),
        pytest.param(record(subkey=None), id="a plain value in place of all"),
        pytest.param(record(subkey=b"\x12\x20" + bytes(32)), id="a peer id, which anybody can write"),
        pytest.param(record(subkey=OWNERS[0] + b"2"), id="a second subkey of one owner"),
        pytest.param(record(subkey=[OWNERS[0]]), id="a list for an owner"),
        pytest.param(record(value=bytes(MAX_VALUE_BYTES + 1)), id="a long value"),
        pytest.param(record(age_s=MAX_AGE_S + 1e7), id="a record for a year"),
        pytest.param(record(f"{RUN}_state_averager.all_averagers", b"peer", bytes(100)), id="a long announcement"),
        pytest.param(record(f"{RUN}_state_averager.all_averagers", None), id="a plain value for all announcements"),
        pytest.param(DHTRecord(key_of(GROUP), b"\xc1", b"x", get_dht_time() + 60), id="no MessagePack"),
    ],
)
def test_anything_else_is_refused(refused):
    assert not RunRecords(RUN).validate(refused)


def test_made_up_owners_fill_no_memory_and_keep_out_neither_the_host_nor_those_who_are_there(monkeypatch):
    monkeypatch.setattr(run_records, "MAX_OWNERS", 1)
    records = RoomForOwners(host={owner_peer(OWNERS[2])})
    first, flood, donor = (record(subkey=owner) for owner in OWNERS)
    assert records.validate(first)
    assert not records.validate(flood)
    assert records.validate(first)
    assert records.validate(donor)
    assert records.validate(record(f"{RUN}_progress", OWNERS[1]))
    later = get_dht_time() + 61
    monkeypatch.setattr(run_records, "get_dht_time", lambda: later)
    assert records.validate(flood)


def test_owners_for_whom_nobody_can_sign_take_up_no_room(monkeypatch):
    monkeypatch.setattr(run_records, "MAX_OWNERS", 1)
    checks = CompositeValidator([RoomForOwners(), RunRecords(RUN), RSASignatureValidator()])
    assert not checks.validate(record(subkey=OWNERS[0]))  # its value has no signature
    signer = RSASignatureValidator(RSAPrivateKey())
    signed = record(subkey=signer.local_public_key)
    assert checks.validate(replace(signed, value=signer.sign_value(signed)))


@pytest.mark.swarm
def test_a_stranger_does_not_take_the_place_of_the_groups_that_form(tmp_path):
    settings = SwarmSettings()
    key, listen = f"{settings.run_id}_grad_averager.0b", ["/ip4/127.0.0.1/tcp/0"]
    helper = open_dht([], client_mode=False, listen=listen, identity=tmp_path / "helper")
    stranger = open_dht([str(helper.get_visible_maddrs()[0])], client_mode=True)
    try:
        keep_own_records(helper, settings)
        expiration = get_dht_time() + 60
        assert helper.store(key, True, expiration, subkey=owner_key(helper))
        assert not stranger.store(key, b"", expiration + 1e7)
        assert not stranger.store(key, False, expiration + 1, subkey=owner_key(helper))
        assert stranger.store(key, True, expiration, subkey=owner_key(stranger))
        found = helper.get(key, latest=True).value
        assert {owner_peer(owner): entry.value for owner, entry in found.items()} == {
            helper.peer_id: True,
            stranger.peer_id: True,
        }
    finally:
        stranger.shutdown()
        helper.shutdown()
