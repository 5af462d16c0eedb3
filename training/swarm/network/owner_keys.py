"""Owners of DHT records: a record's subkey is its owner's public key, from which the owner's peer id follows."""

import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import hivemind
import multihash
from cryptography.hazmat.primitives import serialization
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from hivemind.utils.timed_storage import ValueWithExpiration

OWNER = re.compile(rb"\A\[owner:(ssh-rsa [A-Za-z0-9+/=]{100,2000})\]\Z")


class IdentityKey(RSAPrivateKey):
    """The private key of an identity file that hivemind wrote."""

    def __init__(self, identity: Path):
        saved = crypto_pb2.PrivateKey.FromString(identity.read_bytes())
        self._private_key = serialization.load_der_private_key(saved.data, password=None)


def owner_key(dht: hivemind.DHT) -> bytes:
    """The subkey of a node's records: its public key. The node must come from `open_dht`."""
    return bytes(RSASignatureValidator(dht.private_key).local_public_key)


@lru_cache(maxsize=4096)
def owner_peer(owner: Any) -> PeerID | None:
    """The peer whose public key is this subkey (github.com/libp2p/specs, peer-ids); None for any other subkey."""
    try:
        [key] = OWNER.findall(owner)
        encoded = serialization.load_ssh_public_key(key).public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        message = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=encoded).SerializeToString()
        return PeerID(multihash.encode(hashlib.sha256(message).digest(), "sha2-256"))
    except Exception:  # untrusted bytes may raise anything
        return None


def records_by_owner(found: ValueWithExpiration[Any] | None) -> dict[PeerID, ValueWithExpiration[Any]]:
    """The records under a key, as a DHT node has found them, by owner; without those that have none."""
    entries = found.value if found is not None and isinstance(found.value, dict) else {}
    owned = {owner_peer(owner): entry for owner, entry in entries.items() if isinstance(entry, ValueWithExpiration)}
    return {peer: entry for peer, entry in owned.items() if peer is not None}


def signer_of(owner: Any, content: bytes, signature: Any) -> PeerID | None:
    """The owner of this key if it signed the content; None for anything else."""
    try:
        [key] = OWNER.findall(owner)
        valid = RSAPublicKey.from_bytes(key).verify(content, signature)
    except Exception:  # untrusted bytes may raise anything
        return None
    return owner_peer(owner) if valid else None
