"""Each check passes, fails, and says how to fix the problem."""

import dataclasses
import socket
from pathlib import Path

import pytest
import torch

from dalle_lean.errors import UserError
from dalle_lean.io.files import sha256_file
from preprocessing.shards.manifest import read_dataset_info
from tests.training.conftest import write_shards
from training.run.recipe import Recipe
from training.swarm.config import SwarmSection, SwarmSettings, WireSection, write_settings
from training.swarm.preflight.batch_size import Memory, free_memory, plan_batch
from training.swarm.preflight.checks import (
    OK,
    PROBLEM,
    WARNING,
    check_bundled_model,
    check_clock,
    check_data,
    check_device,
    check_disk,
    check_fingerprint,
    check_memory,
    check_numba,
    check_port,
    check_reach,
    check_torch,
    check_versions,
    installed_versions,
)
from training.swarm.preflight.survey import JoinOptions, addresses_of, read_files, survey

CPU = torch.device("cpu")
GOOD = {"Python": "3.12.1", "torch": "2.12.0+cu128", "hivemind": "1.1.12", "numpy": "2.3.5"}
MODEL = {"image_side": 4, "image_vocab_size": 32, "text_vocab_size": 300, "text_len": 12, "hidden_size": 32}
MODEL |= {"num_layers": 3, "num_heads": 2, "head_size": 16}


@pytest.fixture
def settings(shards):
    """Settings of a run on `shards`."""
    swarm = SwarmSection(data=str(shards), data_fingerprint=sha256_file(shards / "dataset.json"))
    return SwarmSettings(swarm=swarm, recipe=Recipe(model=MODEL))


def test_what_is_installed_here_is_well():
    assert check_versions(installed_versions()).level == OK


@pytest.mark.parametrize(
    ("name", "version", "fix"),
    [
        ("hivemind", None, "pip install 'dalle-lean[training]'"),
        ("numpy", "2.4.0", "numpy<2.4"),
        ("torch", "2.4.1", "torch 2.11"),
        ("Python", "3.10.9", "Python 3.11"),
        ("Python", "3.14.0", "Python 3.11"),
    ],
)
def test_a_version_that_does_not_work_is_named_with_its_fix(name, version, fix):
    check = check_versions({**GOOD, name: version})
    assert check.level == PROBLEM
    assert f"{name} {version or 'missing'}" in check.found
    assert fix in check.fix


def test_another_hivemind_is_only_warned_of():
    assert check_versions(GOOD).level == OK
    assert check_versions({**GOOD, "hivemind": "1.2.0"}).level == WARNING


def test_the_device_is_named():
    assert "cores" in check_device(CPU).found


@pytest.mark.parametrize(
    ("there", "fix"),
    [
        (Memory(device_bytes=10**10, ram_bytes=10**9, shared_bytes=10**10), "more RAM"),
        (Memory(device_bytes=10**9, ram_bytes=10**10, shared_bytes=10**10), "--batch-size"),
        (Memory(device_bytes=10**10, ram_bytes=10**10, shared_bytes=10**3), "--shm-size"),
    ],
)
def test_memory_that_is_missing_is_a_problem(settings, there, fix):
    plan = plan_batch(settings, CPU, free_memory(CPU))
    assert check_memory(plan, free_memory(CPU), CPU).level == OK
    check = check_memory(plan, there, CPU)
    assert check.level == PROBLEM
    assert fix in check.fix


def test_a_disk_without_room_is_a_problem(tmp_path):
    assert check_disk(tmp_path / "not" / "yet", 1000).level == OK
    check = check_disk(tmp_path, 10**18)
    assert check.level == PROBLEM
    assert "--folder" in check.fix


def test_a_folder_that_cannot_be_made_is_a_problem():
    check = check_disk(Path("/proc/nowhere"), 1000)
    assert check.level == PROBLEM
    assert "--folder" in check.fix


def test_the_runs_data_is_read(settings, shards):
    check, found = check_data(settings.swarm.data, settings)
    assert check.level == OK
    assert found is not None
    assert found.name == str(shards)
    assert "120 rows in 4 shards" in check.found


def test_data_that_is_not_there_is_a_problem(settings, tmp_path):
    for source in ("", str(tmp_path / "nowhere")):
        check, found = check_data(source, settings)
        assert check.level == PROBLEM
        assert found is None
        assert "--data" in check.fix


def test_other_data_is_told_apart_by_what_differs(settings, tmp_path):
    other = write_shards(tmp_path / "other", 64)
    check, _ = check_data(str(other), settings)
    assert check.level == PROBLEM
    assert sha256_file(other / "dataset.json")[:12] in check.found
    grid = write_shards(tmp_path / "grid", 64, image_side=5)
    check, _ = check_data(str(grid), settings)
    assert "grid (5, 5), the run has (4, 4)" in check.found


def test_a_damaged_shard_is_a_problem(settings, tmp_path):
    folder = write_shards(tmp_path / "damaged")
    (folder / read_dataset_info(folder).shards[0].file).write_bytes(b"no Parquet")
    swarm = dataclasses.replace(settings.swarm, data_fingerprint=sha256_file(folder / "dataset.json"))
    check, _ = check_data(str(folder), dataclasses.replace(settings, swarm=swarm))
    assert check.level == PROBLEM
    assert "shards verify" in check.fix


@pytest.mark.parametrize(("offset_s", "level"), [(0.1, OK), (-1.5, WARNING), (60.0, PROBLEM), (-3.5, PROBLEM)])
def test_a_clock_that_is_wrong_is_told_from_one_that_is_right(offset_s, level):
    check = check_clock(offset_s)
    assert check.level == level
    assert ("behind" if offset_s > 0 else "ahead") in check.found
    assert "timedatectl" in check.fix


@pytest.mark.parametrize(
    ("mode", "reachable", "level", "word"),
    [
        ("client", None, OK, "client mode, as requested"),
        ("auto", True, OK, "listening"),
        ("auto", False, OK, "client mode: no helper can connect"),
        ("auto", None, OK, "client mode: no helper could try"),
        ("listen", True, OK, "listening"),
        ("listen", False, PROBLEM, "no helper can connect to port 31337"),
        ("listen", None, WARNING, "no helper could try"),
    ],
)
def test_it_is_told_how_others_reach_this_machine_and_why(mode, reachable, level, word):
    check = check_reach(mode=mode, port=31337, reachable=reachable)
    assert check.level == level
    assert word in check.found
    if level != OK:
        assert "open TCP port 31337" in check.fix


def test_a_fingerprint_says_what_differs(settings):
    mine = dataclasses.replace(settings, swarm=dataclasses.replace(settings.swarm, tokenizer_fingerprint="a" * 64))
    assert check_fingerprint(mine, mine, "a" * 64).level == OK
    assert check_fingerprint(mine, None, "a" * 64).level == OK
    theirs = dataclasses.replace(mine, wire=WireSection(compression="fp16"))
    check = check_fingerprint(mine, theirs, "a" * 64)
    assert check.level == PROBLEM
    assert check.found == "swarm.toml differs from the run's in: wire settings"
    check = check_fingerprint(mine, mine, "b" * 64)
    assert check.level == PROBLEM
    assert "is not the run's" in check.found


def test_a_port_that_is_taken_is_a_problem():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        assert check_port(port).level == PROBLEM
    assert check_port(port).level == OK


def test_what_works_here_works():
    for check in (check_torch(CPU), check_numba(), check_bundled_model()):
        assert check.level == OK, check


def test_a_target_is_addresses_or_one_file(tmp_path):
    address = "/ip4/127.0.0.1/tcp/1/p2p/QmNo6TrsacLhMQyKC9wx8BJQYxXDBW8dE8Ef8DRAbY3ggS"
    assert addresses_of([address, address]) == (address, address)
    assert addresses_of(["swarm.toml"]) == ()
    for targets in ([address, "swarm.toml"], ["one.toml", "two.toml"]):
        with pytest.raises(ValueError, match=r"name one swarm\.toml, or addresses"):
            addresses_of(targets)
    with pytest.raises(ValueError, match=r"run's swarm\.toml, its folder .*, or one of its addresses"):
        read_files(tmp_path)


def test_options_that_exclude_each_other_are_refused():
    for options in ({"client": True, "listen": 31337}, {"announce": ("/ip4/203.0.113.5/tcp/31337",)}):
        with pytest.raises(ValueError, match="--announce"):
            JoinOptions(**options)


def test_an_announced_address_has_the_port_that_is_listened_on_unless_it_names_another():
    elsewhere = "/ip4/203.0.113.5/tcp/80"
    assert JoinOptions(listen=31337, announce=("203.0.113.5", elsewhere)).announced == [
        "/ip4/203.0.113.5/tcp/31337",
        elsewhere,
    ]
    for wrong in ("home.example", "/ip4/203.0.113.5", "/nowhere/tcp/80"):
        with pytest.raises(UserError, match=r"203\.0\.113\.5"):
            JoinOptions(listen=31337, announce=(wrong,))


def test_a_port_of_ones_own_that_is_taken_is_refused_before_all_else(settings, tmp_path):
    write_settings(tmp_path / "swarm.toml", settings)
    (tmp_path / "tokenizer.json").write_text("{}")
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--listen {port}: another program uses this port"):
            survey([str(tmp_path)], JoinOptions(listen=port), lambda check: None)


def test_a_run_without_a_helper_that_answers_is_a_problem_and_the_rest_is_still_checked(settings, tmp_path):
    write_settings(tmp_path / "swarm.toml", settings)
    (tmp_path / "tokenizer.json").write_text("{}")
    found = survey([str(tmp_path)], JoinOptions(folder=tmp_path / "folder"), lambda check: None)
    names = [check.name for check in found.checks]
    assert names == ["versions", "device", "memory", "disk", "data", "swarm", "clock", "reach", "fingerprint"]
    assert [check.name for check in found.problems] == ["swarm", "fingerprint"]
    assert found.port == 0
