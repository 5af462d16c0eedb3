"""Shards on another machine: a web server on loopback whose faults are called by name."""

import logging
import os
import re
import signal
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice, pairwise

import fsspec
import pytest
import torch

from dalle_lean.errors import UserError
from dalle_lean.io.remote_io import Patience, Refused, RemoteFile, Unreachable, within
from preprocessing.shards.manifest import Counts, DatasetInfo
from tests.serving import serving
from tests.training.conftest import windows_of_a_pass, write_shards
from tests.training.runs import at_step, losses, saved_progress
from training.data.catalog import find_shards, published_files
from training.data.loader import TrainingData
from training.data.sampler import Position
from training.run.recipe import DataRecipe, load_recipe
from training.trainer import train

HASTY = Patience(timeout_s=0.5, first_wait_s=0.01, longest_wait_s=0.05, give_up_s=20)


def test_a_kind_of_storage_that_is_not_known_is_refused_at_once():
    with pytest.raises(UserError, match=r"nowhere://shards/dataset\.json: its kind of storage cannot be read here"):
        find_shards("nowhere://shards", patience=Patience(first_wait_s=60))


class Handler(BaseHTTPRequestHandler):
    """Serves a folder with ranges, as storage on the Web does.

    The server's `coming` are the faults of its next answers to GET, one an answer; HEAD before one is refused too.
    """

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        if self.server.coming[:1] == ["refuse"]:
            self.send_error(503)
        else:
            self.answer(body=False)

    def do_GET(self):
        fault = self.server.coming.pop(0) if self.server.coming else None
        if fault == "refuse":
            self.send_error(503)
        elif fault == "hang":
            time.sleep(1.0)
            self.answer(body=True)
        elif fault == "cut":
            self.answer(body=True, cut=True)
        else:
            self.answer(body=True)

    def answer(self, body, cut=False):
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file() or path.name in self.server.gone:
            self.send_error(self.server.gone_status)
            return
        content = path.read_bytes()
        asked = self.server.gives_parts and re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(asked[1]), min(int(asked[2]) + 1, len(content))) if asked else (0, len(content))
        self.send_response(206 if asked else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        if body:
            self.wfile.write(content[start : end - (end - start) // 2 if cut else end])


@pytest.fixture
def server(shards):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.coming, server.gone, server.gone_status = shards, [], set(), 404
    server.gives_parts = True
    with serving(server) as server.url:
        yield server


@pytest.fixture
def remote(server, noticed):
    return find_shards(server.url, patience=HASTY, on_notice=noticed.append)


def training_data(shards):
    return TrainingData(shards, DataRecipe(heldout_share=0.1, shuffle_buffer=16, shuffle_shards=3, seed=3))


def batches(shards, tokenizer, count=12, start=Position()):
    return list(islice(training_data(shards).batches(20, tokenizer, 6, start), count))


def assert_same(found, wanted):
    for (batch, position), (other, other_position) in zip(found, wanted, strict=True):
        assert torch.equal(batch.text_ids, other.text_ids)
        assert torch.equal(batch.image_codes, other.image_codes)
        assert position == other_position


def test_the_batches_of_a_url_are_those_of_the_folder_behind_it(server, remote, shards, tokenizer):
    found = batches(remote, tokenizer)
    assert_same(found, batches(find_shards(shards), tokenizer))
    assert_same(batches(remote, tokenizer, 4, found[7][1]), found[8:])
    assert remote.fingerprint == find_shards(shards).fingerprint


@pytest.mark.parametrize("fault", ["refuse", "cut", "hang"])
def test_a_fault_of_the_remote_is_told_and_tried_again_and_nothing_is_lost(
    server, remote, shards, tokenizer, noticed, fault
):
    server.coming = [None, fault, fault, None, None, fault]
    assert_same(batches(remote, tokenizer), batches(find_shards(shards), tokenizer))
    assert len(noticed) >= 3
    assert all("cannot be read" in line and "trying again in" in line for line in noticed)
    assert all(server.url in line for line in noticed)


def test_the_pauses_grow_up_to_the_longest():
    patience = replace(HASTY, first_wait_s=0.1, longest_wait_s=0.3)
    failures = iter([OSError("no")] * 4)

    def action():
        for failure in failures:
            raise failure
        return "content"

    pauses, told = [], []

    def on_notice(line):
        pauses.append(time.monotonic())
        told.append(float(line.rsplit(" in ")[1].removesuffix(" s")))

    assert patience.insist("it", action, on_notice) == "content"
    waits = [after - before for before, after in pairwise([*pauses, time.monotonic()])]
    assert all(wait >= least for wait, least in zip(waits, [0.1, 0.2, 0.3, 0.3], strict=True))
    assert told == [0.1, 0.2, 0.3, 0.3]


def test_a_read_that_fails_after_a_long_while_is_tried_again():
    tries = []

    def action():
        tries.append(None)
        if len(tries) == 1:
            time.sleep(0.3)
            raise OSError("no")
        return "content"

    assert replace(HASTY, timeout_s=10, give_up_s=0.2).insist("it", action) == "content"


def test_a_remote_that_stays_away_ends_the_reading_and_is_no_damaged_shard(server, remote, tokenizer, noticed):
    server.coming = ["refuse"] * 10_000
    impatient = replace(remote, patience=replace(HASTY, give_up_s=0.3))
    with pytest.raises(Unreachable, match=r"parquet could not be read for 0.3 s \(.*503"):
        batches(impatient, tokenizer)
    assert not any("damaged" in line for line in noticed)


def test_an_outage_while_a_shard_is_opened_is_waited_for(server, noticed):
    server.coming = ["refuse"] * 3
    file = RemoteFile(f"{server.url}/shard-00000.parquet", replace(HASTY, timeout_s=10), noticed.append)
    assert file.size == (server.folder / "shard-00000.parquet").stat().st_size
    assert len(noticed) == 3
    assert all("503" in line and "trying again in" in line for line in noticed)


def test_a_server_that_refuses_connections_is_unreachable(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(Unreachable, match=r"parquet could not be read for 0.1 s \(.*[Cc]onnect"):
        RemoteFile(f"{server.url}/shard-00000.parquet", replace(HASTY, timeout_s=10, give_up_s=0.1))


def test_a_storage_that_gives_the_reason_why_a_file_is_missing_is_asked_once(monkeypatch, noticed):
    def info(self, path, **_):
        raise FileNotFoundError(path) from LookupError("no such entry")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", info)
    with pytest.raises(FileNotFoundError):
        RemoteFile("memory://nowhere/shard.parquet", HASTY, noticed.append)
    assert not noticed


@pytest.mark.parametrize("status", [404, 410])
def test_a_shard_that_is_not_there_is_passed_over_at_once(server, noticed, status):
    patience = replace(HASTY, timeout_s=10)
    remote = find_shards(server.url, patience=patience, on_notice=noticed.append)
    server.gone, server.gone_status = {"shard-00001.parquet"}, status
    rows = [key for window, position in islice(training_data(remote).windows(), 8) for key in window.keys]
    assert all(int(key.removeprefix("picture-")) // 32 != 1 for key in rows)
    assert len(noticed) == 1
    assert "shard-00001.parquet" in noticed[0]
    assert "skipped" in noticed[0]


@pytest.mark.parametrize("status", [401, 403])
def test_a_remote_that_refuses_access_is_asked_once_and_is_no_damaged_shard(server, remote, noticed, status):
    server.gone, server.gone_status = {"shard-00001.parquet"}, status
    with pytest.raises(Refused, match=rf"shard-00001\.parquet: its storage refuses access.*{status}"):
        list(islice(training_data(remote).windows(), 100))
    with pytest.raises(Refused, match="refuses access"):
        RemoteFile(f"{server.url}/shard-00001.parquet", HASTY, noticed.append)
    assert not noticed


def test_a_server_that_gives_no_parts_of_a_file_is_refused_at_once(server, remote, noticed):
    server.gives_parts = False
    with pytest.raises(Refused, match=r"does not give parts of a file, byte ranges.*copy the file here"):
        list(islice(training_data(remote).windows(), 8))
    assert not noticed


def test_a_url_without_data_is_refused_in_one_line(server):
    with pytest.raises(ValueError, match=r"/nowhere has no dataset\.json"):
        find_shards(f"{server.url}/nowhere", patience=HASTY)
    with pytest.raises(ValueError, match=r"shard-00000\.parquet has no dataset\.json"):
        find_shards(f"{server.url}/shard-00000.parquet", patience=HASTY)


def test_another_dataset_json_is_refused_by_name(server, shards, tmp_path):
    server.folder = tmp_path
    for content in ("[]", "{", '{"format": "other/1"}', '{"format": "dalle_lean_shards/1"}'):
        (tmp_path / "dataset.json").write_text(content)
        with pytest.raises(ValueError, match=r"http.*dataset\.json"):
            find_shards(server.url, patience=HASTY)


def test_a_remote_file_reads_as_a_local_one_does(tmp_path):
    folder = write_shards(tmp_path / "data", 40, shard_rows=40)
    path = folder / "shard-00000.parquet"
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/only/shard.parquet", path.read_bytes())
    file = RemoteFile("memory://only/shard.parquet", HASTY)
    assert file.size == path.stat().st_size
    file.seek(-8, 2)
    assert file.read(4) == path.read_bytes()[-8:-4]
    assert (file.tell(), file.read(100), file.read(1)) == (file.size - 4, b"PAR1", b"")
    file.seek(10)
    assert file.read(5) == path.read_bytes()[10:15]


def test_a_run_on_remote_shards_is_the_run_on_their_folder(server, shards, tmp_path, caplog):
    caplog.set_level("INFO", "training")
    recipe = load_recipe("tiny")
    train(shards, tmp_path / "local", recipe)
    server.coming = [None] * 3 + ["refuse"]
    train(server.url, tmp_path / "remote", recipe)
    assert losses(tmp_path / "remote") == losses(tmp_path / "local")
    assert any("trying again" in line for line in caplog.messages)


@pytest.mark.long
def test_control_c_while_data_is_waited_for_saves_what_was_learnt(server, shards, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "training")
    recipe = load_recipe("tiny").override(steps=30)
    train(shards, tmp_path / "whole", recipe)
    tries = []

    def away():
        server.coming = ["refuse"] * 10_000

    class PressAtSecondTry(logging.Handler):
        def emit(self, record):
            if "trying again" in record.getMessage():
                tries.append(record)
                if len(tries) == 2:
                    os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(logging.getLogger("training"), "handlers", [PressAtSecondTry()])
    with pytest.raises(KeyboardInterrupt):
        train(server.url, tmp_path / "run", recipe, on_progress=at_step(3, away))
    assert 3 <= saved_progress(tmp_path / "run")["step"] < 30
    server.coming = []
    train(server.url, tmp_path / "run", recipe)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_wait_for_a_batch_says_what_is_being_read(remote, server, tokenizer, noticed, monkeypatch):
    monkeypatch.setattr("training.data.prefetch.POLL_S", 0.2)
    monkeypatch.setattr("training.data.prefetch.NOTICE_S", 0.2)
    server.coming = [None, None, "hang"]
    data = training_data(replace(remote, patience=replace(HASTY, timeout_s=10)))
    assert len(list(islice(data.ahead(data.batches(20, tokenizer, 6)), 3))) == 3
    assert any(re.fullmatch(r"still waiting for data after \d+ s: reading http.*\.parquet", line) for line in noticed)


def test_files_without_a_dataset_json_are_found_by_datasets_and_read_with_codes_that_are_told(
    shards, tmp_path, tokenizer, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for path in shards.glob("*.parquet"):
        (tmp_path / "published").mkdir(exist_ok=True)
        (tmp_path / "published" / path.name).write_bytes(path.read_bytes())
    files = published_files(str(tmp_path / "published"))
    assert [file.rsplit("/", 1)[1] for file in files] == sorted(path.name for path in shards.glob("*.parquet"))

    monkeypatch.setattr("training.data.catalog.published_files", lambda name: {"owner/name": files}[name])
    monkeypatch.setattr("training.data.catalog.read_file", missing)
    codes = DatasetInfo(image_side=4, codebook_size=32, vqgan="a" * 64, picture_side=32, counts=Counts(), shards=())
    found = find_shards("hf://datasets/owner/name", codes=codes)
    assert (found.info.num_codes, found.info.codebook_size, found.rows) == (16, 32, (None,) * 4)
    assert keys_of_a_pass(found) == keys_of_a_pass(find_shards(shards))
    with pytest.raises(ValueError, match=r"owner/name has no dataset\.json.*--vqgan"):
        find_shards("hf://datasets/owner/name")


def missing(url):
    raise FileNotFoundError(url)


def keys_of_a_pass(shards):
    return sorted(key for rows, _ in windows_of_a_pass(training_data(shards)) for key in rows.keys)


def test_an_answer_that_hangs_is_left_behind():
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within"):
        within(0.1, lambda: time.sleep(20))
    assert time.monotonic() - started < 10
    with pytest.raises(ZeroDivisionError):
        within(1, lambda: 1 / 0)
