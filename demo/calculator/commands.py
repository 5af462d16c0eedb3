"""The command `dalle-lean calculator`: what training costs."""

import dataclasses
import json as json_format
from typing import Annotated

import typer

from dalle_lean.errors import UserError
from dalle_lean.terminal import echo


def calculator(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Recipe or TOML file, model folder, or one of: bert-base, bert-large, t5-small, t5-base, t5-large, "
            "t5-3b, t5-11b, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt3, gpt-j, dalle-12b.",
        ),
    ] = "paper",
    batch: Annotated[
        int | None,
        typer.Option(help="Samples per step. [default: the recipe's micro-batch, else 1]", show_default=False),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, bf16, fp16, bf16-weights. [default: the recipe's, else fp32]", show_default=False),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="lamb8bit, lamb, adamw, adamw8bit, muon. [default: the recipe's, else lamb8bit]", show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, or cpu, where host and device are one. [default: cuda]")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="Such as reversible,samples=1,loss_tokens=128. [default: the recipe's]")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Such as 12GB: the largest batch, and without --plan the fastest that fits.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens per sample, for published models. [default: all]", show_default=False)
    ] = None,
    shared_blocks: Annotated[
        int | None, typer.Option(help="Sets of weights that the layers share. [default: the model's]")
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="TFLOP/s of the device; adds the time of a step.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON, in bytes and FLOP.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Serve it as a page with switches, until Ctrl+C.")] = False,
    host: Annotated[str, typer.Option(help="With --page: address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --page: TCP port, or the next free one.", min=1, max=65535)] = 7860,
) -> None:
    """Show what a training step costs: parameters, memory by kind on device and host, arithmetic."""
    from dalle_lean.memory.plan_search import parse_bytes, parse_plan
    from dalle_lean.memory.report import report_cost, report_lines
    from dalle_lean.require import require
    from training.run.subjects import find_subject

    if page:
        others = (batch, precision, optimizer, device, plan, budget, tokens, shared_blocks, tflops)
        if json or any(value is not None for value in others):
            raise UserError("--page takes MODEL, --host and --port only: the rest is set on the page")
        require("gradio", extra="demo")
        from demo.server import serve_calculator, wait

        server = serve_calculator(model, host, port)
        echo(f"the calculator is at {server.local_url} (Ctrl+C ends it)")
        wait(server)
        return
    chosen = None if plan is None else parse_plan(plan)
    budget_bytes = None if budget is None else parse_bytes(budget)
    fields = {"tokens": tokens, "shared_blocks": shared_blocks}
    given = {name: value for name, value in fields.items() if value is not None}
    subject = find_subject(model, precision=precision, optimizer=optimizer, plan=chosen, model=given)
    setup = dataclasses.replace(
        subject.setup, batch=subject.setup.batch if batch is None else batch, device=device or "cuda"
    )
    report = report_cost(subject, setup=setup, plan=chosen, budget_bytes=budget_bytes, tflops=tflops)
    for line in [json_format.dumps(report.to_dict())] if json else report_lines(report):
        echo(line)
