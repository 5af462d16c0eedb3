"""How much memory is free now."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Memory of a device that this process can allocate now; for the CPU `free_ram_bytes`."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return free_ram_bytes()


def free_ram_bytes(control_groups: Path | None = None, own_groups: Path = OWN_GROUPS) -> int:
    """RAM that this process can allocate now without swapping, within the limits of its container."""
    return max(0, min([free_on_machine(), *free_in_groups(control_groups or CONTROL_GROUPS, own_groups)]))


def free_on_machine() -> int:
    """The kernel's estimate of available RAM; half of all RAM if it gives none."""
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def free_in_groups(control_groups: Path, own_groups: Path) -> Iterator[int]:
    """Bytes left under the limit of each control group (version 2 or 1) that contains this process."""
    paths = {"": "/", "memory": "/"}  # a container sees its own group as the root
    try:
        for line in own_groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths.update({name: path for name in controllers.split(",") if name in paths})
    except (OSError, ValueError):  # no such file on other systems
        pass
    for controller, limit, used in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        root = control_groups / controller
        own = root / paths[controller].lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            try:
                limit_bytes, used_bytes = int((folder / limit).read_text()), int((folder / used).read_text())
            except (OSError, ValueError):  # no group, or one without a limit ("max")
                continue
            yield limit_bytes - used_bytes + reclaimable_bytes(folder)


def reclaimable_bytes(group: Path) -> int:
    """Page cache in a group's usage, which the kernel reclaims before it kills a process."""
    try:
        stat = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        return int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
    except (OSError, ValueError):
        return 0
