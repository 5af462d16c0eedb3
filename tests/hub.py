"""A hub on loopback: what huggingface_hub asks of the real one to write and read repositories, kept in memory."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

from tests.serving import serving

TOKEN = "hf_ThisTokenIsForTestsAlone"
REPO = r"[\w.-]+/[\w.-]+"
API = re.compile(rf"/api/(model|dataset)s/({REPO})(?:/(preupload|commit|tree|paths-info|revision|refs)\b/?(.*))?")
FILE = re.compile(rf"/(?:(dataset)s/)?({REPO})/resolve/[^/]+/(.+)")
BATCH = re.compile(rf"/(?:datasets/)?{REPO}\.git/info/lfs/objects/batch")


@dataclass
class Hub:
    url: str = ""
    repos: dict = field(default_factory=dict)
    """(kind, owner/name) -> commits, each the files of that state by name."""
    objects: dict = field(default_factory=dict)
    """Large files by SHA-256."""
    uploads: list = field(default_factory=list)
    """SHA-256 of each large file that arrived."""
    hold_after: int | None = None
    """Uploads after which the next one waits until `go_on`."""
    down: bool = False
    """Whether it ends every connection without an answer."""
    begun: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    held: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def files(self, kind, name):
        """The newest state."""
        return self.repos[kind, name][-1]

    def environment(self, home):
        """Of a client that sees this hub alone."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",  # its storage is a protocol of its own; the other way of upload is HTTP
        }


@contextmanager
def loopback_hub():
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def parse_request(self):
            parsed = super().parse_request()
            if parsed and hub.down:  # read whole, or the client may see a reset instead of an end
                self.body()
                self.close_connection = True
            return parsed and not hub.down

        def answer(self, content=b"", status=200, **headers):
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def body(self):
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def do_PUT(self):
            with hub.lock:  # a client sends several at once
                hub.begun += 1
                hold = hub.hold_after is not None and hub.begun > hub.hold_after
            if hold:
                hub.held.set()
                hub.go_on.wait()
            content = self.body()
            sha256 = urlsplit(self.path).path.rpartition("/")[2]
            assert hashlib.sha256(content).hexdigest() == sha256
            hub.objects[sha256] = content
            hub.uploads.append(sha256)
            self.answer()

        def do_POST(self):
            path, content = unquote(urlsplit(self.path).path), self.body()
            if path == "/api/validate-yaml":
                has_metadata = json.loads(content)["content"].startswith("---\n")
                message = {"message": "empty or missing yaml metadata in repo card"}
                return self.answer({"errors": [], "warnings": [] if has_metadata else [message]})
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer({"error": "Invalid username or password."}, 401)
            if path == "/api/repos/create":
                asked = json.loads(content)
                key = asked.get("type") or "model", f"{asked['organization']}/{asked['name']}"
                status = 409 if key in hub.repos else 200
                hub.repos.setdefault(key, [{}])
                return self.answer({"url": f"{hub.url}/{key[1]}"}, status)
            if BATCH.fullmatch(path):
                return self.answer(
                    {"transfer": "basic", "objects": [self.stored(each) for each in json.loads(content)["objects"]]}
                )
            kind, name, what, _ = API.fullmatch(path).groups()
            files = hub.repos[kind, name][-1]
            if what == "preupload":
                return self.answer({"files": [self.mode(each, files) for each in json.loads(content)["files"]]})
            if what == "paths-info":
                wanted = parse_qs(content.decode()).get("paths", [])
                return self.answer([self.entry(path, files[path]) for path in wanted if path in files])
            assert what == "commit"
            return self.commit(kind, name, [json.loads(line) for line in content.splitlines()])

        def stored(self, asked):
            about = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] in hub.objects:
                return about
            href = f"{hub.url}/lfs/{asked['oid']}?X-Amz-Signature=secret0123456789"
            return about | {"actions": {"upload": {"href": href}}}

        def mode(self, asked, files):
            large = asked["path"].endswith((".parquet", ".safetensors"))
            there = files.get(asked["path"])
            oid = there and self.entry(asked["path"], there).get("lfs", self.entry(asked["path"], there))["oid"]
            return {
                "path": asked["path"],
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": False,
                "oid": oid,
            }

        def commit(self, kind, name, lines):
            files = dict(hub.repos[kind, name][-1])
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            hub.repos[kind, name].append(files)
            oid = f"{len(hub.repos[kind, name]):040x}"
            self.answer({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}"})

        def entry(self, path, content):
            about = {"type": "file", "path": path, "size": len(content)}
            about["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            if path.endswith((".parquet", ".safetensors")):
                sha256 = hashlib.sha256(content).hexdigest()
                about["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 130}
            return about

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            if found := FILE.fullmatch(path):
                return self.file(found[1] or "model", found[2], found[3])
            found = API.fullmatch(path)
            if found is None or (found[1], found[2]) not in hub.repos:
                return self.answer({"error": "Not found"}, 404, X_Error_Code="RepoNotFound")
            kind, name, what, rest = found.groups()
            commits = hub.repos[kind, name]
            if what == "tree":
                return self.answer(self.tree(commits[-1], rest.partition("/")[2]))
            if what == "refs":
                return self.answer(
                    {
                        "branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": "1"}],
                        "tags": [],
                        "converts": [],
                    }
                )
            about = {
                "id": name,
                "sha": f"{len(commits):040x}",
                "private": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            return self.answer(about | {"siblings": [{"rfilename": name} for name in commits[-1]]})

        def tree(self, files, folder):
            """The files and folders in a folder, and with recursive=True those in them."""
            inside = [name for name in files if name.startswith(f"{folder}/") or not folder]
            folders = {str(parent) for name in inside for parent in PurePosixPath(name).parents} - {".", folder}
            entries = [self.entry(name, files[name]) for name in inside]
            entries += [{"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in sorted(folders)]
            whole = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
            return [each for each in entries if whole or str(PurePosixPath(each["path"]).parent) == (folder or ".")]

        do_HEAD = do_GET

        def file(self, kind, name, path):
            files = hub.repos.get((kind, name), [{}])[-1]
            if path not in files:
                return self.answer({"error": "Not found"}, 404, X_Error_Code="EntryNotFound")
            content = files[path]
            headers = {
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X_Repo_Commit": f"{len(hub.repos[kind, name]):040x}",
            }
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
                headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
                return self.answer(content[first : last + 1], 206, **headers)
            return self.answer(content, **headers)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with serving(server) as hub.url:
        try:
            yield hub
        finally:
            hub.go_on.set()
        server.shutdown()
        server.server_close()
