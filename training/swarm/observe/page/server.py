"""Serves the folder of the run's page."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.require import require
from training.swarm.observe.page.prompt_page import PATH, PromptPage, forward_to

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
MOST_CONNECTIONS = 500


@contextmanager
def served(folder: Path, address: str, prompt_page: PromptPage | None = None) -> Iterator[str]:
    """Serve the page during the block; yields its URL.

    Args:
        address: HOST:PORT; port 0 is any free one.
        prompt_page: visitors of /draw/ are forwarded to it.

    Raises ValueError if the address cannot be used.
    """
    uvicorn = require("uvicorn", extra="demo")
    with listen_at(address) as listener:
        config = uvicorn.Config(
            page_app(folder, prompt_page),
            lifespan="off",
            log_config=None,
            access_log=False,
            limit_concurrency=MOST_CONNECTIONS,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="page", daemon=True)
        thread.start()
        try:
            yield f"http://{address.rpartition(':')[0]}:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(timeout=5)


def listen_at(address: str) -> socket.socket:
    """A socket that accepts connections at HOST:PORT; UserError if it cannot."""
    host, _, port = address.rpartition(":")
    try:
        if not host:
            raise ValueError("the host is missing")
        return socket.create_server((host, int(port)))
    except (ValueError, OverflowError, OSError) as error:
        raise UserError(f"cannot serve the page at {address!r}: {error}; set --page-address to HOST:PORT") from None


def page_app(folder: Path, prompt_page: PromptPage | None = None) -> Any:
    """An ASGI application for the folder's files, compressed except the model, and for the prompt page."""
    files = require("starlette.staticfiles", extra="demo").StaticFiles(directory=folder, html=True)
    plain = require("starlette.applications", extra="demo").Starlette()
    if prompt_page is not None:
        methods = ["GET", "HEAD", "POST", "PUT", "DELETE"]
        plain.add_route(f"/{PATH}/{{path:path}}", forward_to(prompt_page), methods=methods)
    plain.mount("/", files)
    compressed = require("starlette.middleware.gzip", extra="demo").GZipMiddleware(plain, compresslevel=5)
    added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *added]
            await send(message)

        if prompt_page is not None and scope["path"].startswith(f"/{PATH}/"):
            await plain(scope, receive, send)  # with its own headers, and streamed
        else:
            await (plain if scope["path"].endswith(".zip") else compressed)(scope, receive, send_with_headers)

    return app
