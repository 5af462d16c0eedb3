"""The command `dalle-lean demo`."""

import signal
from typing import Annotated, Any, cast

import typer

from dalle_lean.ending import terminate
from dalle_lean.terminal import Device, echo, warn


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or hub id. [default: $DALLE_LEAN_MODEL, else the bundled model]"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port; the next free one if it is taken.", min=1, max=65535)] = 7860,
    scorer: Annotated[
        str, typer.Option(help="Scorer that ranks the pictures, as in `generate`, or the folder of a CLIP.")
    ] = "clip",
    precision: Annotated[str | None, typer.Option(help="As in `generate`.")] = None,
    device: Device = "auto",
    share: Annotated[bool, typer.Option(help="Ask gradio.live for a public address (needs the network).")] = False,
    auth: Annotated[
        str | None,
        typer.Option(
            metavar="USER:PASSWORD",
            envvar="DALLE_LEAN_AUTH",
            help="Require this login; in the environment, other users of this machine cannot read it.",
        ),
    ] = None,
    root_path: Annotated[
        str | None, typer.Option(help="Path under which a proxy serves the page, such as /dalle.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Draw with the engine at this address (see `serve`).")
    ] = None,
    api: Annotated[bool, typer.Option(help="Offer programs the endpoint /draw.")] = True,
) -> None:
    """Serve the prompt page until Ctrl+C."""
    signal.signal(signal.SIGTERM, terminate)
    from dalle_lean.devices import pick_device
    from dalle_lean.errors import UserError
    from dalle_lean.io.model_folder import find_model
    from dalle_lean.require import require

    folder = find_model(model) if serve is None else None
    echo("starting the prompt page ...")
    require("gradio", extra="demo")
    from demo import progress_views as views
    from demo import server as page_server
    from demo.server import free_port, plain_card, read_auth, read_card, read_root_path
    from demo.service.drawing_service import DrawingService
    from inference import Generator

    login = read_auth(auth)
    free_port(host, port)  # before anything is loaded
    if folder is None:
        assert serve is not None
        for option, value, default in (
            ("--model", model, None),
            ("--scorer", scorer, "clip"),
            ("--precision", precision, None),
            ("--device", device, "auto"),
        ):
            if value != default:
                raise UserError(f"{option} {value}: with --serve, pass this to `dalle-lean serve` instead")
        from demo.serve.client import RemoteService

        echo(f"asking the engine at {serve} ...")
        remote = RemoteService(serve, echo)
        card = plain_card(remote.card)
        service: DrawingService = remote
    else:
        echo("loading the model and measuring this machine's speed ...")
        where, chosen = pick_device(device), cast(Any, precision)
        service = DrawingService.load(lambda: Generator.from_folder(folder, where, chosen, scorer))
        card = read_card(folder)
    echo(views.default_count(service))
    server = page_server.serve(
        *(service, host, port), card=card, share=share, auth=login, root_path=read_root_path(root_path), api=api
    )
    if server.server_port != port:
        echo(f"port {port} is taken; using {server.server_port}")
    echo(f"the prompt page is at {server.local_url} (Ctrl+C ends it)")
    if server.share_url:
        echo(f"public for a week: {server.share_url}")
    elif share:
        warn("gradio.live gave no public address; check the network connection")
    page_server.wait(server)
