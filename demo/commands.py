"""`dalle-lean demo`."""

from typing import Annotated

import typer

from dalle_lean.terminal import Device, say


def demo(
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub id. Default: $DALLE_LEAN_MODEL, else the bundled model.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port.", min=1, max=65535)] = 7860,
    device: Device = "auto",
    share: Annotated[bool, typer.Option(help="Ask gradio.live for a public address (needs the network).")] = False,
) -> None:
    """Serve the prompt page until Ctrl+C."""
    from dalle_lean.folder import find_model
    from demo.server import check_port, read_card, serve
    from inference import Generator

    check_port(host, port)
    say("loading the model ...")
    folder = find_model(model)
    generator = Generator.from_folder(folder, device=device)
    server = serve(generator, host, port, card=read_card(folder), share=share)
    say(f"the prompt page is at {server.local_url} (Ctrl+C ends it)")
    server.block_thread()
