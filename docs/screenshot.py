"""Take the prompt page's pictures: demo.png, demo-drawing.png and demo-phone.png; or a run's page: run-page.png.

    python docs/screenshot.py [--out docs] [--prompt "a red heart"] [--seed 0] [--model FOLDER]
    python docs/screenshot.py [--out docs] --run-page http://127.0.0.1:7870

Needs Debian's chromium and `pip install playwright`; nothing is downloaded.
"""

import argparse
import shutil
import urllib.parse
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from dalle_lean.devices import pick_device
from dalle_lean.io.model_folder import find_model
from demo.server import free_port, read_card, serve
from demo.service.drawing_service import DrawingService
from inference import Generator

# Without these Chromium looks for hosts of its own at every start.
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", *QUIET)
TIMEOUT_MS = 180_000
DESKTOP = {"width": 1200, "height": 640}
PHONE = {"width": 390, "height": 844}
ALL_LOADED = "[...document.querySelectorAll('#gallery img')].every(image => image.complete && image.naturalWidth > 0)"


def take(page: Any, path: Path) -> None:
    """Save the page as a small PNG of 256 colours."""
    page.screenshot(path=path, full_page=True)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


def take_drawing(page: Any, path: Path) -> None:
    """While pictures grow, about half done."""
    page.wait_for_function("parseInt(document.querySelector('.percent')?.innerText) >= 45", timeout=TIMEOUT_MS)
    take(page, path)


def take_done(page: Any, path: Path) -> None:
    """When the best are there."""
    page.locator("#gallery img").first.wait_for(timeout=TIMEOUT_MS)
    page.wait_for_function(ALL_LOADED, timeout=TIMEOUT_MS)
    page.wait_for_timeout(500)  # the last of the fading
    take(page, path)


def take_run(browser: Any, url: str, path: Path) -> None:
    """A run's page with its plots and pictures."""
    page = browser.new_page(viewport=DESKTOP)
    page.goto(url, timeout=TIMEOUT_MS)
    page.wait_for_function("() => document.body.dataset.ready", timeout=TIMEOUT_MS)
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({**DESKTOP, "height": height})  # plots are drawn when they come into view
    page.wait_for_function("() => [...document.querySelectorAll('.plot')].every(plot => plot.firstElementChild)")
    page.wait_for_timeout(2000)  # each plot paints a moment later
    take(page, path)


def main() -> None:
    """Serve, look, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--prompt", default="a red heart")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="model folder (default: the bundled one)")
    parser.add_argument("--run-page", metavar="URL", help="of a run's page")
    options = parser.parse_args()
    if options.run_page:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
            take_run(browser, options.run_page, options.out / "run-page.png")
            browser.close()
        return
    folder, device = find_model(options.model), pick_device("auto")
    server = serve(
        DrawingService.load(lambda: Generator.from_folder(folder, device)),
        port=free_port("127.0.0.1", 7860),
        card=read_card(folder),
    )
    url = f"{server.local_url}?{urllib.parse.urlencode({'prompt': options.prompt, 'seed': options.seed})}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        desktop = browser.new_page(viewport=DESKTOP)
        desktop.goto(url, timeout=TIMEOUT_MS)
        take_drawing(desktop, options.out / "demo-drawing.png")
        take_done(desktop, options.out / "demo.png")
        phone = browser.new_page(viewport=PHONE)
        phone.goto(url, timeout=TIMEOUT_MS)
        take_done(phone, options.out / "demo-phone.png")
        browser.close()
    server.close(verbose=False)


if __name__ == "__main__":
    main()
