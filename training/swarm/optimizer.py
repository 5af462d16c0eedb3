"""hivemind.Optimizer with the house's LAMB, gates and limits."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import hivemind
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.progress_tracker import ProgressTracker
from hivemind.utils import get_dht_time
from torch import Tensor

from dalle_lean import Dalle
from dalle_lean.optim import parameter_groups
from training.recipe import LAMB_ONLY
from training.schedule import learning_rate
from training.swarm.aggregation import RULES
from training.swarm.averagers import (
    StateRefused,
    SwarmGradientAverager,
    SwarmPowerSGDAverager,
    SwarmStateAverager,
)
from training.swarm.compression import wire_compression
from training.swarm.lamb import SwarmLamb
from training.swarm.settings import SwarmSettings

RETRY_PAUSE_S = 2.0


class OutOfSync(ValueError):
    """This peer is behind the others and could not get their state."""


class FollowingTracker(ProgressTracker):
    """Tells the others that this peer is there although it brings no samples: hivemind's own tracker keeps silent."""

    async def _progress_reporter(self) -> None:
        while not self.shutdown_triggered.is_set():
            await self.dht.store(
                key=self.training_progress_key,
                subkey=self._local_public_key,
                value=self.local_progress.copy(update={"time": get_dht_time()}).dict(),
                expiration_time=get_dht_time() + self.metadata_expiration,
                return_future=True,
            )
            loop = asyncio.get_event_loop()
            await loop.run_in_executor(None, self.should_report_progress.wait, self.metadata_expiration / 2)
            self.should_report_progress.clear()


class SwarmOptimizer(hivemind.Optimizer):
    """A peer's side of the run's optimizer; see `swarm_optimizer`.

    Args:
        following: brings no samples, but goes every step with the others: a donor of states.
        load_state_attempts: see TimingSection.
        state_options: of SwarmStateAverager.
    """

    scheduled_grads: Any

    def __init__(self, *, following: bool, load_state_attempts: int, state_options: dict[str, Any], **options: Any):
        self.following, self.load_state_attempts = following, load_state_attempts
        self.state_options = state_options
        super().__init__(**options)

    def _make_state_averager(self, **options: Any) -> SwarmStateAverager:
        return SwarmStateAverager(
            dht=self.dht,
            prefix=f"{self.run_id}_state_averager",
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            shutdown_timeout=self.shutdown_timeout,
            offload_optimizer=self.offload_optimizer,
            custom_gradients=self.offload_optimizer,
            initialize_optimizer=False,
            status_loglevel=self.status_loglevel,
            next_chunk_timeout=self.next_chunk_timeout,
            client_mode=self.client_mode,
            auxiliary=self.auxiliary,
            start=True,
            **self.state_options,
            **options,
        )

    def _make_progress_tracker(self, target_batch_size: int, **options: Any) -> ProgressTracker:
        kind = FollowingTracker if self.following else ProgressTracker
        return kind(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            start=True,
            **options,
        )

    def load_state_from_peers(self, **options: Any) -> None:
        """As hivemind's, which would try for ever; OutOfSync after `load_state_attempts`, with how far behind it is."""
        if self.scheduled_grads is not None and not self.scheduled_grads.done():
            self._tag_along_with_zero_weight(self.scheduled_grads)
            self.scheduled_grads = None
        self.state_averager.step(wait_for_delayed_updates=True)
        with self.tracker.pause_updates():
            self.adopt_a_state()
            if self.tracker.global_epoch - 1 <= self.local_epoch < self.tracker.global_epoch:
                self.state_averager.local_epoch = self.tracker.global_epoch  # they have just gone on
            self.tracker.report_local_progress(local_epoch=self.local_epoch, samples_accumulated=0)
            if self.grad_averager is not None:
                self.grad_averager.reset_accumulated_grads_()
            if not self.client_mode:
                self.state_averager.state_sharing_priority = self.local_epoch

    def adopt_a_state(self) -> None:
        """Take a donor's state, in as many attempts as are allowed."""
        for attempt in range(1, self.load_state_attempts + 1):
            try:
                self.state_averager.load_state_from_peers(timeout=self.load_state_timeout)
                return
            except StateRefused as refusal:
                if attempt == self.load_state_attempts:
                    raise OutOfSync(
                        f"this peer is at step {self.local_epoch}, the swarm at {self.tracker.global_epoch}, and no "
                        f"state could be had in {attempt} attempts ({refusal}); start it again later, it continues"
                    ) from None
                time.sleep(RETRY_PAUSE_S * attempt)

    def shutdown(self) -> None:
        """Leave the swarm; no more than an all-reduce that is under way is waited for."""
        self.state_averager.abandon()
        super().shutdown()


def lr_of_epoch(settings: SwarmSettings, epoch: int) -> float:
    """The learning rate of the step after so many steps of the swarm."""
    schedule = settings.recipe.schedule
    return learning_rate(
        epoch + 1, peak=schedule.peak_lr, warmup_steps=schedule.warmup_steps, total_steps=schedule.total_steps
    )


def make_lamb(settings: SwarmSettings, groups: Any) -> SwarmLamb:
    """The run's LAMB over the groups of `parameter_groups`, on the CPU."""
    recipe = settings.recipe.optimizer
    chosen = {name: getattr(recipe, name) for name in LAMB_ONLY if name != "delayed"}
    beta_mean, beta_square = recipe.betas
    return SwarmLamb(
        groups, lr=0.0, betas=(beta_mean, beta_square), eps=recipe.eps, clip_norm=recipe.clip_norm, **chosen
    )


def swarm_optimizer(
    settings: SwarmSettings,
    model: Dalle,
    dht: hivemind.DHT,
    *,
    role: str = "trainer",
    judge: Callable[[Sequence[Tensor]], None] | None = None,
    on_download: Callable[[int, int, str], None] | None = None,
) -> SwarmOptimizer:
    """The optimizer of a peer over the parameters of `model`.

    Args:
        role: "trainer"; "donor", which brings no samples and hands out states; "helper", which only reduces.
        judge, on_download: see SwarmStateAverager.
    """
    wire, timing, client_mode = settings.wire, settings.timing, dht.client_mode
    return SwarmOptimizer(
        following=role == "donor",
        load_state_attempts=timing.load_state_attempts,
        state_options={
            "rule": RULES[wire.aggregation],
            "lr_of_epoch": partial(lr_of_epoch, settings),
            "donors": settings.swarm.donors,
            "judge": judge,
            "on_download": on_download,
            "request_timeout": timing.request_timeout_s,
        },
        dht=dht,
        run_id=settings.run_id,
        target_batch_size=settings.target_batch_size,
        params=parameter_groups(model, settings.recipe.optimizer.weight_decay),
        optimizer=partial(make_lamb, settings),
        offload_optimizer=True,
        delay_optimizer_step=wire.delayed and role == "trainer",
        delay_state_averaging=wire.delayed and role == "trainer",
        average_state_every=wire.average_state_every,
        client_mode=client_mode,
        auxiliary=role == "helper",
        grad_compression=wire_compression(wire),
        state_averaging_compression=wire_compression(wire),
        grad_averager_factory=gradient_averager(settings),
        matchmaking_time=timing.matchmaking_time_s,
        averaging_timeout=timing.averaging_timeout_s,
        next_chunk_timeout=timing.next_chunk_timeout_s,
        load_state_timeout=timing.load_state_timeout_s,
        tracker_opts={"metadata_expiration": timing.progress_expiration_s},
    )


def gradient_averager(settings: SwarmSettings) -> Callable[..., GradientAverager]:
    """What makes the averager of gradients that the settings name."""
    wire, timing = settings.wire, settings.timing
    options: dict[str, Any] = {"rule": RULES[wire.aggregation], "request_timeout": timing.request_timeout_s}
    if wire.power_sgd_rank:
        return partial(SwarmPowerSGDAverager, averager_rank=wire.power_sgd_rank, **options)
    return partial(SwarmGradientAverager, **options)
