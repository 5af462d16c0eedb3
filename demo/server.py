"""Starting the prompt page."""

import re
import socket
from pathlib import Path
from typing import Any

from demo.page import build_page, look
from inference import Generator


def check_port(host: str, port: int) -> None:
    """OSError in one sentence when `port` on `host` cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}; choose another with --port") from None


def read_card(folder: Path) -> str:
    """The model card of a folder as Markdown, without the hub's metadata block and the pictures that lie beside it.

    Empty where there is none.
    """
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    return re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text).strip()


def serve(
    generator: Generator, host: str = "127.0.0.1", port: int = 7860, *, card: str = "", share: bool = False
) -> Any:
    """Start the page in threads of its own and return it; `block_thread()` waits, `close()` ends it."""
    page = build_page(generator, card)
    page.launch(
        server_name=host,
        server_port=port,
        share=share,
        quiet=True,
        prevent_thread_lock=True,
        ssr_mode=False,
        footer_links=["api"],
        show_error=True,
        **look(),
    )
    return page
