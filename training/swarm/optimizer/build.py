"""Builds the optimizer of a run, for each role."""

from collections.abc import Callable
from functools import partial
from typing import Any

import hivemind
from hivemind.optim.grad_averager import GradientAverager

from dalle_lean import Dalle
from dalle_lean.optim.parameter_groups import parameter_groups
from dalle_lean.progress import OnNotice, silent
from training.run.recipe import LAMB_ONLY
from training.swarm.averaging.aggregation_rules import rule_of
from training.swarm.averaging.attestation import Attestation
from training.swarm.averaging.gradient_averager import SwarmGradientAverager, SwarmPowerSGDAverager
from training.swarm.averaging.wire import wire_compression
from training.swarm.config import SwarmSettings
from training.swarm.host_peers import host_peers
from training.swarm.optimizer.checked_step import SwarmLamb
from training.swarm.optimizer.diloco import DilocoOptimizer, PseudoGradientAverager, make_outer
from training.swarm.optimizer.swarm_optimizer import SwarmOptimizer


def lr_of_epoch(settings: SwarmSettings, epoch: int) -> float:
    """The learning rate of the step that follows `epoch`; in "diloco" mode the outer one."""
    if settings.wire.mode == "diloco":
        return settings.wire.outer_lr
    return settings.recipe.schedule.learning_rate(epoch + 1)


def make_lamb(settings: SwarmSettings, groups: Any) -> SwarmLamb:
    """The run's LAMB over the groups of `parameter_groups`, on the CPU."""
    recipe = settings.recipe.optimizer
    chosen = {name: getattr(recipe, name) for name in LAMB_ONLY}
    return SwarmLamb(groups, lr=0.0, betas=recipe.betas, eps=recipe.eps, clip_norm=recipe.clip_norm, **chosen)


def swarm_optimizer(
    settings: SwarmSettings,
    model: Dalle,
    dht: hivemind.DHT,
    *,
    role: str = "trainer",
    on_notice: OnNotice = silent,
    attestation: Attestation | None = None,
) -> SwarmOptimizer:
    """The optimizer of a peer over the parameters of `model`.

    Args:
        role: "trainer"; "donor", which serves states and has no samples; "helper", which only reduces.
        attestation: of a helper; kept in the averager's process.
    """
    wire, timing, host = settings.wire, settings.timing, host_peers(settings.swarm)
    diloco = wire.mode == "diloco"
    delayed = wire.delayed and role == "trainer" and not diloco  # it would overwrite inner steps
    kind = DilocoOptimizer if diloco else SwarmOptimizer
    gradient_averager: Callable[..., GradientAverager] = PseudoGradientAverager if diloco else SwarmGradientAverager
    if wire.power_sgd_rank:
        gradient_averager = partial(SwarmPowerSGDAverager, averager_rank=wire.power_sgd_rank)
    averager_options = {"rule": rule_of(settings), "host": host, "request_timeout": timing.request_timeout_s}
    return kind(
        on_notice=on_notice,
        is_donor=role == "donor",
        load_state_attempts=timing.load_state_attempts,
        averager_opts={
            **averager_options,
            "max_weight": 1.0,
            "lr_of_epoch": partial(lr_of_epoch, settings),
            "first_epoch": settings.first_epoch,
            "last_epoch": settings.last_epoch,
        },
        dht=dht,
        run_id=settings.run_id,
        target_batch_size=settings.target_batch_size,
        params=parameter_groups(model, settings.recipe.optimizer.weight_decay),
        optimizer=partial(make_outer if diloco else make_lamb, settings),
        offload_optimizer=True,
        delay_optimizer_step=delayed,
        delay_state_averaging=delayed,
        average_state_every=wire.average_state_every,
        client_mode=dht.client_mode,
        auxiliary=role == "helper",
        grad_compression=wire_compression(wire),
        state_averaging_compression=wire_compression(wire),
        grad_averager_factory=partial(
            gradient_averager,
            **averager_options,
            max_weight=float(settings.target_batch_size),
            attestation=attestation,
        ),
        matchmaking_time=timing.matchmaking_time_s,
        averaging_timeout=timing.averaging_timeout_s,
        next_chunk_timeout=timing.next_chunk_timeout_s,
        load_state_timeout=timing.load_state_timeout_s,
        tracker_opts={
            "last_epoch": settings.last_epoch,
            "donors": host.donors,
            "metadata_expiration": timing.progress_expiration_s,
            # With a longer period than the matchmaking time, a peer may not know the others at its first step.
            "default_refresh_period": min(3.0, timing.matchmaking_time_s),
            "max_refresh_period": min(10.0, timing.matchmaking_time_s),
        },
    )
