"""What enemies among a test's swarm do: hand out bad states, lie in an all-reduce, or answer nothing."""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import AsyncIterator  # noqa: UP035  (hivemind reads no other)

import torch
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2

from training.swarm.averaging import averagers
from training.swarm.averaging.gradient_averager import SwarmGradientAverager
from training.swarm.averaging.robust_rules import CentredClipping
from training.swarm.averaging.state_transfer import SwarmStateAverager
from training.swarm.averaging.state_validation import tensors_sha256


def upload_slowly() -> None:
    """Hand out states slowly, a piece in half a second: someone may be killed in the middle."""
    hand_out = SwarmStateAverager.rpc_download_state

    async def slowly(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        async for piece in hand_out(self, request, context):
            yield piece
            await asyncio.sleep(0.5)

    SwarmStateAverager.rpc_download_state = slowly


def hand_out_noise() -> None:
    """A state that is whole and finite, and says nothing of what was learnt."""
    hand_out = SwarmStateAverager.get_current_state

    def ruined(self):
        metadata, tensors, infos = hand_out(self)
        tensors = [torch.randn_like(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]
        return {**metadata, "sha256": tensors_sha256(tensors)}, tensors, infos

    SwarmStateAverager.get_current_state = ruined


def lie_when_told(
    kind: type[averagers.FilteredAverager], lie: Callable[[torch.Tensor], torch.Tensor], told: Callable[[], bool]
) -> None:
    """Whatever is averaged, send something else while that is asked for: past the checks at home, as an enemy would."""
    run = kind._run_allreduce_inplace_

    async def hostile(self, tensors, *arguments, **options):
        if told():
            tensors = [lie(tensor.detach()) for tensor in tensors]
        await run(self, tensors, *arguments, **options)

    kind._run_allreduce_inplace_ = hostile


def return_garbage(told: Callable[[], bool]) -> None:
    """Of the parts that this member reduces."""
    combine = CentredClipping.combine

    def ruined(self, parts, weights):
        return -10 * combine(self, parts, weights) if told() else combine(self, parts, weights)

    CentredClipping.combine = ruined


def haunt(told: Callable[[], bool]) -> None:
    """Join groups, and neither send nor answer anything in them."""
    run = averagers.FilteredAverager._run_allreduce_inplace_

    async def silent(self, *arguments, **options):
        while told():
            await asyncio.sleep(1.0)
        await run(self, *arguments, **options)

    averagers.FilteredAverager._run_allreduce_inplace_ = silent


LIES = {
    "hostile_nan": partial(lie_when_told, averagers.FilteredAverager, lambda tensor: torch.full_like(tensor, math.nan)),
    "opposite gradient": partial(lie_when_told, SwarmGradientAverager, lambda tensor: -10 * tensor),
    "noise for weights": partial(lie_when_told, SwarmStateAverager, torch.randn_like),
    "garbage for an average": return_garbage,
    "ghost": haunt,
}
"""What an enemy does while it is told to: each takes a function that says so."""
