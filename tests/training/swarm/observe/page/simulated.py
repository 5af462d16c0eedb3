"""A simulated run, as large as a run may get, and its page."""

import math
import random
import time
from dataclasses import dataclass, field, replace

from tests.training.swarm.observe.test_overview import SETTINGS, record
from training.swarm.averaging.attestation import Credit
from training.swarm.host.checkpoints import Checkpoint
from training.swarm.observe.leaderboard import CONTRIBUTIONS, Leaderboard
from training.swarm.observe.overview import summarize
from training.swarm.observe.page.site import Site
from training.swarm.observe.peer_metrics import PeerRecords

ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
MARKUP = "<img src=x onerror=alert(1)>"


@dataclass
class Watcher:
    """A Monitor's interface to the page, without a swarm."""

    settings: object
    addresses: tuple = (ADDRESS,)
    credits: dict = field(default_factory=dict)
    public: dict = field(default_factory=dict)
    answered: bool = True

    def is_answered(self):
        return self.answered

    def fetch_public(self, name, start=0):
        return self.public.get(name)


def checkpoint(folder, step=100):
    return Checkpoint(folder=folder, step=step, run="run-1", heldout_loss=math.nan, saved_at=0.0, sha256={})


def settings_of(total_steps):
    """Settings of a run of a tiny model."""
    recipe = SETTINGS.recipe
    model = recipe.model_config(image_side=4, image_vocab_size=32, text_vocab_size=300).to_dict()
    recipe = replace(recipe, model=model, schedule=replace(recipe.schedule, total_steps=total_steps))
    return replace(SETTINGS, swarm=replace(SETTINGS.swarm, donors=("donor",)), recipe=recipe)


def open_site(tmp_path, steps=100, **options):
    """An empty Site."""
    return Site(tmp_path / "page", tmp_path / "out", Watcher(settings_of(steps)), on_notice=print, **options)


def refresh(site):
    """Have the page of a run without trainers written now."""
    site.due_s = 0.0
    site.poll(None, Leaderboard(site.history.path.with_name(CONTRIBUTIONS), "simulated"), PeerRecords({}, 0))


def simulate(tmp_path, *, peers=300, steps=30_000, liars=0, **options):
    """The Site of a run after `steps` steps of 10 s; liars claim a huge loss, speed and step, and give nothing."""
    site = open_site(tmp_path, steps + 1000, **options)
    watcher = site.watcher
    watcher.credits = {
        f"QmPeer{number:08}": Credit(samples=1000.0 * number, seconds=3600.0 * number, samples_per_s=4.0, time=1.0)
        for number in range(peers)
    }
    found = {"donor": record(role="donor", loss=2.1, step=steps)}
    for number in range(peers):
        one = record(step=steps, loss=2.0, samples=steps, user=f"volunteer {number}")
        found[f"QmPeer{number:08}"] = one.copy(update={"user": MARKUP}) if number == peers - 1 else one
    lies = {"step": 2**50, "loss": 1e15, "samples": 2**50, "samples_per_s": 1e12}
    found |= {f"QmLiar{number:08}": record(**lies, user=f"liar {number}") for number in range(liars)}
    records = PeerRecords(found, 0)
    overview = summarize(records, watcher.settings, 0.1, watcher.credits)
    chance, started = random.Random(0), time.time() - 10.0 * steps
    for step in range(1, steps, max(1, steps // 4000)):
        loss = 2 + 4 * math.exp(-6 * step / steps) + chance.uniform(0, 0.02)
        present = 1 + int((peers - 1) * math.sin(math.pi * step / steps) ** 2)
        seen = replace(overview, step=step, loss=loss, heldout_loss=loss + 0.1, peers=present)
        site.history.add(seen, watcher.settings.run_id, now=started + 10.0 * step)
    board = Leaderboard(tmp_path / "out" / CONTRIBUTIONS, "simulated")
    board.update(records.by_peer, watcher.credits)
    site.poll(overview, board, records)
    return site
