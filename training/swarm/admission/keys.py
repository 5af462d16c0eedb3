"""Ed25519 keys and the statements that they sign: 64 bytes of signature, then JSON."""

import json
from pathlib import Path
from typing import Any, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dalle_lean.errors import UserError
from dalle_lean.io.files import atomic_write, read_bytes

SIGNATURE_BYTES = 64
MAX_KEY_FILE_BYTES = 4096


class Forged(ValueError):
    """A statement is malformed, or not signed by the expected key."""


class SigningKey:
    """A private key; `public` is its public half, 64 hexadecimal digits."""

    def __init__(self, private: Ed25519PrivateKey):
        self.private = private
        self.public = private.public_key().public_bytes_raw().hex()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a key file; ValueError if it holds no Ed25519 key."""
        try:
            private = serialization.load_pem_private_key(read_bytes(path, MAX_KEY_FILE_BYTES), password=None)
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} holds no private key ({error}); restore the run's own") from None
        if not isinstance(private, Ed25519PrivateKey):
            raise UserError(f"{path} holds a key that is not Ed25519; restore the run's own")
        return cls(private)

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """Read a key file; a missing one is created, readable by this user only."""
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            private = Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            with atomic_write(path, 0o600) as temporary:
                temporary.write_bytes(private)
        return cls.load(path)

    def sign(self, kind: str, content: Any) -> bytes:
        """Sign `content`, a JSON value, as a statement of this kind."""
        body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        return self.private.sign(signed_bytes(kind, body)) + body


def signed_bytes(kind: str, body: bytes) -> bytes:
    """The signature covers the kind too, so that a statement cannot pass for one of another kind."""
    return f"dalle-lean {kind}\n".encode() + body


def read_unverified(statement: bytes) -> Any:
    """The content of a statement, the signature not checked; Forged if it is malformed."""
    try:
        return json.loads(statement[SIGNATURE_BYTES:])
    except (ValueError, RecursionError):
        raise Forged("not a statement") from None


def read_signed(kind: str, statement: bytes, public: str) -> Any:
    """The content of a statement; Forged unless the key `public` signed it as this kind."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(statement[:SIGNATURE_BYTES], signed_bytes(kind, statement[SIGNATURE_BYTES:]))
    except (InvalidSignature, ValueError):
        raise Forged(f"not a {kind} of the key {public[:12]}") from None
    return read_unverified(statement)
