"""Sources behind a real server on loopback, whose answers fail at will."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preprocessing.sources import files, open_source
from tests.preprocessing.shards_of_pictures import emoji_rows, read_all, tar_bytes, tar_members


class Handler(BaseHTTPRequestHandler):
    """Serves ranges of a dictionary of files; GETs fail with 503 as long as the server says."""

    def do_HEAD(self):
        self.answer(self.server.contents.get(self.path), head=True)

    def do_GET(self):
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(503)
        else:
            self.answer(self.server.contents.get(self.path), head=False)

    def answer(self, content, head):
        if content is None:
            self.send_error(404)
            return
        first, last = 0, len(content) - 1
        if bounds := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(bounds[1]), min(int(bounds[2]), last)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if not head:
            self.wfile.write(content[first : last + 1])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(files, "FIRST_PAUSE_S", 0.001)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.contents, server.failures = {}, 0
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


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
    server.failures = files.TRIES - 1
    assert [sample.picture for sample in source.samples(1)] == [row["jpg"] for row in rows[4:]]
    assert server.failures == 0


def test_a_server_that_stays_away_leaves_the_part_for_later_and_counts_no_loss(server, pattern):
    source = open_source(pattern, 1000)
    server.failures = 10**9
    with pytest.raises(files.StorageFailed, match=r"http://127.0.0.1:\d+/00001.*503"):
        list(source.samples(1))
    server.failures = 0
    assert len(list(source.samples(1))) == 4


def test_a_shard_that_the_server_does_not_have_is_counted(server, pattern):
    source = open_source(pattern, 1000)
    del server.contents[next(name for name in server.contents if "00001" in name)]
    assert [sample.problem for sample in source.samples(1)] == ["file_missing"]
