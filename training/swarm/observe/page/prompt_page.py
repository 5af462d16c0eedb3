"""A prompt page on the run's newest checkpoint, to which the run's page forwards visitors."""

import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from dalle_lean.free_memory import free_ram_bytes
from dalle_lean.progress import OnNotice
from dalle_lean.require import require
from training.swarm.host.checkpoints import Checkpoint
from training.swarm.observe.page.gallery import LOG, last_line, start_program

PATH = "draw"  # its path on the run's page
RESTART_S = 600.0  # least time between two starts, since a restart interrupts visitors who are drawing
PROGRAM_BYTES = 2 * 10**9
COPIES = 3  # of the model's files, while it loads
FIRST_PORT = 17860
STARTED = re.compile(r"the prompt page is at (http://127\.0\.0\.1:[0-9]+)")
OWN_HEADERS = (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade")
"""Headers of a single connection, which are not forwarded."""


class PromptPage:
    """Runs `dalle-lean demo` on the newest checkpoint, on loopback, at the lowest priority, in `folder`."""

    def __init__(self, folder: Path, on_notice: OnNotice):
        self.folder, self.on_notice = folder, on_notice
        self.process: subprocess.Popen[bytes] | None = None
        self.step, self.due_s, self.last_notice = -1, 0.0, ""

    @property
    def url(self) -> str | None:
        """Its address on this machine; None while it does not answer."""
        process = self.process  # another thread may run `poll` or `close`
        if process is None or process.poll() is not None:
            return None
        found = STARTED.search((self.folder / LOG).read_text(errors="replace"))
        return found[1] if found else None

    def poll(self, newest: Checkpoint | None) -> None:
        """Start it on the newest checkpoint, or again if it has ended; does not block."""
        ended = self.process is not None and self.process.poll() is not None
        if ended:
            self.notice(f"the prompt page on step {self.step} has ended: {last_line(self.folder)}")
        if newest is None or time.monotonic() < self.due_s or (newest.step == self.step and not ended):
            return
        self.close()
        self.step, self.due_s = -1, time.monotonic() + RESTART_S
        options = ["--port", str(FIRST_PORT), "--root-path", f"/{PATH}"]
        try:
            files = (newest.folder / "model").rglob("*")
            needed = PROGRAM_BYTES + COPIES * sum(file.stat().st_size for file in files if file.is_file())
            if free_ram_bytes() < needed:
                self.notice(f"no prompt page: it needs {needed / 1e9:.1f} GB of free memory")
                return
            self.process, self.step = start_program("demo", newest, options, self.folder), newest.step
        except OSError as error:  # removed meanwhile: the next one at once
            self.due_s = 0.0
            self.notice(f"no prompt page on step {newest.step}: {error}")

    def notice(self, line: str) -> None:
        """Report a line unless the previous one was the same."""
        if line != self.last_notice:
            self.on_notice(line)
        self.last_notice = line

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        shutil.rmtree(self.folder / "model", ignore_errors=True)  # its links keep a removed checkpoint on the disk


def forward_to(prompt_page: PromptPage) -> Any:
    """A Starlette endpoint that forwards requests to the prompt page and streams its answers."""
    httpx = require("httpx", extra="demo")
    responses = require("starlette.responses", extra="demo")
    client = httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None))

    async def endpoint(request: Any) -> Any:
        base = prompt_page.url
        if base is None:
            return responses.PlainTextResponse("The prompt page is starting. Try again in a minute.", 503)
        url = httpx.URL(base, path=f"/{request.path_params['path']}", query=request.url.query.encode())
        headers = [header for header in request.headers.raw if header[0] not in OWN_HEADERS]
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        content = request.stream() if has_body else None
        try:
            # Not built by the client, which would add headers, such as encodings that the visitor cannot read.
            answer = await client.send(
                httpx.Request(request.method, url, headers=headers, content=content), stream=True
            )
        except httpx.HTTPError as error:
            return responses.PlainTextResponse(f"The prompt page does not answer: {type(error).__name__}", 502)

        async def pieces() -> Any:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:  # also if the visitor leaves, which ends the drawing
                await answer.aclose()

        response = responses.StreamingResponse(pieces(), answer.status_code)
        response.raw_headers = [header for header in answer.headers.raw if header[0].lower() not in OWN_HEADERS]
        return response

    return endpoint
