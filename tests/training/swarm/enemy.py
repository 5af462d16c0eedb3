"""Attacks by members of a test's swarm: bad states, lies in an all-reduce or about steps, or silence."""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any, AsyncIterator  # noqa: UP035  (hivemind reads no other)

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.schema import SchemaValidator
from hivemind.optim.progress_tracker import TrainingProgressSchema
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from training.swarm.averaging import aggregation_rules, averagers
from training.swarm.averaging.aggregation_rules import RULES, PartReducer, centred_clipping
from training.swarm.averaging.averagers import RuleRunner
from training.swarm.averaging.gradient_averager import SwarmGradientAverager
from training.swarm.averaging.receipts import Signer
from training.swarm.averaging.state_averager import SwarmStateAverager
from training.swarm.averaging.state_validation import tensors_sha256

LIE = 0.5
"""Relative to a part's root mean square: too small for its receiver to notice."""


def upload_slowly() -> None:
    """Serve states slowly, a chunk every half second, so that a member can be killed meanwhile."""
    hand_out = SwarmStateAverager.rpc_download_state

    async def slowly(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        async for piece in hand_out(self, request, context):
            yield piece
            await asyncio.sleep(0.5)

    SwarmStateAverager.rpc_download_state = slowly


def hand_out_noise() -> None:
    """Serve a complete and finite state that contains nothing learnt."""
    hand_out = SwarmStateAverager.get_current_state

    def ruined(self):
        metadata, tensors, infos = hand_out(self)
        tensors = [torch.randn_like(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]
        return {**metadata, "sha256": tensors_sha256(tensors)}, tensors, infos

    SwarmStateAverager.get_current_state = ruined


def lie_when_told(
    kind: type[averagers.FilteredAverager],
    lie: Callable[[torch.Tensor], torch.Tensor],
    is_on: Callable[[], bool],
    weight: float | None = None,
) -> None:
    """Send other tensors than were computed, and another weight if one is given, while the attack is on; this bypasses
    the sender's own checks, as an attacker would."""
    run = kind._run_allreduce_inplace_

    async def hostile(self, tensors, *arguments, **options):
        if is_on():
            tensors = [lie(tensor.detach()) for tensor in tensors]
            options = options if weight is None else {**options, "weight": weight}
        await run(self, tensors, *arguments, **options)

    kind._run_allreduce_inplace_ = hostile


def shift(tensor: torch.Tensor) -> torch.Tensor:
    """Shift by half the root mean square against signs that all enemies share (Baruch et al. 2019)."""
    signs = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).sign()
    return tensor + 0.5 * tensor.norm() / tensor.numel() ** 0.5 * signs


def disturb(tensor: torch.Tensor, norms: float) -> torch.Tensor:
    """Add noise of this many times the norm."""
    noise = torch.randn_like(tensor)
    return tensor + norms * tensor.norm() / noise.norm().clamp(min=1e-30) * noise


def return_garbage(is_on: Callable[[], bool]) -> None:
    """Return garbage for the parts that this member reduces."""

    def ruined(parts, weights):
        return -10 * centred_clipping(parts, weights) if is_on() else centred_clipping(parts, weights)

    RULES["centred_clipping"] = aggregation_rules.TIGHTER = partial(PartReducer, combine=ruined)


def return_two_averages(is_on: Callable[[], bool], setattr: Callable[[type, str, Any], None] = setattr) -> None:
    """Send the first sender an average that differs by LIE from the others', and sign both."""
    honest = RuleRunner._accumulate_parts_streaming

    async def two_faced(self, stream, sender_index: int):
        lies = self.signer is not None and is_on()
        if lies:
            self.signer.timeout_s = 0.2  # does not wait for the first sender's answer
        if not lies or self.sender_peer_ids[sender_index] != min(set(self.sender_peer_ids) - {self.peer_id}):
            async for answer in honest(self, stream, sender_index):
                yield answer
            return
        other = Signer(self.signer.key, self.signer.owner, self.group_id, 1.0)
        part = 0
        async for answer in AllReduceRunner._accumulate_parts_streaming(self, stream, sender_index):
            average = self.tensor_part_reducer.average
            shift = LIE * average.norm() / average.numel() ** 0.5
            answer.tensor_part.CopyFrom(serialize_torch_tensor(deserialize_torch_tensor(answer.tensor_part) + shift))
            answer.peer_id = await other.statement(part, 0, answer.tensor_part.buffer, average + shift, [0])
            part += 1
            yield answer

    setattr(RuleRunner, "_accumulate_parts_streaming", two_faced)


def haunt(is_on: Callable[[], bool]) -> None:
    """Join groups, but send and answer nothing."""
    run = averagers.FilteredAverager._run_allreduce_inplace_

    async def silent(self, *arguments, **options):
        while is_on():
            await asyncio.sleep(1.0)
        await run(self, *arguments, **options)

    averagers.FilteredAverager._run_allreduce_inplace_ = silent


def lie_in_headers(is_on: Callable[[], bool]) -> None:
    """Declare a data type of 4 kB for each sent part."""
    generate = AllReduceRunner._generate_input_for_peer

    async def lying(self, peer_index: int):
        async for message in generate(self, peer_index):
            if is_on():
                message.tensor_part.dtype = "U1024"
            yield message

    AllReduceRunner._generate_input_for_peer = lying


def report_nonsense(is_on: Callable[[], bool]) -> None:
    """Join groups with a malformed report."""

    class Nonsense(MSGPackSerializer):
        @classmethod
        def dumps(cls, value: object) -> bytes:
            is_report = isinstance(value, list) and len(value) == 3
            return b"\xc1" if is_report and is_on() else super().dumps(value)

    averagers.FilteredAverager.serializer = Nonsense


def forge_progress(dht: DHT, run_id: str, epoch: int) -> None:
    """Store a record in the DHT that claims a step."""
    signature = RSASignatureValidator(RSAPrivateKey())
    dht.add_validators([SchemaValidator(TrainingProgressSchema, prefix=run_id), signature])
    content = {
        "peer_id": dht.peer_id.to_bytes(),
        "epoch": epoch,
        "samples_accumulated": 0,
        "samples_per_second": 1.0,
        "time": get_dht_time(),
        "client_mode": False,
    }
    expiration = get_dht_time() + 300
    key, subkey = f"{run_id}_progress", signature.local_public_key
    assert dht.store(key, subkey=subkey, value=content, expiration_time=expiration)


of_gradients = partial(partial, lie_when_told, SwarmGradientAverager)
of_weights = partial(partial, lie_when_told, SwarmStateAverager)


def send_both(is_on: Callable[[], bool]) -> None:
    """Send opposite gradients and noise for weights."""
    LIES["opposite gradient"](is_on)
    LIES["noise for weights"](is_on)


LIES = {
    "hostile_nan": partial(lie_when_told, averagers.FilteredAverager, lambda tensor: torch.full_like(tensor, math.nan)),
    "opposite gradient": of_gradients(lambda tensor: -10 * tensor),
    "opposite gradient of weight 1e9": of_gradients(torch.neg, weight=1e9),
    "random gradient": of_gradients(partial(disturb, norms=100.0)),
    "constant gradient": of_gradients(torch.ones_like),
    "half the opposite gradient": of_gradients(lambda tensor: -0.5 * tensor),
    "small shift": of_gradients(shift),
    "noise for weights": of_weights(torch.randn_like),
    "opposite gradient and noise for weights": send_both,
    "half noise for weights": of_weights(partial(disturb, norms=0.5)),
    "garbage for an average": return_garbage,
    "two averages of a part": return_two_averages,
    "ghost": haunt,
    "lying header": lie_in_headers,
    "unreadable report": report_nonsense,
}
"""The attacks by name; each takes a function that returns whether the attack is on."""
