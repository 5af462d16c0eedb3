"""Checks of a downloaded state: its step, shapes, checksum, signature and held-out loss."""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey
from torch import Tensor

from dalle_lean.io.safetensors_io import is_finite
from training.data.loader import Batch
from training.step.gradients import GradientComputer
from training.swarm.network.owner_keys import signer_of

MAX_LOSS_RATIO = 1.2  # the held-out loss of a downloaded state may be this many times that of the current weights


class StateRefused(Exception):
    """A donor's state is rejected; the message says why."""


def tensors_sha256(tensors: Sequence[Tensor]) -> str:
    """The SHA-256 of the tensors' concatenated bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_epoch(metadata: Any, min_epoch: int, last_epoch: float = math.inf) -> None:
    """StateRefused unless the state names its step and the step lies in [min_epoch, last_epoch]."""
    if not (isinstance(metadata, dict) and type(metadata.get("epoch")) is int and metadata["epoch"] >= 0):
        raise StateRefused("does not name its step")
    if metadata["epoch"] < min_epoch:
        raise StateRefused(f"is of step {metadata['epoch']}, behind {min_epoch}")
    if metadata["epoch"] > last_epoch:
        raise StateRefused(f"is of step {metadata['epoch']}, and the schedule ends at {last_epoch}")


def check_state(metadata: dict[str, Any], tensors: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    """StateRefused unless the tensors have the shapes and types of `own`, match their checksum and are finite."""
    if [(tensor.shape, tensor.dtype) for tensor in tensors] != [(tensor.shape, tensor.dtype) for tensor in own]:
        raise StateRefused("is the state of another model")
    if metadata.get("sha256") != tensors_sha256(tensors):
        raise StateRefused("does not match its checksum")
    if not all(map(is_finite, tensors)):
        raise StateRefused("has values that are not finite")


def sign_state(metadata: dict[str, Any], run: str, key: RSAPrivateKey) -> dict[str, Any]:
    """The metadata with the signature of `key` over the run id, the step and the checksum."""
    owner = RSASignatureValidator(key).local_public_key
    return {**metadata, "owner": owner, "signature": key.sign(signed_content(metadata, run))}


def state_signer(metadata: Any, run: str) -> PeerID | None:
    """The peer that signed a state's metadata for this run; None without a valid signature."""
    try:
        return signer_of(metadata["owner"], signed_content(metadata, run), metadata["signature"])
    except Exception:  # untrusted bytes may raise anything
        return None


def signed_content(metadata: dict[str, Any], run: str) -> bytes:
    return json.dumps([run, metadata["epoch"], metadata["sha256"]]).encode()


def validate_state(
    gradients: GradientComputer, heldout: Batch, current: Sequence[Tensor], offered: Sequence[Tensor]
) -> None:
    """StateRefused if the offered parameters have a much higher held-out loss than the current ones.

    Args:
        current: the parameters of the model of `gradients`, in the order of `offered`; restored afterwards.
    """
    before = gradients.measure(heldout)["heldout_loss"]
    kept = [parameter.detach().clone() for parameter in current]
    try:
        copy_all(current, offered)
        after = gradients.measure(heldout)["heldout_loss"]
    finally:
        copy_all(current, kept)
    if not (after <= MAX_LOSS_RATIO * before or (math.isfinite(after) and not math.isfinite(before))):
        raise StateRefused(f"has a held-out loss of {after:.3g}, the current weights have {before:.3g}")


@torch.no_grad()
def check_near(own: Sequence[Tensor], offered: Sequence[Tensor], share: float) -> None:
    """StateRefused if the offered parameters, all together, differ from `own` by more than `share` of their norm."""
    distance = math.hypot(
        *(float(torch.dist(new.double(), old.double())) for new, old in zip(offered, own, strict=True))
    )
    norm = math.hypot(*(float(old.double().norm()) for old in own))
    if not distance <= share * norm:
        raise StateRefused(f"differs from the current weights by {distance:.3g}, more than {share:g} of their norm")


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
