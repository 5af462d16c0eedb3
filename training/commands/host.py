"""The commands `dalle-lean host` and `dalle-lean rollback`."""

import dataclasses
import ipaddress
import math
import shlex
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dalle_lean.errors import UserError
from dalle_lean.terminal import OTHER_DESTINATIONS, Device, begin_loading, echo, notice, progress_bar, warn
from training.commands.options import (
    DEFAULT_PAGE_ADDRESS,
    Code,
    Export,
    PageAddress,
    PromptPage,
    RunDir,
    TokenizerFile,
    check_page_options,
)
from training.swarm.config import AGGREGATIONS, SWARM_TOML, SwarmSection, TimingSection, WireSection

HELPER_OPTIONS = ("run_dir", "port", "announce", "listen", "helper_of", "code", "peer_list")
PAGE_OPTIONS = ("page", "page_address", "export", "prompt_page")
MACHINE_OPTIONS = (*HELPER_OPTIONS, *PAGE_OPTIONS, "donors", "vqgan", "publish", "device", "admission")
"""Options that may change while a run exists."""


def host(
    context: typer.Context,
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of the run; the same command continues it.")
    ],
    data: Annotated[
        str | None, typer.Option(help="Shards written by `preprocess`: folder or URL. Required for a new run.")
    ] = None,
    config: Annotated[str, typer.Option(help="Recipe: a name or a TOML file.")] = "together",
    init: Annotated[
        Path | None,
        typer.Option(help="Model folder to start from, in place of new weights; its model replaces the recipe's."),
    ] = None,
    tokenizer: TokenizerFile = None,
    vqgan: Annotated[
        Path | None,
        typer.Option(
            help="VQGAN that made the codes; it goes into the checkpoints' model folders. "
            "[default: the bundled model's, if it made them]"
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run: lower-case letters, digits, hyphens. [default: the folder's]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="TCP port of the first helper, with the next ones for the other peers; 0 picks free ports. "
            "[default: 31337, or the run's previous ports]",
            min=0,
            max=65500,
        ),
    ] = None,
    announce: Annotated[
        str | None, typer.Option(help="IPv4 address at which others reach this machine. [default: detected]")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="IPv4 address to listen on. [default: 0.0.0.0]")] = None,
    helper_of: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Address of a run hosted elsewhere: only run another helper for it."),
    ] = None,
    donors: Annotated[
        int | None,
        typer.Option(
            help="Peers that keep the state; with two, either may fail. [default: 1, or the run's previous number]",
            min=1,
            max=8,
        ),
    ] = None,
    publish: Annotated[
        str | None,
        typer.Option(
            metavar="DESTINATION",
            help=f"Keep the newest checkpoint, a model folder with a card, at hf://OWNER/NAME, {OTHER_DESTINATIONS}. "
            "[default: the run's previous one; '' stops publishing]",
        ),
    ] = None,
    admission: Annotated[
        str | None,
        typer.Option(
            help="Who may join: open (anyone, at a limited rate), invite (with a code from `invite`) or list. "
            "[default: open, or the run's previous one]"
        ),
    ] = None,
    peer_list: Annotated[
        Path | None, typer.Option(help="For --admission list: file of peer ids, one per line.")
    ] = None,
    code: Code = None,
    min_peers: Annotated[int, typer.Option(help="Trainers to wait for before the first step.", min=1)] = 1,
    mode: Annotated[
        str,
        typer.Option(
            help="gradients: average at every step; diloco: many local steps between averages, for slow links."
        ),
    ] = "gradients",
    compression: Annotated[str, typer.Option(help="Wire format of averaged tensors: 8bit, fp16 or fp32.")] = "8bit",
    aggregation: Annotated[
        str, typer.Option(help=f"Averaging rule: {', '.join(AGGREGATIONS)}; all but mean withstand outliers.")
    ] = "centred_clipping",
    power_sgd_rank: Annotated[
        int, typer.Option(help="Compress gradients to this rank (PowerSGD); 0 disables it.", min=0)
    ] = 0,
    matchmaking_time: Annotated[
        float, typer.Option(help="Seconds for peers to find each other; 2 or 3 suffice on a local network.", min=0.5)
    ] = 15.0,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps; the warm-up keeps its share. [default: the recipe's]", min=1)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per step, over all peers. [default: the recipe's]", min=1)
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate. [default: the recipe's]")] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the initial weights and the order of the data. [default: the recipe's]", min=0),
    ] = None,
    device: Device = "cpu",
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--no-page", help="Also serve the run's page; needs the extra demo. [default: as the run did before]"
        ),
    ] = None,
    page_address: PageAddress = DEFAULT_PAGE_ADDRESS,
    export: Export = None,
    prompt_page: PromptPage = None,
) -> None:
    """Host a run on this machine: two helpers that volunteers connect to, and a donor that keeps the state.

    With --helper-of, only another helper of a run hosted elsewhere. Prints the command for volunteers. Does not train:
    `dalle-lean join` does, on this machine too. Ctrl+C stops the host; the same command, or RUN_DIR alone, continues.
    """
    check_page_options(bool(page), page_address, export, prompt_page)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes start with it ignored
    begin_loading()
    from dalle_lean.devices import pick_device
    from dalle_lean.io.publish import check_destination
    from dalle_lean.require import require
    from dalle_lean.tokenizer import find_tokenizer
    from training.data.catalog import is_url
    from training.run.folder import run_folder
    from training.run.recipe import load_recipe

    for module in ("hivemind", "psutil", "pyarrow"):
        require(module, extra="training")
    from training.swarm.host.host_config import HostConfig
    from training.swarm.host.publisher import publishing
    from training.swarm.host.run_setup import make_helper, make_run, previous_config
    from training.swarm.host.supervisor import host_run, wait_for_ports
    from training.swarm.network.addresses import peer_of
    from training.swarm.network.dht import prepare_process

    if publish:
        check_destination(publish, "model")
        publish = publish if is_url(publish) else str(Path(publish).resolve())  # for a start in another folder
    listed = None if peer_list is None else str(peer_list.resolve())
    machine: dict[str, Any] = {"port": port, "announce": announce, "listen": listen, "peer_list": listed}
    helper_of = helper_of or list(previous_config(run_dir).helper_of)
    if helper_of and (given := options_except(context, HELPER_OPTIONS)):
        raise UserError(f"--helper-of runs a helper of another host's run, whose settings apply: leave out {given}")
    for address in helper_of:
        peer_of(address)
    if code is not None and not helper_of:
        raise UserError("--code is for a helper of another host's run: name that run's address with --helper-of")
    if data is None and (run_dir / SWARM_TOML).exists() and (given := options_except(context, MACHINE_OPTIONS)):
        raise UserError(
            f"without --data, the run in {run_dir} continues unchanged: leave out {given}, or add its --data"
        )
    recipe = load_recipe(config, needs_model=init is None).override(
        steps=steps, batch_size=batch_size, lr=lr, seed=seed
    )
    picked_device = str(pick_device(device))
    page_options = page_options_of(page, page_address, export, prompt_page, before=previous_config(run_dir).page)
    served_at = page_options[2] if "--page" in page_options else None
    with run_folder(run_dir):
        if served_at:  # fail here, not in the page's log
            from training.swarm.observe.page.server import listen_at

            listen_at(served_at).close()
        if page_options:
            from training.swarm.observe.page.site import BOKEH, bokeh_file

            bokeh_file(BOKEH[0])
        if helper_of:
            prepare_process()
            settings = make_helper(run_dir, helper_of, warn, code=code or "", **machine)
        else:
            settings = make_run(
                run_dir,
                data,
                recipe,
                init=init,
                tokenizer=find_tokenizer(tokenizer),
                vqgan=vqgan,
                name=name,
                min_peers=min_peers,
                wire=WireSection(
                    mode=mode, compression=compression, aggregation=aggregation, power_sgd_rank=power_sgd_rank
                ),
                timing=TimingSection(
                    matchmaking_time_s=matchmaking_time,
                    request_timeout_s=min(TimingSection.request_timeout_s, matchmaking_time / 2),
                ),
                admission=admission,
                donors=donors,
                publish=publish,
                on_notice=warn,
                **machine,
            )
        host_config = dataclasses.replace(HostConfig.load(run_dir), page=page_options)
        host_config.save(run_dir)
        addresses = [host_config.address(run_dir, helper) for helper in host_config.helpers]

        def greet() -> None:
            ports = ", ".join(str(port) for port in host_config.ports.values())
            announced = ipaddress.ip_address(host_config.announce)
            echo(f"the run {settings.swarm.name} is ready (TCP ports {ports}); {who_joins(announced)}")
            echo(how_to_join(settings.swarm, [*addresses, *helper_of], None if helper_of else run_dir))
            if not announced.is_loopback and not announced.is_global:
                warn(
                    f"{announced} is a private address: for volunteers outside your network, forward the TCP ports "
                    f"{ports} to this machine and set --announce to its public address"
                )
            if served_at:
                echo(f"the run's page is at http://{served_at}")
            if not is_url(settings.swarm.data):
                warn(f"every volunteer needs a copy of {settings.swarm.data}, named with --data")

        wait_for_ports(run_dir, host_config, warn)
        echo(f"starting {len(host_config.ports)} peers ...")
        with (
            publishing(run_dir, host_config.publish, warn),
            progress_bar(f"run {settings.swarm.name}", "steps") as on_progress,
        ):
            end = host_run(
                run_dir,
                settings,
                device=picked_device,
                page=page_options,
                on_ready=greet,
                on_progress=on_progress,
                on_notice=warn,
                on_wait=notice,
            )
    kept = "" if end.checkpoint is None else f"; the model is in {run_dir}/checkpoints/step-{end.checkpoint:06d}/model"
    echo(f"finished at step {end.step}, {end.note}{kept}")


def who_joins(announced: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if announced.is_loopback:
        return "other machines need another --announce; on this machine, join with"
    return "any machine joins with"


def page_options_of(
    page: bool | None, page_address: str, export: Path | None, prompt_page: str | None, *, before: Sequence[str]
) -> list[str]:
    """The options of `monitor` for the run's page, `--page` first with its address; `before` if none is given."""
    given = ["--page", "--page-address", page_address] if page else []
    given += [] if export is None else ["--export", str(export.resolve())]
    given += [] if prompt_page is None else ["--prompt-page", prompt_page]
    return list(before) if page is None and not given else given


def how_to_join(swarm: SwarmSection, addresses: Sequence[str], run_dir: Path | None) -> str:
    """The command for volunteers and, if they need a code, the one that makes it.

    `run_dir` is the folder of a run hosted here, None for one hosted elsewhere, whose host makes the codes.
    """
    command = f"    dalle-lean join {swarm.join_arguments(addresses)}"
    if not swarm.run_key or swarm.admission != "invite":
        return command
    source = "its host" if run_dir is None else f"dalle-lean invite {shlex.quote(str(run_dir))}"
    return f"{command} --code CODE\nwith a CODE from {source}"


def options_except(context: typer.Context, known: Sequence[str]) -> str:
    """The options on the command line other than `known`, separated by commas."""
    return ", ".join(
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in known and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    )


def rollback(
    run_dir: RunDir,
    to: Annotated[int | None, typer.Option(help="Step to go back to.")] = None,
) -> None:
    """Roll a run back to one of its checkpoints, or list them if --to is not given. Stop `dalle-lean host` first."""
    from training.run.folder import run_folder
    from training.swarm.host.checkpoints import FOLDER, GIVEN_UP, list_checkpoints
    from training.swarm.host.checkpoints import rollback as roll_back
    from training.swarm.host.run_setup import hosted_settings

    before = hosted_settings(run_dir)
    if to is None:
        found = list_checkpoints(run_dir, warn)
        if not found:
            echo(f"{run_dir} has no checkpoint yet")
        for checkpoint in found:
            loss = f"{checkpoint.heldout_loss:10.4g}" if math.isfinite(checkpoint.heldout_loss) else f"{'-':>10}"
            saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.saved_at))
            echo(f"step {checkpoint.step:7}  held-out loss {loss}  {saved}  {checkpoint.run}")
        return
    with run_folder(run_dir):
        settings = roll_back(run_dir, to, warn)
    echo(
        f"the run is back at step {to} and goes on as {settings.swarm.name}: start it with "
        f"dalle-lean host {shlex.quote(str(run_dir))}. "
        f"Peers still in {before.swarm.name} are notified and rejoin; later checkpoints are in "
        f"{run_dir / FOLDER}/{GIVEN_UP}-{before.swarm.name}"
    )
