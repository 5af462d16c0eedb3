"""Copies files to other storage: only changed ones are sent, and an interrupted copy resumes where it stopped.

The hub gets each state of the files as one commit. Any other storage of fsspec gets one file after the other;
`.published` beside them records which have arrived.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from dalle_lean.errors import UserError
from dalle_lean.io.files import atomic_write, parse, sha256_file
from dalle_lean.io.remote_io import Refused, Unreachable, meaning, one_line, storage_of
from dalle_lean.progress import OnProgress, unwatched

Files = Mapping[str, Path | bytes]
"""Relative name at the destination -> file or content. The last one, such as config.json, makes the rest usable."""

Content = Literal["dataset", "model"]

PUBLISHED = ".published"  # JSON at the destination: name -> SHA-256, or null for a file that may be missing or outdated
HUB = re.compile(r"hf://(datasets/)?(?!(?:datasets|spaces)/)([\w.-]+/[\w.-]+)/?")
BATCH_FILES = 16  # files sent to the hub between two progress reports
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|KEY")
SECRET_WORDS = re.compile(r"\bhf_\w*[^\W_]{8,}|(?i:bearer)\s+[^\s'\"]+|(?<=\?)[^\s'\"?]*=[^\s'\"]*")
"""Tokens, and the queries of signed URLs."""


def publish(files: Files, destination: str, *, message: str, on_progress: OnProgress = unwatched) -> str:
    """Copy files to a destination, and remove those of earlier copies that are no longer among `files`.

    Args:
        destination: see `check_destination`.
        message: of the commit on the hub.
        on_progress: called with (files done, all files, the name of one).

    Returns what was done, in words. Raises UserError, or Unreachable if the destination fails; neither shows a token.
    The same call resumes an interrupted copy.
    """
    check_destination(destination)
    hashes = {name: content_sha256(source) for name, source in files.items()}
    with unreachable_without_secrets(destination):
        if destination.startswith("hf://"):
            return to_hub(files, hashes, destination, message, on_progress)
        return to_storage(files, hashes, destination, on_progress)


def check_destination(destination: str, content: Content | None = None) -> None:
    """UserError unless this is hf://datasets/OWNER/NAME, hf://OWNER/NAME, a folder or a URL that fsspec knows; of the
    hub's, only that for this content."""
    url = urlsplit(destination)
    if url.password or (url.scheme and url.query):
        raise UserError(
            f"the destination {url.scheme}://... holds a password or a query, which shells and logs would keep; leave "
            "it out, and sign in through the environment or the storage's own configuration"
        )
    if url.scheme != "hf":
        storage_of(destination)
        return
    kind, repo = hub_repository(destination)
    if content not in (None, kind):
        place = f"hf://datasets/{repo}" if content == "dataset" else f"hf://{repo}"
        raise UserError(f"{destination} is a {kind}'s address on the hub; a {content} goes to {place}")


def hub_repository(destination: str) -> tuple[Content, str]:
    """(kind, OWNER/NAME) of an address on the hub."""
    found = HUB.fullmatch(destination)
    if found is None:
        raise UserError(f"{destination}: an address on the hub is hf://datasets/OWNER/NAME or hf://OWNER/NAME")
    return "dataset" if found[1] else "model", found[2]


def to_storage(files: Files, hashes: Mapping[str, str], destination: str, on_progress: OnProgress) -> str:
    storage, root = storage_of(destination)
    root = root.rstrip("/")
    if any(isinstance(source, Path) and str(source.resolve()) == f"{root}/{name}" for name, source in files.items()):
        raise UserError(f"{destination} is where the files come from; name another destination")
    storage.invalidate_cache()
    found = storage.find(root, detail=True)
    sizes = {name.removeprefix(f"{root}/"): about["size"] for name, about in found.items()}
    before = read_published(storage.cat_file(f"{root}/{PUBLISHED}")) if PUBLISHED in sizes else {}
    state: dict[str, str | None] = dict.fromkeys([*before, *files])
    for name, sha256 in hashes.items():
        if before.get(name) == sha256 and sizes.get(name) == content_bytes(files[name]):
            state[name] = sha256

    def save_state() -> int:
        content = published_json(state)
        send(storage, content, f"{root}/{PUBLISHED}")
        return len(content)

    missing = [name for name in files if state[name] is None]
    gone = [name for name in before if name not in files]
    if not missing and not gone:
        return f"nothing has changed, {len(files)} files are there"
    state_bytes, unsaved_bytes = save_state(), 0
    for number, name in enumerate(missing):
        on_progress(number, len(missing), name)
        send(storage, files[name], f"{root}/{name}")
        state[name] = hashes[name]
        unsaved_bytes += content_bytes(files[name])
        if unsaved_bytes > 10 * state_bytes:  # otherwise the state would be much of what is sent
            state_bytes, unsaved_bytes = save_state(), 0
    for name in gone:
        if name in sizes:
            storage.rm_file(f"{root}/{name}")
        del state[name]
    save_state()
    on_progress(len(missing), len(missing), "")
    return f"{len(missing)} files sent, {len(files) - len(missing)} were there"


def send(storage: Any, source: Path | bytes, place: str) -> None:
    """Write one file to `place`, where it appears whole or not at all."""
    if "file" in storage.protocol:
        with atomic_write(place) as temporary:
            if isinstance(source, Path):
                shutil.copyfile(source, temporary)
            else:
                temporary.write_bytes(source)
    elif isinstance(source, Path):
        storage.put_file(str(source), place)
    else:
        storage.pipe_file(place, source)


def to_hub(files: Files, hashes: Mapping[str, str], destination: str, message: str, on_progress: OnProgress) -> str:
    """Copy to a repository on the hub: upload the large files, then commit all in one commit."""
    import huggingface_hub as hub
    from huggingface_hub.utils import disable_progress_bars

    kind, repo = hub_repository(destination)
    disable_progress_bars()
    api = hub.HfApi()
    api.create_repo(repo, repo_type=kind, exist_ok=True)
    there = set(api.list_repo_files(repo, repo_type=kind))
    before: Mapping[str, str | None] = {}
    if PUBLISHED in there:
        before = read_published(Path(api.hf_hub_download(repo, PUBLISHED, repo_type=kind)).read_bytes())
    additions = [hub.CommitOperationAdd(name, source) for name, source in files.items()]
    for first in range(0, len(additions), BATCH_FILES):
        batch = additions[first : first + BATCH_FILES]
        on_progress(first, len(files), batch[0].path_in_repo)
        api.preupload_lfs_files(repo, batch, repo_type=kind, free_memory=False)
    gone = [hub.CommitOperationDelete(name) for name in before if name not in files and name in there]
    published = hub.CommitOperationAdd(PUBLISHED, published_json(hashes))
    commit = api.create_commit(repo, [*additions, published, *gone], commit_message=message, repo_type=kind)
    on_progress(len(files), len(files), "")
    return f"{len(files)} files are at {commit.commit_url}"


def content_bytes(source: Path | bytes) -> int:
    return source.stat().st_size if isinstance(source, Path) else len(source)


def content_sha256(source: Path | bytes) -> str:
    return sha256_file(source) if isinstance(source, Path) else hashlib.sha256(source).hexdigest()


def published_json(state: Mapping[str, str | None]) -> bytes:
    return (json.dumps(state, indent=1, sort_keys=True) + "\n").encode()


def read_published(content: bytes) -> dict[str, str | None]:
    """The state in `.published`; UserError unless this program wrote it."""
    complaint = f"{PUBLISHED} at the destination is not what this program writes; remove it there"
    state = parse(json.loads, content.decode("utf-8", errors="replace"), complaint)
    if not isinstance(state, dict) or not all(isinstance(sha256, str | None) for sha256 in state.values()):
        raise UserError(complaint)
    if any(name.startswith("/") or ".." in name.split("/") for name in state):
        raise UserError(complaint)
    return state


@contextmanager
def unreachable_without_secrets(destination: str) -> Iterator[None]:
    """Turn what a storage's library raises, except bugs, into Unreachable without secrets."""
    try:
        yield
    except (UserError, AttributeError, TypeError):
        raise
    except Exception as error:
        reason = meaning(error, destination)
        if isinstance(reason, Refused):
            raise Refused(without_secrets(str(reason))) from None
        shown = without_secrets(one_line(reason))
        raise Unreachable(f"{destination} could not be written ({shown}); the same command continues") from None


def without_secrets(text: str) -> str:
    """The text without tokens, queries of signed URLs and values of secret environment variables."""
    for name, value in os.environ.items():
        if SECRET_NAMES.search(name) and len(value) >= 8:
            text = text.replace(value, "***")
    return SECRET_WORDS.sub("***", text)
