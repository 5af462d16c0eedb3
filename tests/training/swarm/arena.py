"""Honest trainers among attackers that follow the protocol: what the honest ones still learn, and at what cost."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tests.training.swarm.enemy import forge_progress
from tests.training.swarm.harness import Nursery, Swarm
from training.swarm.config import WireSection
from training.swarm.network.dht import open_dht

SAMPLES_PER_S = 64.0
"""Speed of all trainers together, so that a step's duration does not depend on their number."""
FIRST_STEP = 2
"""The step at which the enemies start."""

ATTACKS: dict[str, dict[str, Any]] = {
    "opposite gradient": {"misbehaviour": "opposite gradient"},
    "opposite gradient of weight 1e9": {"misbehaviour": "opposite gradient of weight 1e9"},
    "gradient of 100 times the norm": {"misbehaviour": "random gradient"},
    "constant gradient": {"misbehaviour": "constant gradient"},
    "inner product manipulation": {"misbehaviour": "half the opposite gradient"},
    "a little is enough": {"misbehaviour": "small shift"},
    "noise for weights": {"misbehaviour": "noise for weights"},
    "opposite gradient, noise for weights and claims": {
        "misbehaviour": "opposite gradient and noise for weights",
        "claims": 2,
    },
    "half noise for weights": {"misbehaviour": "half noise for weights"},
    "garbage for an average": {"misbehaviour": "garbage for an average"},
    "garbage for an average, all reduce": {"misbehaviour": "garbage for an average", "host_reduces": False},
    "two averages of a part, all reduce": {"misbehaviour": "two averages of a part", "host_reduces": False},
    "ghost": {"misbehaviour": "ghost"},
    "parts with lying headers": {"misbehaviour": "lying header"},
    "reports that cannot be read": {"misbehaviour": "unreadable report"},
    "bad after good steps": {"misbehaviour": "opposite gradient", "from_step": FIRST_STEP + 6},
    "claims of the last step": {"claims": 2},
}
"""How `fight` configures the enemies."""


class Outcome(NamedTuple):
    """Of the honest trainers."""

    heldout_losses: list[float]
    """Held-out loss after the last step, in nats."""
    step_s: float
    """Seconds per step since the enemies started."""
    grown_mb: float
    """Largest growth of a member's memory since then, including the helper's."""


def fight(
    folder: Path,
    nursery: Nursery,
    *,
    honest: int = 3,
    enemies: int = 1,
    steps: int = 16,
    claims: int = 0,
    host_reduces: bool = True,
    from_step: int = FIRST_STEP,
    misbehaviour: str | None = None,
    wire: WireSection = WireSection(),
) -> Outcome:
    """Train for `steps` steps with a helper and a donor; AssertionError if an honest member ends or stops stepping.

    Args:
        claims: made-up identities that say they have gone the last step.
        host_reduces: whether helper and donor are the host's, which reduce alone; all reduce where they are not.
        misbehaviour: of tests.training.swarm.enemy.LIES; without it the enemies are honest.
        wire: of swarm.toml.
    """
    rate = SAMPLES_PER_S / (honest + enemies)
    with Swarm(folder, wire=wire, batch_size=128, nursery=nursery) as swarm, ExitStack() as stack:
        if host_reduces:
            swarm.name_host("helper1", "donor1")
        helper = swarm.start("helper")
        swarm.rewrite(min_peers=honest + enemies)
        donor = swarm.start("donor", wait=False)
        trainers = [swarm.start("trainer", wait=False, samples_per_s=rate, measure_at=steps) for _ in range(honest)]
        for number in range(enemies):
            enemy = {"samples_per_s": rate, "from_step": from_step, "misbehaviour": misbehaviour}
            swarm.start("trainer", f"enemy{number + 1}", wait=False, **enemy)
        began_at = swarm.wait_for_common_step(trainers, FIRST_STEP, 120 + 20 * (honest + enemies))
        for _ in range(claims):
            stranger = open_dht(swarm.addresses, client_mode=True, reads_all=True)
            stack.callback(stranger.shutdown)
            forge_progress(stranger, swarm.settings.run_id, swarm.settings.last_epoch)
        before = [member.memory_bytes for member in (helper, *trainers)]
        ended_at = swarm.wait_for_common_step(trainers, steps, 60 + 30 * steps)
        grown = [member.memory_bytes - had for member, had in zip((helper, *trainers), before, strict=True)]
        down = [member.name for member in (helper, donor, *trainers) if not member.alive]
        assert not down, f"ended: {', '.join(down)}"
        losses = [
            event["heldout_loss"] for peer in trainers for event in peer.events("step") if "heldout_loss" in event
        ]
    return Outcome(losses, (ended_at - began_at) / (steps - FIRST_STEP), max(grown) / 1e6)
