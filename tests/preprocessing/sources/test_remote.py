"""Sources behind a real server on loopback, whose answers fail at will."""

import re
import socket
import ssl
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dalle_lean.io.remote_io import Refused, Unreachable, meaning
from preprocessing.encoding.encode import preprocess
from preprocessing.sources import files, open_source
from tests.preprocessing.shards_of_pictures import emoji_rows, problems, read_all, tar_bytes, tar_members
from tests.serving import serving


class Handler(BaseHTTPRequestHandler):
    """Serves ranges of a dictionary of files; GETs, and whole files, fail as long as the server says."""

    def do_HEAD(self):
        if not self.fail_by_name():
            self.answer(self.server.contents.get(self.path), head=True)

    def do_GET(self):
        if self.fail_by_name():
            return
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(503)
        else:
            self.answer(self.server.contents.get(self.path), head=False)

    def fail_by_name(self):
        status, times = self.server.broken.get(self.path, (0, 0))
        if times:
            self.server.broken[self.path] = status, times - 1
            self.send_error(status)
        return times > 0

    def answer(self, content, head):
        if content is None:
            self.send_error(404)
            return
        first, last = 0, len(content) - 1
        bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if bounds and self.server.gives_parts:
            first, last = int(bounds[1]), min(int(bounds[2]), last)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        else:
            self.send_response(200)
        if self.server.gives_parts:
            self.send_header("Accept-Ranges", "bytes")
        if self.server.tells_sizes:
            self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if not head:
            self.wfile.write(content[first : last + 1])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", replace(files.PATIENCE, first_wait_s=0.001))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.contents, server.failures, server.broken = {}, 0, {}
    server.gives_parts = server.tells_sizes = True
    with serving(server):
        yield server


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", replace(files.PATIENCE, first_wait_s=0.001, give_up_s=0.05))


@pytest.fixture(scope="module")
def rows(emoji):
    return emoji_rows(emoji, 8)


@pytest.fixture(params=["tar", "parquet"])
def pattern(server, rows, request, tmp_path):
    """Two shards on the server."""
    for number in range(2):
        half = rows[number * 4 : number * 4 + 4]
        if request.param == "tar":
            content = tar_bytes(tar_members(half))
        else:
            pq.write_table(pa.Table.from_pylist(half), tmp_path / "half", row_group_size=2)
            content = (tmp_path / "half").read_bytes()
        server.contents[f"/{number:05d}.{request.param}"] = content
    return f"http://127.0.0.1:{server.server_port}/{{00000..00001}}.{request.param}"


def test_shards_are_read_from_a_server(rows, pattern):
    source = open_source(pattern, 1000)
    assert source.parts == ["00000", "00001"]
    assert source.size(0) is None
    assert [(sample.key, sample.picture) for sample in read_all(source)] == [(row["key"], row["jpg"]) for row in rows]
    assert source.fingerprint() == open_source(pattern, 1000).fingerprint()


def test_a_server_that_fails_for_a_moment_loses_nothing(rows, server, pattern):
    source = open_source(pattern, 1000)
    server.failures = 6
    assert [sample.picture for sample in source.samples(1)] == [row["jpg"] for row in rows[4:]]
    assert server.failures == 0


def test_a_server_that_stays_away_leaves_the_part_for_later_and_counts_no_loss(server, pattern, impatient):
    source = open_source(pattern, 1000)
    server.failures = 10**9
    with pytest.raises(Unreachable, match=r"http://127.0.0.1:\d+/00001.*503"):
        list(source.samples(1))
    server.failures = 0
    assert len(list(source.samples(1))) == 4


def test_a_shard_that_the_server_does_not_have_is_counted(server, pattern):
    source = open_source(pattern, 1000)
    del server.contents[next(name for name in server.contents if "00001" in name)]
    assert problems(source.samples(1)) == ["file_missing"]


def name_of(server, number):
    return sorted(server.contents)[number]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_file_that_a_server_does_not_give_for_a_moment_is_not_missing(rows, server, pattern, status):
    source = open_source(pattern, 1000)
    whole = source.fingerprint()
    server.broken[name_of(server, 1)] = status, 4  # each try asks twice: HEAD, then GET
    assert [sample.picture for sample in source.samples(1)] == [row["jpg"] for row in rows[4:]]
    server.broken[name_of(server, 1)] = status, 4
    assert source.fingerprint() == whole


@pytest.mark.parametrize("status", [401, 403, 429, 503])
def test_a_file_that_a_server_never_gives_is_left_for_later(server, pattern, status, impatient):
    source = open_source(pattern, 1000)
    server.broken[name_of(server, 1)] = status, 10**9
    for read in (lambda: list(source.samples(1)), source.fingerprint):
        with pytest.raises(Unreachable, match=rf"/00001.*{status}"):
            read()
    assert len(list(source.samples(0))) == 4
    server.broken.clear()
    assert len(list(source.samples(1))) == 4


@pytest.mark.parametrize("status", [404, 410])
def test_a_file_that_a_server_says_is_not_there_is_missing(server, pattern, status):
    source = open_source(pattern, 1000)
    server.broken[name_of(server, 1)] = status, 10**9
    assert problems(source.samples(1)) == ["file_missing"]
    assert source.fingerprint() == source.fingerprint()


def test_what_was_forbidden_is_not_asked_again(server, pattern):
    source = open_source(pattern, 1000)
    server.broken[name_of(server, 1)] = 403, 100
    with pytest.raises(Unreachable):
        list(source.samples(1))
    assert server.broken[name_of(server, 1)] == (403, 98)


NO_PARTS = "does not give parts of a file, byte ranges.*copy the file here"


def test_a_server_that_gives_no_parts_of_a_file_and_tells_no_sizes_is_refused(server, pattern):
    source = open_source(pattern, 1000)
    server.gives_parts = server.tells_sizes = False
    with pytest.raises(Refused, match=f"/00001.*{NO_PARTS}"):
        list(source.samples(1))


def test_where_a_server_gives_no_parts_small_files_are_read_whole_and_large_ones_refused(rows, server, pattern):
    source = open_source(pattern, 1000)
    server.gives_parts = False
    server.contents["/large.tar"] = bytes(2**23)
    assert [sample.picture for sample in source.samples(1)] == [row["jpg"] for row in rows[4:]]
    with files.File(f"{pattern.rsplit('/', 1)[0]}/large.tar") as large:
        large.seek(2**22)
        with pytest.raises(Refused, match=f"/large.*{NO_PARTS}"):
            large.read(10)


def test_a_pattern_on_a_storage_that_does_not_answer_is_told_in_one_line(server, pattern, impatient):
    server.broken["/"] = 503, 10**9
    with pytest.raises(Unreachable, match=r"http.*/\*\.tar .*503"):
        open_source(pattern.rsplit("/", 1)[0] + "/*.tar", 1000)


def test_a_certificate_that_is_not_trusted_is_told_as_such():
    error = FileNotFoundError("https://host/00000.tar")  # fsspec's, of any failure
    error.__cause__ = ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed certificate")
    found = meaning(error, "https://host/00000.tar")
    assert isinstance(found, Refused)
    assert "certificate is not trusted (SSLCertVerificationError: " in str(found)
    assert "byte ranges" not in str(found)


def refuse(url):
    with pytest.raises(Unreachable, match="Cannot connect"):
        list(open_source(url, 1000).samples(0))
    with pytest.raises(Unreachable, match="Cannot connect"):
        open_source(url, 1000).fingerprint()


def test_a_file_of_a_machine_that_refuses_is_not_missing(impatient):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # does not listen
        refuse(f"http://127.0.0.1:{taken.getsockname()[1]}/00000.tar")


def test_a_file_of_a_machine_whose_name_cannot_be_resolved_is_not_missing(monkeypatch, impatient):
    def no_answer(*arguments, **options):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", no_answer)
    refuse("http://pictures.invalid/00000.tar")


def test_an_outage_makes_no_data_set_and_the_next_start_makes_it_whole(
    rows, server, pattern, impatient, vqgan, tmp_path
):
    server.broken[name_of(server, 1)] = 503, 10**9
    with pytest.raises(OSError, match="503"):
        preprocess(open_source(pattern, 1000), tmp_path / "out", vqgan, workers=1)
    assert not (tmp_path / "out" / "dataset.json").exists()
    server.broken.clear()
    info = preprocess(open_source(pattern, 1000), tmp_path / "out", vqgan, workers=1)
    assert info.counts.seen == len(rows)
    assert "file_missing" not in info.counts.rejected
