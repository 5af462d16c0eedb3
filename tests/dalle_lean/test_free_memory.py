"""Memory that can be taken: the machine's, within the limits of a container."""

import pytest
import torch

from dalle_lean.free_memory import free_bytes, free_ram_bytes


def put(group, **values):
    group.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (group / name.replace("memory_", "memory.")).write_text(f"{value}\n")


def test_it_is_less_than_the_machine_has():
    assert 2**24 < free_bytes(torch.device("cpu")) < 2**50


def test_a_containers_limit_counts_and_copies_of_files_do_not(tmp_path):
    everything = free_ram_bytes(tmp_path)
    put(tmp_path, memory_max="max", memory_current=1000)
    assert free_ram_bytes(tmp_path) == pytest.approx(everything, rel=0.2)
    put(tmp_path, memory_max=5000)
    assert free_ram_bytes(tmp_path) == 4000
    put(tmp_path, memory_stat="anon 300\ninactive_file 700")
    assert free_ram_bytes(tmp_path) == 4700
    put(tmp_path, memory_current=6000)
    assert free_ram_bytes(tmp_path) == 0


def test_the_tightest_of_the_groups_around_a_process_counts(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/service/worker\n")
    put(tmp_path / "groups" / "service", memory_max=5000, memory_current=1000)
    put(tmp_path / "groups" / "service" / "worker", memory_max=9000, memory_current=1000)
    put(tmp_path / "groups" / "another", memory_max=10, memory_current=10)
    assert free_ram_bytes(tmp_path / "groups", own) == 4000


def test_groups_of_version_1_count(tmp_path):
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/a\n4:memory:/job\n")
    put(tmp_path / "groups" / "memory", memory_limit_in_bytes=2**63 - 4096, memory_usage_in_bytes=1000)
    put(tmp_path / "groups" / "memory" / "job", memory_limit_in_bytes=5000, memory_usage_in_bytes=1000)
    put(tmp_path / "groups" / "memory" / "job", memory_stat="inactive_file 1\ntotal_inactive_file 20")
    assert free_ram_bytes(tmp_path / "groups", own) == 4020
