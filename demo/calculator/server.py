"""The calculator as a page by itself."""

import os
from typing import Any

import gradio as gr

from demo.calculator.page import add_calculator
from demo.server import free_port, launch


def serve(name: str = "paper", host: str = "127.0.0.1", port: int = 7860) -> Any:
    """Start it on a free port from `port` on and return it; `block_thread()` waits, `close()` ends it.

    name: of the model that it opens with.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # otherwise Gradio asks other hosts for its latest version
    with gr.Blocks(title="dalle_lean calculator", analytics_enabled=False) as page:
        add_calculator(name)
    return launch(page, host, free_port(host, port), footer_links=[])
