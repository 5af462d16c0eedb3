"""Writes the folder of the run's page: static files for any web server, of which run.json and the pictures change."""

import importlib.util
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json, write_bytes, write_json
from dalle_lean.progress import OnNotice
from training.swarm.averaging.attestation import Credit
from training.swarm.host.checkpoints import Checkpoint, newest_checkpoint
from training.swarm.network.bootstrap_service import PUBLIC, read_chunk
from training.swarm.observe.leaderboard import Contributor, Leaderboard
from training.swarm.observe.monitor import Monitor
from training.swarm.observe.overview import Overview, run_state
from training.swarm.observe.page import gallery, model_file, words
from training.swarm.observe.page.gallery import Gallery, Painter
from training.swarm.observe.page.history import History
from training.swarm.observe.page.model_file import Download
from training.swarm.observe.page.prompt_page import PATH, PromptPage
from training.swarm.observe.peer_metrics import PeerRecord, PeerRecords
from training.swarm.preflight.batch_size import memory_needed, state_bytes

HERE = Path(__file__).parent
NOTEBOOK = "join.ipynb"
REFRESH_S = 60.0
SHOWN_PEERS = 100
BOKEH = ("bokeh", "bokeh-api")
PAGE_FILES = ("index.html", "page.css", "page.js")


class Site:
    """Keeps the folder of the run's page up to date.

    Args:
        folder: of the page; it must hold nothing else.
        out: where the history is saved.
        run_dir: the run's folder if this machine hosts it; the page then offers its checkpoints and draws with them.
        prompt_page: the address of a prompt page to link to, or a local one that the page's server forwards to.
    """

    def __init__(
        self,
        folder: Path,
        out: Path,
        watcher: Monitor,
        *,
        run_dir: Path | None = None,
        prompt_page: str | PromptPage | None = None,
        on_notice: OnNotice,
    ):
        self.folder, self.watcher, self.run_dir, self.prompt_page = folder, watcher, run_dir, prompt_page
        self.on_notice = on_notice
        files = {name: HERE / name for name in PAGE_FILES} | {f"{name}.js": bokeh_file(name) for name in BOKEH}
        found = {path.name for path in folder.iterdir() if not path.name.endswith(".tmp")} if folder.is_dir() else set()
        if not (found <= {*files, NOTEBOOK} or "run.json" in found):  # the former if a page was ended at once
            raise UserError(f"{folder} is not empty and holds no run's page; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for name, file in files.items():
            write_bytes(folder / name, file.read_bytes())
        self.addresses = watcher.settings.swarm.addresses or watcher.addresses
        copy_notebook(folder / NOTEBOOK, self.addresses)
        settings, memory = watcher.settings, watcher.settings.recipe.memory
        self.needs = {  # of a newcomer, for one sample at once
            "download_bytes": state_bytes(settings),
            "ram_bytes": memory_needed(settings, replace(memory, precision="fp32"), 1, "cpu").ram_bytes,
            "gpu_bytes": memory_needed(settings, replace(memory, fused_attention=False), 1, "cuda").device_bytes,
        }
        self.history = History(out / "history.json")
        self.download: Download | None = None
        self.wanted_pictures: Sequence[str] = ()
        """Those of the latest gallery, fetched or not."""
        self.named = self.changing_files()
        """The pictures and the model that the latest run.json names, at first all that are there."""
        self.packed: tuple[int, float] | None = None
        """The step of the latest checkpoint that is packed, or damaged."""
        self.unpacked_step: int | None = None
        """The step of the latest checkpoint that could not be packed."""
        self.due_s = -math.inf
        self.latest: tuple[Overview | None, Leaderboard, PeerRecords] | None = None
        self.painter = None
        if run_dir is not None:
            self.painter = Painter(run_dir / PUBLIC, out / "drawing", self.prompts, on_notice)

    def prompts(self) -> list[str]:
        """The run's fixed prompts; none, with a notice, if this machine cannot read the data."""
        try:
            return gallery.heldout_prompts(self.watcher.settings)
        except (ValueError, OSError) as error:
            self.on_notice(f"no pictures on the page: {error}")
            return []

    def poll(self, overview: Overview | None, board: Leaderboard, records: PeerRecords) -> None:
        """Add the run's state to the history; every REFRESH_S, update the folder and what this machine makes for it:
        pictures, the packed model, the prompt page."""
        if overview is not None:
            self.history.add(overview, self.watcher.settings.run_id)
        self.latest = overview, board, records
        if time.monotonic() < self.due_s:
            return
        self.due_s = time.monotonic() + REFRESH_S
        newest = self.newest_checkpoint()
        if self.painter is not None:
            self.painter.poll(newest)
        if isinstance(self.prompt_page, PromptPage):
            self.prompt_page.poll(newest)
        self.pack(newest)
        self.write(overview, board, records)

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest of the run's folder; None before the first, and on other machines than the host's."""
        return None if self.run_dir is None else newest_checkpoint(self.run_dir)

    def pack(self, newest: Checkpoint | None) -> None:
        """Pack a checkpoint for the page, unless it is packed or damaged; why it cannot be is reported once."""
        if self.run_dir is None or newest is None or (newest.step, newest.saved_at) == self.packed:
            return
        try:
            model_file.pack(newest, self.run_dir / PUBLIC)
        except OSError as error:  # the disk may be full: the next refresh tries again
            if newest.step != self.unpacked_step:
                self.on_notice(f"the checkpoint of step {newest.step} is not on the page yet: {error}")
            self.unpacked_step = newest.step
            return
        except ValueError as error:
            self.on_notice(f"the checkpoint of step {newest.step} stays off the page: {error}")
        self.packed = newest.step, newest.saved_at

    def state(self, overview: Overview | None) -> str:
        """The `run_state`."""
        settings, newest, history = self.watcher.settings, self.newest_checkpoint(), self.history
        # The last trainers leave at once: the final step may only be seen in its checkpoint.
        steps = [] if newest is None else [newest.step]
        steps += [history.host_step] if history.run_id == settings.run_id else []
        return run_state(overview, max(steps, default=0), settings.total_steps, self.watcher.is_answered)

    def write(self, overview: Overview | None, board: Leaderboard, records: PeerRecords) -> None:
        """Write run.json, with the files that it names."""
        prompt_page, pictures = self.prompt_page, self.pictures()
        if isinstance(prompt_page, PromptPage):
            prompt_page = None if prompt_page.url is None else f"{PATH}/"
        self.download = self.newest_download()
        settings = self.watcher.settings
        ranked, credits = board.ranked(), self.watcher.credits
        shown = {
            "run": board.run,
            "updated": time.time(),
            "state": self.state(overview),
            "total_steps": settings.total_steps,
            "overview": overview and asdict(overview),
            "history": self.history.columns(),
            "peers": [
                row(peer, contributor, credits.get(peer, Credit()), records.present(peer))
                for peer, contributor in ranked[:SHOWN_PEERS]
            ],
            "peers_in_all": len(ranked),
            "samples_in_all": sum(contributor.averaged_samples for _, contributor in ranked),
            "claimed_in_all": sum(contributor.total_samples for _, contributor in ranked),
            "attested": bool(credits),  # whether helpers report what they averaged
            "join": settings.swarm.join_arguments(self.addresses, is_public=True),
            "admission": settings.swarm.admission,
            "method": [words.how_it_trains(settings), words.what_it_trains(settings)],
            "security": words.security(settings),
            "needs": self.needs,
            "gallery": asdict(pictures),
            "checkpoint": self.download and asdict(self.download),
            "prompt_page": prompt_page,  # an address, possibly relative to the page
        }
        self.history.save()
        write_bytes(self.folder / "run.json", json.dumps(shown, separators=(",", ":")).encode())
        named = {*self.wanted_pictures, *([] if self.download is None else [self.download.file])}
        for name in self.changing_files() - named - self.named:  # open tabs still show the previous run.json
            (self.folder / name).unlink()
        self.named = named

    def changing_files(self) -> set[str]:
        """The names of the pictures and models in the page's folder."""
        return {path.name for pattern in ("drawn-*.webp", "model-step-*.zip") for path in self.folder.glob(pattern)}

    def pictures(self) -> Gallery:
        """The gallery, with its pictures fetched into the page's folder."""
        content = self.public(gallery.NAME)
        try:
            wanted = Gallery.parse((content or b"{}").decode())
        except ValueError:  # none yet, or malformed
            wanted = Gallery()
        self.wanted_pictures = wanted.files
        return gallery.mirror(self.folder, wanted, self.public)

    def newest_download(self) -> Download | None:
        """The newest model that is complete in the page's folder; None before the first."""
        content = self.public(model_file.NAME)
        try:
            wanted = Download.parse((content or b"").decode())
        except ValueError:  # none yet, or malformed
            return self.download
        return model_file.mirror(self.folder, wanted, self.download, self.public, self.on_notice)

    def public(self, name: str, start: int = 0) -> bytes | None:
        """A chunk of a public file of the run; None if there is none."""
        if self.run_dir is None:
            return self.watcher.fetch_public(name, start)
        path = self.run_dir / PUBLIC / name
        return read_chunk(path, start) if path.exists() else None

    def close(self) -> None:
        """End what draws; on the host's machine also write the folder a last time, since the run may have ended."""
        if self.painter is not None:
            self.painter.close()
        if isinstance(self.prompt_page, PromptPage):
            self.prompt_page.close()
        if self.run_dir is None or self.latest is None:
            return
        overview, board, records = self.latest
        if not self.watcher.is_answered():
            overview, records = None, PeerRecords({}, 0)
        self.write(overview, board, records)  # before packing, which may be cut off
        self.pack(self.newest_checkpoint())
        self.write(overview, board, records)


def row(peer: str, contributor: Contributor, credit: Credit, record: PeerRecord | None) -> dict[str, Any]:
    """A peer's row on the leaderboard; `samples`, `hours` and `samples_per_s` are attested by helpers."""
    return {
        "peer": peer,
        "name": contributor.user,
        "samples": contributor.averaged_samples,
        "hours": contributor.averaged_s / 3600,
        "samples_per_s": credit.samples_per_s,
        "claimed_samples": contributor.total_samples,
        "claimed_samples_per_s": 0.0 if record is None else record.samples_per_s,
        "present": record is not None,
    }


def bokeh_file(name: str) -> Path:
    """A script of Bokeh from Gradio's package, so that the page loads nothing from other hosts."""
    spec = importlib.util.find_spec("gradio")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    found = [path for place in places for path in place.glob(f"templates/frontend/static/bokeh/*/{name}-[0-9]*.min.js")]
    if not found:
        raise UserError("the run's page needs the plots of Gradio; install it with: pip install 'dalle-lean[demo]'")
    return found[0]


def copy_notebook(target: Path, addresses: Sequence[str]) -> None:
    """notebooks/join.ipynb with the run's addresses filled in."""
    checkout = HERE.parents[3] / "notebooks" / NOTEBOOK
    notebook = read_json(checkout if checkout.exists() else HERE / NOTEBOOK)  # an installed package has it here
    empty = 'ADDRESS = ""'
    filled = f"ADDRESS = {json.dumps(' '.join(addresses))}"
    for cell in notebook["cells"]:
        cell["source"] = [line.replace(empty, filled) for line in cell["source"]]
    write_json(target, notebook)
