"""The folder of the run's page."""

import json
import shutil
import tomllib
import urllib.request
import zipfile
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import pytest

pytest.importorskip("hivemind")
pytest.importorskip("gradio")

from dalle_lean.io.files import sha256_file
from dalle_lean.tokenizer import Tokenizer
from tests.training.swarm.observe.page.simulated import ADDRESS, open_site, refresh, settings_of, simulate
from tests.training.swarm.observe.test_overview import record
from training.swarm.averaging.attestation import Credit
from training.swarm.host.checkpoints import Checkpoints, newest_checkpoint
from training.swarm.host.host_config import HostConfig
from training.swarm.observe.leaderboard import CONTRIBUTIONS, Leaderboard
from training.swarm.observe.overview import summarize
from training.swarm.observe.page import site as pages
from training.swarm.observe.page.gallery import Drawn, Gallery
from training.swarm.observe.page.model_file import Download
from training.swarm.observe.page.server import served
from training.swarm.observe.page.site import SHOWN_PEERS
from training.swarm.observe.peer_metrics import PeerRecords
from training.swarm.peer.gradient_worker import build_model

ROOT = Path(__file__).parents[5]


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run that is hosted here, without checkpoints."""
    folder = tmp_path / "run"
    folder.mkdir()
    Tokenizer.train(["a red heart"], 300).save(folder / "tokenizer.json")
    return folder


def save(run_dir, step):
    """A checkpoint of this step, which it writes."""
    settings = settings_of(100)
    Checkpoints(run_dir, settings, HostConfig(ports={}), print).save(step, build_model(settings), [], 2.0)
    return newest_checkpoint(run_dir)


def shown(site):
    return json.loads((site.folder / "run.json").read_text())


def test_the_page_of_a_large_run_is_small(tmp_path):
    site = simulate(tmp_path)
    assert (site.folder / "run.json").stat().st_size < 150_000
    run = shown(site)
    assert (run["overview"]["step"], run["overview"]["peers"], run["overview"]["heldout_loss"]) == (30_000, 300, 2.1)
    assert len(run["peers"]) == SHOWN_PEERS
    assert run["peers"][0]["samples"] == 299_000
    assert run["peers"][0]["hours"] == 299
    assert run["join"] == ADDRESS


def test_as_many_liars_as_volunteers_change_neither_the_numbers_nor_the_first_places(tmp_path):
    run = shown(simulate(tmp_path, peers=50, steps=100, liars=50))
    assert (run["overview"]["step"], run["overview"]["loss"], run["overview"]["peers"]) == (100, 2.0, 50)
    assert run["overview"]["samples_per_s"] == pytest.approx(6.4)
    assert max(run["history"]["loss"]) < 7
    liar = next(peer for peer in run["peers"] if peer["peer"].startswith("QmLiar"))
    assert (liar["samples"], liar["hours"]) == (0, 0)
    assert [peer["samples"] for peer in run["peers"][:49]] == [1000.0 * number for number in range(49, 0, -1)]


def test_the_notebook_is_in_the_package_too():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    installed = (pages.HERE / pages.NOTEBOOK).relative_to(ROOT)
    assert wheel["force-include"]["notebooks/join.ipynb"] == str(installed)


def test_an_installed_package_finds_its_own_notebook(tmp_path, monkeypatch):
    installed = tmp_path / "site-packages/training/swarm/observe/page"
    installed.mkdir(parents=True)
    shutil.copy(ROOT / "notebooks/join.ipynb", installed)
    monkeypatch.setattr(pages, "HERE", installed)
    pages.copy_notebook(tmp_path / "join.ipynb", [ADDRESS])
    assert f'ADDRESS = \\"{ADDRESS}\\"' in (tmp_path / "join.ipynb").read_text()


def test_the_notebook_has_the_addresses_of_all_helpers(tmp_path):
    pages.copy_notebook(tmp_path / "join.ipynb", [ADDRESS, ADDRESS[:-1] + "M"])
    cells = json.loads((tmp_path / "join.ipynb").read_text())["cells"]
    [line] = [line for cell in cells for line in cell["source"] if line.startswith("ADDRESS = ")]
    assert line.startswith(f'ADDRESS = "{ADDRESS} {ADDRESS[:-1]}M"  # ')


@pytest.mark.parametrize("ip", ["203.0.113.5", "127.0.0.1"])
def test_the_page_tells_nobody_in_which_folder_of_the_host_anything_is(tmp_path, run_dir, ip):
    save(run_dir, 3)
    site = open_site(tmp_path, run_dir=run_dir)
    site.addresses, data = (ADDRESS.replace("203.0.113.5", ip),), tmp_path / "private/shards"
    swarm = replace(site.watcher.settings.swarm, data=str(data))
    site.watcher.settings = replace(site.watcher.settings, swarm=swarm)
    refresh(site)
    site.close()
    assert shown(site)["join"] == f"{site.addresses[0]} --data COPY"
    assert shown(site)["checkpoint"]
    for path in site.folder.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path
    with zipfile.ZipFile(site.folder / shown(site)["checkpoint"]["file"]) as archive:
        for name in archive.namelist():
            assert str(tmp_path).encode() not in archive.read(name), name


def test_the_newest_checkpoint_can_be_downloaded_with_its_hash(tmp_path, run_dir):
    site = open_site(tmp_path, run_dir=run_dir)
    for step in (3, 6):
        save(run_dir, step)
        refresh(site)
    site.close()
    path, run = site.folder / "model-step-000006.zip", shown(site)
    assert run["checkpoint"] == {
        "step": 6,
        "file": path.name,
        "size_bytes": path.stat().st_size,
        "sha256": sha256_file(path),
    }
    with zipfile.ZipFile(path) as archive:
        assert {"model-step-000006/config.json", "model-step-000006/model.safetensors"} <= set(archive.namelist())


def test_a_checkpoint_that_met_a_full_disk_is_on_the_page_once_there_is_room(tmp_path, run_dir, monkeypatch):
    notices = []
    save(run_dir, 3)
    site = open_site(tmp_path, run_dir=run_dir)
    site.on_notice = notices.append
    usage = shutil.disk_usage(run_dir)
    monkeypatch.setattr(pages.model_file.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(pages.model_file, "atomic_write", pytest.fail)
    for _ in range(2):
        refresh(site)
    assert shown(site)["checkpoint"] is None
    monkeypatch.undo()
    site.close()
    assert shown(site)["checkpoint"]["step"] == 3
    assert [notice for notice in notices if "page" in notice] == [
        "the checkpoint of step 3 is not on the page yet: [Errno 28] No space left on device"
    ]


def test_a_damaged_checkpoint_is_not_read_at_every_refresh_and_the_next_one_is_on_the_page(
    tmp_path, run_dir, monkeypatch
):
    notices, first = [], save(run_dir, 3)
    (first.folder / "model/model.safetensors").write_bytes(b"")
    site = open_site(tmp_path, run_dir=run_dir)
    site.on_notice = notices.append
    site.pack(first)
    monkeypatch.setattr(pages.model_file, "pack", pytest.fail)
    site.pack(first)
    monkeypatch.undo()
    [notice] = [notice for notice in notices if "page" in notice]
    assert notice.startswith("the checkpoint of step 3 stays off the page: ")
    save(run_dir, 6)
    site.close()
    refresh(site)
    assert shown(site)["checkpoint"]["step"] == 6


def test_a_page_elsewhere_hands_out_what_the_host_packed(tmp_path, run_dir):
    save(run_dir, 3)
    host = open_site(tmp_path / "host", run_dir=run_dir)
    refresh(host)
    host.close()
    elsewhere = open_site(tmp_path / "elsewhere")
    elsewhere.watcher.public = {path.name: path.read_bytes() for path in (run_dir / "public").iterdir()}
    refresh(elsewhere)
    assert shown(host)["checkpoint"]
    assert shown(elsewhere)["checkpoint"] == shown(host)["checkpoint"]
    name = "model-step-000003.zip"
    assert (elsewhere.folder / name).read_bytes() == (host.folder / name).read_bytes()


@pytest.mark.parametrize(
    ("saved_step", "answered", "state"),
    [(3, False, "no answer"), (3, True, "no trainers"), (100, False, "finished"), (100, True, "finished")],
)
def test_a_page_says_how_its_run_ended_though_the_last_step_was_only_saved(
    tmp_path, run_dir, saved_step, answered, state
):
    site = open_site(tmp_path, run_dir=run_dir)
    refresh(site)
    assert shown(site)["state"] == "no trainers"
    save(run_dir, saved_step)
    site.watcher.answered = answered
    site.close()
    run = shown(site)
    assert (run["state"], run["total_steps"], run["checkpoint"]["step"]) == (state, 100, saved_step)


def test_a_page_elsewhere_knows_from_the_last_step_seen_that_its_run_has_finished(tmp_path):
    site = simulate(tmp_path, peers=3, steps=10)
    assert shown(site)["state"] == "training"
    site.watcher.answered = False
    refresh(site)
    assert shown(site)["state"] == "no answer"
    for host_step, state in ((1009, "no answer"), (1010, "finished")):
        found = {"a": record(step=1010), "donor": record(role="donor", step=host_step)}
        last = summarize(PeerRecords(found, 0), site.watcher.settings, 0.1, {"a": Credit(samples=1.0)})
        assert last.step == 1010
        site.history.add(last, site.watcher.settings.run_id)
        refresh(site)
        assert shown(site)["state"] == state
    site.close()
    again = open_site(tmp_path, 1010)
    again.watcher.answered = False
    refresh(again)
    assert shown(again)["state"] == "finished"


def test_a_run_whose_trainers_are_done_is_not_finished_before_its_host_is(tmp_path, run_dir):
    save(run_dir, 53)
    site = open_site(tmp_path, run_dir=run_dir)
    found = {"a": record(step=100), "donor": record(role="donor", step=53)}
    records = PeerRecords(found, 0)
    last = summarize(records, site.watcher.settings, 0.1, {"a": Credit(samples=1.0)})
    board = Leaderboard(tmp_path / "out" / CONTRIBUTIONS, "simulated")
    site.poll(last, board, records)
    assert (shown(site)["state"], last.step) == ("training", 100)
    save(run_dir, 100)
    site.due_s = 0.0
    site.poll(last, board, records)
    assert shown(site)["state"] == "finished"


def test_a_folder_with_something_else_is_not_written_to(tmp_path):
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "thesis.txt").write_text("dear to somebody")
    with pytest.raises(ValueError, match="name another folder"):
        open_site(tmp_path)
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"prompts": 1, "drawn": []}'])
def test_a_helpers_nonsense_is_no_gallery(tmp_path, content):
    site = open_site(tmp_path)
    site.watcher.public = {"gallery.json": content}
    assert site.pictures() == Gallery()


def test_pictures_come_from_a_helper_each_once(tmp_path):
    site, asked = open_site(tmp_path), []
    files = {f"drawn-00000{step}-0.webp": b"RIFF....WEBP" + bytes([step]) for step in (1, 2)}
    drawn = [{"step": step, "files": [f"drawn-00000{step}-0.webp"]} for step in (1, 2, 3)]
    public = {**files, "gallery.json": json.dumps({"prompts": ["a heart"], "drawn": drawn}).encode()}
    site.watcher.fetch_public = lambda name, start=0: asked.append(name) or public.get(name)
    for _ in range(2):
        assert [one.step for one in site.pictures().drawn] == [1, 2]  # the third's are not there yet
    assert asked.count("drawn-000001-0.webp") == 1
    assert (site.folder / "drawn-000002-0.webp").read_bytes() == files["drawn-000002-0.webp"]


def test_pictures_of_a_checkpoint_that_is_not_complete_are_kept(tmp_path):
    site, asked = open_site(tmp_path), []
    drawn = [{"step": 1, "files": ["drawn-000001-0.webp", "drawn-000001-1.webp"]}]
    content = json.dumps({"prompts": ["a heart", "a star"], "drawn": drawn}).encode()
    public = {"gallery.json": content, "drawn-000001-0.webp": b"RIFF....WEBP"}
    site.watcher.fetch_public = lambda name, start=0: asked.append(name) or public.get(name)
    for _ in range(3):
        refresh(site)
    assert asked.count("drawn-000001-0.webp") == 1
    assert shown(site)["gallery"]["drawn"] == []


def test_a_tab_that_was_opened_before_a_refresh_still_finds_its_files_and_older_ones_go(tmp_path):
    site = open_site(tmp_path)
    for step in (1, 2, 3):
        picture, content = f"drawn-00000{step}-0.webp", bytes([step])
        model = Download(
            step=step, file=f"model-step-00000{step}.zip", size_bytes=1, sha256=sha256(content).hexdigest()
        )
        gallery = Gallery(["a heart"], [Drawn(step, [picture])])
        public = {picture: b"RIFF....WEBP", model.file: content}
        public |= {
            "gallery.json": json.dumps(asdict(gallery)).encode(),
            "model.json": json.dumps(asdict(model)).encode(),
        }
        site.watcher.public = public
        refresh(site)
        assert shown(site)["checkpoint"] == asdict(model)
    for kind in ("drawn-00000{}-0.webp", "model-step-00000{}.zip"):
        assert [(site.folder / kind.format(step)).exists() for step in (1, 2, 3)] == [False, True, True]


def test_the_server_compresses_allows_no_scripts_of_others_and_lists_nothing(tmp_path):
    site = simulate(tmp_path, peers=3, steps=10)
    (site.folder / "model-step-000001.zip").write_bytes(bytes(10_000))
    with served(site.folder, "127.0.0.1:0") as url:
        for name in ("", "run.json", "model-step-000001.zip"):
            request = urllib.request.Request(url + name, headers={"Accept-Encoding": "gzip"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert "script-src 'self';" in answer.headers["Content-Security-Policy"]
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert (answer.headers.get("Content-Encoding") == "gzip") == (name != "model-step-000001.zip")
        for name in ("../out/history.json", "%2e%2e/out/history.json", "absent"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(url + name, timeout=30)


@pytest.mark.parametrize("address", ["7870", "127.0.0.1:page", "127.0.0.1:70000", "no such host:80", ""])
def test_an_address_that_nobody_can_listen_at_is_one_sentence(tmp_path, address):
    with pytest.raises(ValueError, match="--page-address"), served(tmp_path, address):
        pass


def test_a_page_that_was_ended_before_it_was_written_starts_again_and_another_folder_is_left_alone(tmp_path):
    folder = open_site(tmp_path).folder
    assert not (folder / "run.json").exists()
    open_site(tmp_path)
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is not empty and holds no run's page"):
        open_site(tmp_path)
