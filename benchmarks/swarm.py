"""What does training together cost and gain? `python -m benchmarks.swarm QUESTION`, from a checkout.

All figures are from real peers, in processes of their own on loopback, started by tests/training/swarm/harness.py.

- bytes: what three listening peers send each other in all-reduce messages, per step and per sample, in each mode. A
  round of DiLoCo is measured with few inner steps, on which its bytes do not depend, and counted for the default.
- speed: samples/s of 1, 2 and 4 peers that compute at a fixed rate, mostly sleeping, so that two cores suffice for all;
  a step lasts five times the matchmaking.
- loss: held-out loss of one machine and of swarms after the same number of samples, on the shards of --shards.
- soak: a swarm whose members are killed at random for --minutes.
- rules: held-out loss and seconds per step of honest trainers (--honest) by each aggregation rule, in turns.
- arena: held-out loss, seconds per step and memory of honest trainers beside each kind of attackers (--honest,
  --enemies), with a run without attackers before every fifth.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.report import Column, make_parser, print_figures, print_json
from dalle_lean.errors import UserError
from dalle_lean.terminal import notice
from training.swarm.config import AGGREGATIONS, TimingSection, WireSection

try:
    from tests.training.swarm.arena import ATTACKS, fight
    from tests.training.swarm.harness import Member, Nursery, Swarm
    from tests.training.swarm.soak import soak
except ModuleNotFoundError:
    sys.exit("benchmarks.swarm starts the peers of the tests: run it in a checkout of the repository")

GRADIENTS = {
    "fp32": WireSection(compression="fp32"),
    "fp16": WireSection(compression="fp16"),
    "8bit": WireSection(compression="8bit"),
    "8bit, weights every 5 steps": WireSection(compression="8bit", average_state_every=5),
    "PowerSGD, rank 4": WireSection(compression="8bit", power_sgd_rank=4),
}
DILOCO = WireSection(mode="diloco", compression="8bit", delayed=False)
TIMING = TimingSection(
    matchmaking_time_s=2.0,
    request_timeout_s=1.5,
    averaging_timeout_s=30.0,
    next_chunk_timeout_s=8.0,
    load_state_timeout_s=30.0,
    progress_expiration_s=20.0,
)
RECIPE = """
[model]
text_len = 12
hidden_size = {width}
num_layers = 4
num_heads = {heads}
head_size = 64
ffn_multiplier = 4
shared_blocks = 1
attention_pattern = ["row"]

[optimizer]
name = "lamb"

[data]
text_vocab_size = 320
heldout_share = 0.1
heldout_samples = 64
"""
"""99 % of the weights are in tensors large enough for 8 bits, at either width."""
PEERS = 3
INNER_STEPS = 50

Figures = dict[str, Any]


def main() -> None:
    """Answer one question: measure, print the table and the JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("question", choices=("bytes", "speed", "loss", "soak", "rules", "arena"))
    parser.add_argument("--shards", type=Path, help="for loss: a folder of preprocessed shards")
    parser.add_argument("--modes", nargs="*", help="for bytes, loss and rules: only these")
    parser.add_argument("--steps", type=int, default=60, help="for loss: steps of 128 samples (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=30, help="for soak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for soak (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="for rules (default: %(default)s)")
    parser.add_argument("--attacks", nargs="*", help="for arena: only these")
    parser.add_argument("--honest", type=int, default=3, help="trainers for rules and arena (default: %(default)s)")
    parser.add_argument("--enemies", type=int, default=1, help="for arena (default: %(default)s)")
    options = parser.parse_args()
    questions: dict[str, Callable[[Path, Nursery], Figures]] = {
        "bytes": lambda folder, nursery: measure_bytes(folder, nursery, options.modes),
        "speed": measure_speed,
        "loss": lambda folder, nursery: measure_loss(folder, nursery, options.modes, options.steps, options.shards),
        "soak": lambda folder, nursery: measure_soak(folder, nursery, options.minutes, options.seed),
        "rules": lambda folder, nursery: measure_rules(folder, nursery, options.modes, options.honest, options.turns),
        "arena": lambda folder, nursery: measure_arena(
            folder, nursery, options.attacks, options.honest, options.enemies
        ),
    }
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        nursery = Nursery()
        try:
            figures = questions[options.question](Path(folder), nursery)
        except UserError as mistake:
            parser.error(str(mistake))
        finally:
            nursery.close()
    print_json(f"swarm_{options.question}", {**figures, "load_average": [load_average, os.getloadavg()[0]]})


def start_trainers(swarm: Swarm, count: int, **spec: Any) -> list[Member]:
    """Start listening trainers, the first of them known to the others; returns once all have made a step."""
    swarm.rewrite(min_peers=count)
    trainers = [swarm.start("trainer", **spec)]
    swarm.addresses += trainers[0].last("here")["addresses"][:1]
    trainers += [swarm.start("trainer", wait=False, **spec) for _ in range(count - 1)]
    swarm.wait_for_common_step(trainers, 1, 180)
    return trainers


def measure_bytes(folder: Path, nursery: Nursery, modes: Sequence[str] | None) -> Figures:
    """Bytes per step and sample, by mode."""
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(width=256, heads=4))
    batch_size, inner_steps, steps = 96, 2, 5
    settings = {"recipe": str(recipe), "batch_size": batch_size, "nursery": nursery, "timing": TIMING}
    lines: list[Figures] = []
    for name, wire in chosen({**GRADIENTS, "DiLoCo, 8bit": replace(DILOCO, inner_steps=inner_steps)}, modes).items():
        notice(f"bytes: {name}")
        with Swarm(folder / f"bytes-{len(lines)}", wire=wire, **settings) as swarm:
            trainers = start_trainers(swarm, PEERS, samples_per_s=12, batch_size=4)
            swarm.wait_for_common_step(trainers, 3 + steps, 240)
            step_bytes = sum(sent_bytes(trainer, 3 + steps) - sent_bytes(trainer, 3) for trainer in trainers) / steps
            parameters = trainers[0].parameters(max(trainers[0].steps_kept())).size
            solo_steps = sum(trainer.last("step")["solo_steps"] for trainer in trainers)
        lines.append(
            {
                "mode": name,
                "parameters": parameters,
                "bytes_per_peer_and_step": step_bytes / PEERS,
                "in_fp32_models": step_bytes / PEERS / (4 * parameters),
                "bytes_per_sample": step_bytes / batch_size / (INNER_STEPS if wire.mode == "diloco" else 1),
                "solo_steps": solo_steps,
            }
        )
    first = lines[0]
    for line in lines:
        line["less_than_fp32_per_step"] = first["bytes_per_peer_and_step"] / line["bytes_per_peer_and_step"]
        line["less_than_fp32_per_sample"] = first["bytes_per_sample"] / line["bytes_per_sample"]
    columns = (
        Column("mode", "mode"),
        Column("MB per peer and step", "bytes_per_peer_and_step", ".2f", 1e6),
        Column("in fp32 models", "in_fp32_models", ".2f"),
        Column("bytes per sample", "bytes_per_sample", ",.0f"),
        Column(f"fewer than {first['mode']}, per sample", "less_than_fp32_per_sample", ".1f"),
    )
    print_figures(lines, columns)
    return {"peers": PEERS, "batch_size": batch_size, "inner_steps": INNER_STEPS, "modes": lines}


def sent_bytes(trainer: Member, step: int) -> int:
    """All-reduce bytes that a trainer had sent when it began a step."""
    return next(event["sent_bytes"] for event in trainer.events("step") if event["epoch"] >= step)


def measure_speed(folder: Path, nursery: Nursery) -> Figures:
    """Samples per second of peers that compute at a fixed rate."""
    rate, steps, step_s = 16.0, 5, 5 * TIMING.matchmaking_time_s
    lines: list[Figures] = []
    for peers in (1, 2, 4):
        notice(f"speed: {peers} peers")
        target = round(peers * rate * step_s)
        with Swarm(folder / f"speed-{peers}", timing=TIMING, batch_size=target, nursery=nursery) as swarm:
            trainers = start_trainers(swarm, peers, samples_per_s=rate, batch_size=8)
            began_at = swarm.wait_for_common_step(trainers, 2, 120)
            ended_at = swarm.wait_for_common_step(trainers, 2 + steps, 60 + 3 * steps * step_s)
        lines.append({"peers": peers, "samples_per_s": steps * target / (ended_at - began_at)})
    for line in lines:
        line["of_the_sum"] = line["samples_per_s"] / (line["peers"] * rate)
        line["of_one_times_peers"] = line["samples_per_s"] / (line["peers"] * lines[0]["samples_per_s"])
    columns = (
        Column("peers", "peers"),
        Column("samples/s", "samples_per_s", ".1f"),
        Column("of what they compute", "of_the_sum", ".0%"),
        Column("of that many times one", "of_one_times_peers", ".0%"),
    )
    print_figures(lines, columns)
    return {"rate_per_peer": rate, "step_s": step_s, "matchmaking_s": TIMING.matchmaking_time_s, "peers": lines}


def measure_loss(
    folder: Path, nursery: Nursery, names: Sequence[str] | None, steps: int, shards: Path | None
) -> Figures:
    """Held-out loss at the end, with the same data and number of samples for all."""
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(width=128, heads=2))  # computes faster than 48 samples/s
    batch_size, inner_steps = 128, max(2, steps // 6)
    modes: dict[str, tuple[int, WireSection]] = {
        "one machine": (1, WireSection(compression="fp32")),
        **{name: (2, GRADIENTS[name]) for name in ("fp32", "8bit", "PowerSGD, rank 4")},
        "DiLoCo, 8bit": (2, replace(DILOCO, inner_steps=inner_steps)),
    }
    lines: list[Figures] = []
    for name, (peers, wire) in chosen(modes, names).items():
        notice(f"loss: {name}")
        # A delayed step enters the weights with the next one.
        last = -(-steps // inner_steps) if wire.mode == "diloco" else steps + wire.delayed
        started = time.time()
        with Swarm(
            folder / f"loss-{len(lines)}",
            wire=wire,
            timing=TIMING,
            recipe=str(recipe),
            batch_size=batch_size,
            total_steps=steps + 2,
            warmup_steps=max(1, steps // 10),
            shards=shards,
            nursery=nursery,
        ) as swarm:
            trainers = start_trainers(swarm, peers, batch_size=16, samples_per_s=48 / peers, measure_at=last)
            swarm.wait_for_common_step(trainers, last, 60 + 30 * last)
            ends = [next(e for e in t.events("step") if e["epoch"] >= last) for t in trainers]
        lines.append(
            {
                "way": name,
                "heldout_loss": mean(end["heldout_loss"] for end in ends),
                "peers": peers,
                "samples": sum(end["samples"] for end in ends),
                "solo_steps": sum(end["solo_steps"] for end in ends),
                "seconds": time.time() - started,
            }
        )
    for line in lines:
        line["worse_than_first"] = line["heldout_loss"] / lines[0]["heldout_loss"] - 1
    columns = (
        Column("way", "way"),
        Column("held-out loss", "heldout_loss", ".4f"),
        Column(f"against {lines[0]['way']}", "worse_than_first", "+.2%"),
        Column("samples", "samples", ","),
        Column("steps with own gradients alone", "solo_steps"),
    )
    print_figures(lines, columns)
    return {"steps": steps, "batch_size": batch_size, "inner_steps": inner_steps, "ways": lines}


def measure_soak(folder: Path, nursery: Nursery, minutes: float, seed: int) -> Figures:
    """How a swarm fares whose members are killed at random."""
    figures = soak(folder / "soak", 60 * minutes, seed=seed, nursery=nursery)
    memory = figures["memory_mb"]
    line = {**figures, "kills": sum(figures["kills"].values())}
    line["memory"] = f"{memory[0]}, {min(memory)}, {max(memory)}, {memory[-1]}"
    columns = (
        Column("minutes", "minutes"),
        Column("kills", "kills"),
        Column("steps", "steps"),
        Column("trainers that gave up", "gave_up"),
        Column("memory of a helper, first, least, most, last, MB", "memory"),
    )
    print_figures([line], columns)
    return figures


def measure_rules(folder: Path, nursery: Nursery, names: Sequence[str] | None, honest: int, turns: int) -> Figures:
    """What each aggregation rule costs where nobody lies, in turns."""
    rules = chosen({name: WireSection(aggregation=name) for name in AGGREGATIONS}, names)
    found: dict[str, list[Any]] = {name: [] for name in rules}
    for turn in range(turns):
        for name, wire in rules.items():
            notice(f"rules: {name}, turn {turn + 1} of {turns}")
            found[name].append(fight(folder / f"{name}-{turn}", nursery, honest=honest, enemies=0, wire=wire))
    lines: list[Figures] = []
    for name, fights in found.items():
        losses, steps_s = [mean(one.heldout_losses) for one in fights], [one.step_s for one in fights]
        lines.append({"rule": name, "heldout_losses": losses, "steps_s": steps_s})
        lines[-1] |= {"heldout_loss": median(losses), "step_s": median(steps_s)}
    columns = (
        Column("rule", "rule"),
        Column("held-out loss, median of the turns", "heldout_loss", ".4f"),
        Column("s a step, median", "step_s", ".2f"),
    )
    print_figures(lines, columns)
    return {"honest": honest, "rules": lines}


def measure_arena(folder: Path, nursery: Nursery, names: Sequence[str] | None, honest: int, enemies: int) -> Figures:
    """What each attack costs the honest trainers. Every fifth follows a run without, since a machine's speed varies."""
    attacks = list(chosen(ATTACKS, names).items())
    lines: list[Figures] = []
    for number, (name, attack) in enumerate(attacks):
        turns = [("nobody lies", {})] if number % 5 == 0 else []
        for way, spec in (*turns, (name, attack)):
            notice(f"arena: {way}")
            try:
                found = fight(folder / f"arena-{len(lines)}", nursery, honest=honest, enemies=enemies, **spec)
            except AssertionError as failure:
                lines.append({"attack": way, "failure": str(failure).splitlines()[0]})
                continue
            lines.append({"attack": way, **found._asdict()})
            lines[-1]["heldout_loss"] = max(found.heldout_losses)
            clean = [line for line in lines if line["attack"] == "nobody lies" and "step_s" in line]
            if clean:
                losses = [loss for line in clean for loss in line["heldout_losses"]]
                lines[-1]["loss_share"] = lines[-1]["heldout_loss"] / median(losses) - 1
                lines[-1]["times_as_long"] = found.step_s / mean(line["step_s"] for line in clean)
            notice(str(lines[-1]))
    columns = (
        Column("attack", "attack"),
        Column("worst held-out loss", "heldout_loss", ".3f"),
        Column("against nobody", "loss_share", "+.1%"),
        Column("s a step", "step_s", ".1f"),
        Column("times as long", "times_as_long", ".2f"),
        Column("memory grown, MB", "grown_mb", ".0f"),
        Column("failure", "failure"),
    )
    print_figures(lines, columns)
    return {"honest": honest, "enemies": enemies, "attacks": lines}


def chosen(modes: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """The modes with these names, all without names, in the same order; UserError for an unknown name."""
    if unknown := set(names or ()) - set(modes):
        raise UserError(f"{', '.join(sorted(unknown))}: choose from {', '.join(modes)}")
    return {name: mode for name, mode in modes.items() if not names or name in names}


if __name__ == "__main__":
    main()
