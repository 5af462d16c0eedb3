"""A swarm in which a random member is killed every few seconds, for any time."""

import random
import time
from pathlib import Path

from tests.training.swarm.figures import agreement
from tests.training.swarm.harness import Member, Nursery, Swarm, wait_for

CHANCES = {"trainer": 0.7, "helper2": 0.15, "donor1": 0.15}
"""Roles of the killed members."""
PAUSE_S = (8.0, 25.0)
"""Seconds between two kills."""
ORPHAN_S = 10.0
TRAINERS = 3
LEAVE_S = 180.0
"""Seconds without kills at the end."""


def soak(folder: Path, seconds: float, *, seed: int = 0, nursery: Nursery | None = None) -> dict[str, object]:
    """Kill members at random and replace them; returns the swarm's statistics.

    The first helper is never killed and has its memory watched. AssertionError where a killed member leaves processes
    behind, or the swarm stops going.
    """
    rng = random.Random(seed)
    kills = {"all processes": 0, "main process": 0}
    with Swarm(folder, nursery=nursery) as swarm:
        trainers = swarm.start_usual(trainers=TRAINERS)
        standing = {"helper2": swarm.member("helper2"), "donor1": swarm.member("donor1")}
        watched = swarm.member("helper1")
        began_at, first_step = time.time(), max(trainer.step for trainer in trainers)
        memory: list[int] = []
        while time.time() < began_at + seconds:
            time.sleep(rng.uniform(*PAUSE_S))
            memory.append(watched.memory_bytes)
            who = rng.choices(list(CHANCES), list(CHANCES.values()))[0]
            place = rng.randrange(TRAINERS)
            victim = trainers[place] if who == "trainer" else standing[who]
            how = rng.choice(list(kills))
            (victim.kill if how == "all processes" else victim.kill_main)()
            kills[how] += 1
            wait_for(lambda victim=victim: not victim.processes, ORPHAN_S, f"the processes of {victim.name} to be gone")
            if who == "trainer":
                trainers[place] = swarm.start("trainer", samples_per_s=16)
            else:
                standing[who] = restart(swarm, victim)
        survivors = [member for member in trainers if member.alive]
        quiet_at = time.time()
        for member in survivors:
            member.wait(lambda member=member: member.step >= 0, LEAVE_S, "a first step")
        found = agreement(survivors, quiet_at, timeout_s=LEAVE_S)
        return {
            "minutes": round((time.time() - began_at) / 60, 1),
            "kills": kills,
            "steps": max(member.step for member in survivors) - first_step,
            "gave_up": sum(bool(member.events("failed")) for member in swarm.members),
            "trainers_alive": len(survivors),
            "memory_mb": [round(size / 1e6) for size in memory],
            **found,
        }


def restart(swarm: Swarm, member: Member) -> Member:
    """Restart a helper or donor with the same identity, as a host's supervisor does."""
    role = "helper" if member.name.startswith("helper") else "donor"
    (member.folder / "events.jsonl").unlink()
    swarm.members.remove(member)
    return swarm.start(role, name=member.name, addresses=swarm.addresses[:1])
