"""docs/host-your-own.md is correct: commands, options, recipe, settings, sizes."""

import inspect
import re
import shlex
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from dalle_lean import Dalle, DalleConfig
from dalle_lean.cli import COMMANDS, load
from training.run.recipe import Recipe, load_recipe
from training.swarm.config import SwarmSettings, TimingSection

GUIDE = (Path(__file__).parents[3] / "docs" / "host-your-own.md").read_text(encoding="utf-8")
PAPER = SwarmSettings(recipe=replace(load_recipe("paper"), model=DalleConfig.paper().to_dict()))


def test_every_command_and_option_is_there():
    lines = re.findall(r"^ {4,}dalle-lean (.*)$", GUIDE.replace("\\\n", " "), flags=re.MULTILINE)
    assert {shlex.split(line)[0] for line in lines} >= {"host", "join", "doctor", "monitor", "rollback", "preprocess"}
    for line in lines:
        word, *words = shlex.split(line, comments=True)
        function = load(COMMANDS[word][0])
        if word == "shards":
            continue
        known = {name.replace("_", "-") for name in inspect.signature(function).parameters}
        assert {option.removeprefix("--") for option in words if option.startswith("--")} <= known, line


def test_a_run_on_published_shards_is_told_which_vqgan_made_them():
    lines = re.findall(r"^ {4,}dalle-lean host (.*)$", GUIDE.replace("\\\n", " "), flags=re.MULTILINE)
    published = [line for line in lines if "--data hf://" in line]
    assert published
    assert all("--vqgan" in line for line in published)


def test_the_recipe_is_one_for_a_swarm():
    [text] = re.findall(r"```toml\n(.*?)```", GUIDE, flags=re.DOTALL)
    settings = SwarmSettings(recipe=Recipe.from_dict(tomllib.loads(text)))
    assert settings.target_batch_size == 1024


def test_every_timing_setting_that_a_message_asks_for_is_there():
    [table] = re.findall(r"\| seen \|.*?\n\n", GUIDE, flags=re.DOTALL)
    named = set(re.findall(r"`(\w+_s)`", table))
    assert {"matchmaking_time_s", "next_chunk_timeout_s", "averaging_timeout_s"} <= named
    assert named <= {field.name for field in fields(TimingSection)}


def test_the_papers_sizes_are_what_they_are_computed_to_be():
    pytest.importorskip("hivemind")
    from training.swarm.preflight.batch_size import state_bytes

    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in Dalle(DalleConfig.paper()).parameters()]
    copy_bytes = sum(size if size >= PAPER.wire.min_eight_bit_numel else 2 * size for size in sizes)
    copies = 1 + 1 / PAPER.wire.average_state_every
    shown = {
        "weights in fp32": f"{4 * sum(sizes) / 1e6:.0f} MB",
        "state: ": f"{state_bytes(PAPER) / 1e6:.0f} MB",
        "one copy": f"{copy_bytes / 1e6:.1f} MB",
        "trainer in client mode": f"{copies * copy_bytes / 1e6:.0f} MB",
        "one of *k*": f"{2 * copies * copy_bytes * 2 / 3 / 1e6:.0f} MB for *k* = 3",
        "host with *n*": f"{10 * copies * copy_bytes / 1e9:.1f} GB for *n* = 10",
        "on the wire": f"{2 * 10 * copies * copy_bytes / PAPER.target_batch_size / 1e6:.1f} MB for *n* = 10",
    }
    for start, size in shown.items():
        [line] = re.findall(rf"^\| {re.escape(start)}.*$", GUIDE, flags=re.MULTILINE)
        assert size in line, (line, size)
