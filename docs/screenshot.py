"""Take docs/demo.png: serve the prompt page, have headless Chromium draw a prompt, save what it shows.

    python docs/screenshot.py docs/demo.png --prompt "a red heart" --seed 0 [--model FOLDER]

Needs Debian's chromium and `pip install playwright`; nothing is downloaded.
"""

import argparse
import shutil
import socket
import urllib.parse
from pathlib import Path

from playwright.sync_api import sync_playwright

from dalle_lean.folder import find_model
from demo.server import read_card, serve
from inference import Generator

# Without these Chromium looks for hosts of its own at every start.
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", *QUIET)
TIMEOUT_MS = 180_000


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def take(url: str, path: Path, width: int, height: int) -> None:
    """Open `url`, wait for pictures, and save the window as a PNG."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(url, timeout=TIMEOUT_MS)
        page.locator("#gallery img").first.wait_for(timeout=TIMEOUT_MS)
        page.wait_for_function(
            "[...document.querySelectorAll('#gallery img')].every(image => image.complete && image.naturalWidth > 0)",
            timeout=TIMEOUT_MS,
        )
        page.screenshot(path=path, full_page=True)
        browser.close()


def main() -> None:
    """Serve, look, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompt", default="a red heart")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="model folder (default: the bundled one)")
    parser.add_argument("--width", type=int, default=1120, help="of the window, pixels")
    parser.add_argument("--height", type=int, default=800, help="of the window, pixels; the page may be longer")
    options = parser.parse_args()
    folder = find_model(options.model)
    server = serve(Generator.from_folder(folder), port=free_port(), card=read_card(folder))
    query = urllib.parse.urlencode({"prompt": options.prompt, "seed": options.seed})
    take(f"{server.local_url}?{query}", options.out, options.width, options.height)
    server.close()


if __name__ == "__main__":
    main()
