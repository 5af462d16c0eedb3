"""Starts the prompt page and the calculator's page."""

import errno
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import gradio as gr
import gradio.http_server

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_text
from demo.actions import TABS_KEPT
from demo.calculator.page import add_calculator
from demo.page import build_page
from demo.service.drawing_service import MAX_UPLOAD_BYTES, DrawingService

PORTS_TRIED = 20
# Each waiting visitor holds one.
THREADS = 64
STYLE = Path(__file__).with_name("page.css")
# Escape stops a drawing. While one waits or runs, the page asks every 3 s whether its server is still there: Gradio
# leaves the last progress as it was.
SCRIPT = """() => {
    document.addEventListener("keydown", event => {
        if (event.key === "Escape") document.querySelector("#stop:not(:disabled)")?.click();
    });
    setInterval(() => {
        const drawing = () => document.querySelector(
            "#status .asked, #status .stopping, body:has(#stop:not(:disabled)) #status .status:not(.mistake)");
        if (drawing()) fetch(location.href, {method: "HEAD"}).catch(() => {
            const line = drawing();
            if (!line) return;
            line.className = "status mistake";
            line.textContent = "The page's server has stopped, and this drawing with it. Draw again once it is back.";
        });
    }, 3000);
}"""


class PatientServer(gradio.http_server.Server):
    """Waits until its thread serves or ends. Gradio's own waits for 5 s, too few on a busy machine, and says then that
    the port is taken."""

    def run_in_thread(self) -> None:
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        while not self.started:
            if not self.thread.is_alive():
                raise OSError("the page's server ended before it started")
            time.sleep(0.01)


gradio.http_server.Server = PatientServer  # type: ignore[misc]
# Gradio's own check of a number prints a traceback and says nothing on the page. `Field.read` checks instead.
gr.Number.raise_if_out_of_bounds = staticmethod(lambda num, minimum, maximum: None)  # type: ignore[method-assign]


def free_port(host: str, first: int, tries: int = PORTS_TRIED, option: str = "--port") -> int:
    """The first free port of the `tries` ports from `first` on; OSError, in one sentence that names the option, if all
    are taken."""
    last = min(first + tries - 1, 65535)
    for port in range(first, last + 1):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    ports = f"port {first} is" if first == last else f"ports {first} to {last} are all"
    raise OSError(f"cannot listen on {host}: {ports} taken; choose another with {option}")


def read_auth(auth: str | None) -> tuple[str, str] | None:
    """Split USER:PASSWORD in two; UserError if either is missing."""
    if auth is None:
        return None
    user, colon, password = auth.partition(":")
    if not (user and colon and password):
        raise UserError("--auth: must be USER:PASSWORD, neither of them empty")
    return user, password


def read_root_path(path: str | None) -> str | None:
    """A root path as Gradio needs it: with a leading slash, unless it is an http(s) URL, and without a trailing one."""
    if path is None:
        return None
    path = path.rstrip("/")
    if not path or path.startswith(("http://", "https://")):
        return path
    return "/" + path.lstrip("/")


def read_card(folder: Path) -> str:
    """The folder's model card as `plain_card` gives it; empty if there is none."""
    path = folder / "README.md"
    return plain_card(read_text(path)) if path.is_file() else ""


def plain_card(text: str) -> str:
    """A model card in Markdown without metadata and links to local files."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text).strip()


def serve(
    service: DrawingService,
    host: str = "127.0.0.1",
    port: int = 7860,
    *,
    card: str = "",
    api: bool = True,
    **options: Any,
) -> Any:
    """Start the prompt page in background threads and return it; `wait` waits for Ctrl+C, `close()` ends it.

    Args:
        port: the first that is tried, see `free_port`.
        card: the model card in Markdown.
        api: whether to offer the endpoint /draw.
        options: `share`, `auth` and `root_path` of Gradio's launch.
    """
    page = build_page(service, card, api)
    try:
        return launch(
            page,
            host,
            port,
            footer_links=["api"] if api else [],
            max_threads=THREADS,
            max_file_size=MAX_UPLOAD_BYTES,
            state_session_capacity=TABS_KEPT,
            js=SCRIPT,
            **options,
        )
    except ValueError as error:  # from Gradio if a proxy intercepts localhost
        raise UserError(f"cannot start the page: {error}") from None


def serve_calculator(name: str = "paper", host: str = "127.0.0.1", port: int = 7860) -> Any:
    """Start the calculator's page for the model `name`, see `launch`, and return it."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # as in build_page
    with gr.Blocks(title="dalle_lean calculator", analytics_enabled=False) as page:
        add_calculator(name)
    return launch(page, host, port, footer_links=[])


def wait(page: Any) -> None:
    """Serve a started page until Ctrl+C, close it and raise KeyboardInterrupt; Gradio's `block_thread` swallows it."""
    try:
        while page.is_running:
            time.sleep(0.1)
    finally:
        page.close(verbose=False)


def launch(page: Any, host: str, port: int, *, share: bool = False, **options: Any) -> Any:
    """Start a page in background threads on the first free port from `port` on, in Gradio's own theme with the
    machine's fonts, and return it.

    It gets a public address only if asked to `share`; Gradio's own default shares from hosted notebooks.
    """
    theme = gr.themes.Default(
        primary_hue="indigo", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    while True:
        free = free_port(host, port)
        try:
            page.launch(
                server_name=host,
                server_port=free,
                share=share,
                quiet=True,
                prevent_thread_lock=True,
                ssr_mode=False,
                show_error=False,
                theme=theme,
                css_paths=STYLE,
                **options,
            )
            return page
        except OSError:
            if free_port(host, free) == free:  # no other program has taken it since
                raise
