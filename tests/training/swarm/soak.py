"""A swarm in which somebody is killed every few seconds, for as long as one likes."""

import random
import time
from pathlib import Path

from tests.training.swarm.figures import agreement
from tests.training.swarm.harness import Member, Nursery, Swarm, wait_for

CHANCES = {"trainer": 0.7, "helper2": 0.15, "donor1": 0.15}
"""Who is killed."""
PAUSE_S = (8.0, 25.0)
"""Between two kills."""
ORPHAN_S = 10.0
TRAINERS = 3
LEAVE_S = 180.0
"""At the end nobody is killed for so long."""


def soak(folder: Path, seconds: float, *, seed: int = 0, nursery: Nursery | None = None) -> dict[str, object]:
    """Kill members at random, start others in their place; returns what became of the swarm.

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
    """The same helper or donor again, with its identity, as the supervisor of a host does."""
    role = "helper" if member.name.startswith("helper") else "donor"
    (member.folder / "events.jsonl").unlink()
    swarm.members.remove(member)
    return swarm.start(role, name=member.name, addresses=swarm.addresses[:1])
