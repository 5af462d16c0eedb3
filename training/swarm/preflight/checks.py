"""Checks of this machine, with or without a run to join; each says what it found and how to fix it."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dalle_lean.errors import UserError
from dalle_lean.io.model_folder import bundled_model
from dalle_lean.io.remote_io import Patience
from dalle_lean.words import counted, human_bytes
from preprocessing.shards.files import DamagedShard
from preprocessing.shards.manifest import Counts, DatasetInfo
from training.data.catalog import ShardSet, find_shards
from training.data.reader import READ_ROWS, read_rows
from training.swarm.config import PROTOCOL, SwarmSettings
from training.swarm.preflight.batch_size import BatchPlan, Memory, free_memory

OK, WARNING, PROBLEM = "ok", "warning", "problem"
PACKAGES = ("torch", "hivemind", "numpy", "pyarrow")
TESTED_HIVEMIND = "1.1."
MAX_CLOCK_OFFSET_S = 3.0
"""hivemind refuses records that are further in the future."""
NOTED_CLOCK_OFFSET_S = 1.0
SPARE_DISK_BYTES = 200_000_000
"""For the log, the tokenizer, the position in the data and compiled kernels."""
SHORT_PATIENCE = Patience(timeout_s=20, give_up_s=20)
MIN_RAM_BYTES = 2_000_000_000
"""For a tiny model and hivemind's processes."""
INSTALL = "pip install 'dalle-lean[training]'"


@dataclass(frozen=True)
class Check:
    """A finding; unless it is ok, `fix` says how to fix it."""

    name: str
    level: str
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.level == OK or self.fix


def installed_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that a swarm needs; None for a missing one."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def release(version: str) -> tuple[int, ...]:
    """The major and minor version."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def check_versions(versions: Mapping[str, str | None]) -> Check:
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    found = f"{found}; protocol {PROTOCOL}"
    known = {name: version for name, version in versions.items() if version is not None}
    fix = ""
    if len(known) < len(versions):
        fix = INSTALL
    elif not (3, 11) <= release(known["Python"]) < (3, 14):
        fix = "use Python 3.11, 3.12 or 3.13"
    elif release(known["torch"]) < (2, 11):
        fix = "install torch 2.11 or newer: pip install --upgrade torch"
    elif release(known["numpy"]) >= (2, 4):
        fix = "hivemind's 8-bit compression fails with this numpy: pip install 'numpy<2.4'"
    elif not known["hivemind"].startswith(TESTED_HIVEMIND):
        return Check("versions", WARNING, found, f"only hivemind {TESTED_HIVEMIND}x is tested: {INSTALL}")
    return Check("versions", PROBLEM if fix else OK, found, fix)


def check_device(device: torch.device) -> Check:
    """Describe the device that this machine computes on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16"
        found = f"{properties.name} with {human_bytes(properties.total_memory)}, {bf16}; {cores} cores"
        return Check("device", OK, found)
    if shutil.which("nvidia-smi") and not torch.cuda.is_available():
        return Check(
            "device",
            WARNING,
            f"CPU with {cores} cores; an NVIDIA driver is installed, but torch {torch.__version__} finds no GPU",
            "run nvidia-smi: if it shows the GPU, install a torch built for its CUDA version",
        )
    unused = "; this machine has a GPU: use it with --device cuda" if torch.cuda.is_available() else ", no CUDA device"
    return Check("device", OK, f"CPU with {cores} cores{unused}")


def check_memory(plan: BatchPlan, free: Memory, device: torch.device) -> Check:
    """Whether the memory for a step is free."""
    needed, fix = plan.needed, ""
    memory = f"{human_bytes(needed.ram_bytes)} of {human_bytes(free.ram_bytes)} RAM"
    if device.type == "cuda":
        memory = f"{human_bytes(needed.device_bytes)} of {human_bytes(free.device_bytes)} on the GPU, {memory}"
    found = f"needs {memory}, for {counted(plan.samples_at_once, 'sample')} at once ({plan.memory.precision})"
    if needed.ram_bytes > free.ram_bytes:
        fix = "end other programs, or use a machine (or container) with more RAM"
    elif needed.device_bytes > free.device_bytes:
        fix = "end other programs on the GPU, or set a smaller --batch-size or --precision bf16"
    elif needed.shared_bytes > free.shared_bytes:
        shared, left = human_bytes(needed.shared_bytes), human_bytes(free.shared_bytes)
        found += f"; {shared} of it shared, but /dev/shm has only {left} left"
        fix = "give the container more shared memory: docker run --shm-size=8g, or --ipc=host"
    return Check("memory", PROBLEM if fix else OK, found, fix)


def check_disk(folder: Path, needed_bytes: int) -> Check:
    """Whether `folder`, which need not exist yet, is writable and its disk has enough space."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Check("disk", PROBLEM, f"{existing} is not writable", "name another folder with --folder")
    needed_bytes += SPARE_DISK_BYTES
    free = shutil.disk_usage(existing).free
    found = f"needs {human_bytes(needed_bytes)} of {human_bytes(free)} free in {folder}"
    if needed_bytes > free:
        return Check("disk", PROBLEM, found, "free some space there, or name a folder on another disk with --folder")
    return Check("disk", OK, found)


def check_data(source: str, settings: SwarmSettings | None = None) -> tuple[Check, ShardSet | None]:
    """Whether `source` holds readable shards of the run; returns the shards, too, unless there is a problem."""
    codes = codes_of(settings) if settings is not None else None
    try:
        if not source:
            raise UserError("the run does not name its data")
        shards = find_shards(source, codes=codes, patience=SHORT_PATIENCE)
        if settings is not None:
            check_same_data(shards, settings)
        rows = next(read_rows(shards, 0, 0, READ_ROWS), None)
        if not rows:
            raise DamagedShard(f"{shards.paths[0]} holds no rows")
    except DamagedShard as damage:
        fix = "copy it again; dalle-lean shards verify FOLDER finds further damage"
        return Check("data", PROBLEM, str(damage), fix), None
    except (ValueError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())
        return Check("data", PROBLEM, reason, "name a copy of the run's shards with --data FOLDER_OR_URL"), None
    known = [count for count in shards.rows if count is not None]
    size = counted(len(known or shards.paths), "shard")
    size = f"{counted(sum(known), 'row')} in {size}" if known else size
    return Check("data", OK, f"{shards.name}: {size}, {counted(len(rows), 'row')} read"), shards


def codes_of(settings: SwarmSettings) -> DatasetInfo:
    """The meaning of the codes by the run's model, for data sets without dataset.json."""
    config = settings.model
    return DatasetInfo(
        image_side=config.image_side,
        codebook_size=config.image_vocab_size,
        vqgan="",
        picture_side=0,
        counts=Counts(),
        shards=(),
    )


def check_same_data(shards: ShardSet, settings: SwarmSettings) -> None:
    """UserError says how these shards differ from the run's data, if they do."""
    config, info = settings.model, shards.info
    fields = {
        "grid": ((info.image_side,) * 2, (config.image_side,) * 2),
        "codebook": (info.codebook_size, config.image_vocab_size),
        "fingerprint": (shards.fingerprint, settings.swarm.data_fingerprint),
    }
    for name, (ours, theirs) in fields.items():
        if ours != theirs:
            shown = f"{name} {str(ours)[:12]}, the run has {str(theirs)[:12]}"
            raise UserError(f"{shards.name} is other data than the run's: {shown}")


def check_clock(offset_s: float | None) -> Check:
    """Check by how many seconds this clock is behind a helper's, or ahead if negative; None if unknown."""
    if offset_s is None:
        return Check("clock", WARNING, "no helper sent its time", "make sure that this machine's clock is right")
    found = f"{abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} the helper's"
    fix = "synchronize it: sudo timedatectl set-ntp true (for a container: on its host)"
    if abs(offset_s) > MAX_CLOCK_OFFSET_S:
        return Check("clock", PROBLEM, f"{found}; records of the swarm expire by the clock", fix)
    return Check("clock", OK if abs(offset_s) <= NOTED_CLOCK_OFFSET_S else WARNING, found, fix)


def check_reach(*, mode: str, port: int, reachable: bool | None, announced: bool = False) -> Check:
    """Check how others reach this machine.

    Args:
        mode: "listen", "client" or "auto", see JoinOptions.
        port: the port that this machine listens on.
        reachable: whether a helper could connect to it; None if no helper could try.
        announced: whether another address is announced, which no helper tries.
    """
    if mode == "client":
        return Check("reach", OK, "client mode, as requested: this machine accepts no connections")
    if reachable:
        return Check("reach", OK, f"listening: a helper can connect to port {port}")
    if reachable is None:
        why, level = "no helper could try to reach this machine", WARNING
    else:
        why, level = f"no helper can connect to port {port} (firewall, router)", PROBLEM
    if mode == "listen":
        level = WARNING if announced else level
        fix = f"open TCP port {port} in the firewall and forward it in the router, or use --client"
        return Check("reach", level, why, fix)
    return Check("reach", OK, f"client mode: {why}; this works, but an open port (--listen PORT) helps the others more")


def check_fingerprint(given: SwarmSettings, theirs: SwarmSettings | None, tokenizer_sha256: str) -> Check:
    """Whether this machine and a helper agree on what all peers must share; None if no helper answered."""
    if tokenizer_sha256 != given.swarm.tokenizer_fingerprint:
        return Check(
            "fingerprint",
            PROBLEM,
            f"tokenizer.json ({tokenizer_sha256[:12]}) is not the run's ({given.swarm.tokenizer_fingerprint[:12]})",
            "use the run's tokenizer.json, or join by the run's address, which provides it",
        )
    if theirs is not None and theirs.run_id != given.run_id:
        parts = given.differences(theirs)
        differ = (
            f"differs from the run's in: {', '.join(parts)}" if parts else f"belongs to the run {given.swarm.name!r}"
        )
        return Check("fingerprint", PROBLEM, f"swarm.toml {differ}", "use the run's swarm.toml, or join by its address")
    return Check("fingerprint", OK, f"{given.run_id}: model, data, tokenizer, wire and schedule are the run's")


def check_torch(device: torch.device) -> Check:
    """Whether a matrix product works in each precision, forward and backward."""
    worked, failed = [], ""
    precisions = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cuda":
        precisions["fp16"] = torch.float16
    for name, dtype in precisions.items():
        try:
            factor = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
            [gradient] = torch.autograd.grad((factor @ factor).sum(), factor)
            if float(gradient[0, 0]) == 128:
                worked.append(name)
        except RuntimeError as error:
            failed = f"; {name}: {str(error).splitlines()[0]}"
    found = f"{device} computes {', '.join(worked) or 'nothing'}{failed}"
    if "fp32" in worked:
        return Check("torch", OK if not failed else WARNING, found, "use --precision fp32, which works")
    return Check("torch", PROBLEM, found, f"reinstall torch for this machine's driver: {INSTALL}")


def check_numba() -> Check:
    """Whether the optimizer's compiled step is available."""
    try:
        import dalle_lean.optim.lamb_numba  # noqa: F401
    except Exception as error:  # a broken installation may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Check("numba", WARNING, f"{reason}; the optimizer's step is several times slower without it", INSTALL)
    return Check("numba", OK, "the optimizer's compiled step works")


def check_hivemind() -> Check:
    """Whether a DHT node starts on this machine."""
    try:
        from training.swarm.network.dht import open_dht

        dht = open_dht([], client_mode=False, listen=["/ip4/127.0.0.1/tcp/0"])
        found = f"a DHT node starts on this machine ({len(dht.get_visible_maddrs())} address)"
        dht.shutdown()
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        return Check("hivemind", PROBLEM, reason, f"{INSTALL}; allow its p2pd to run and to use /tmp")
    return Check("hivemind", OK, found)


def check_bundled_model() -> Check:
    """Whether `generate` and `demo` have a model to draw with."""
    try:
        folder = bundled_model()
    except UserError as error:
        return Check("model", WARNING, str(error), "training does not need it")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Check("model", OK, f"the bundled model is in {folder}, {human_bytes(size)}")


def check_port(port: int) -> Check:
    """Whether this machine can listen on it."""
    from training.swarm.network.addresses import port_is_free

    if port_is_free(port):
        return Check("port", OK, f"{port} is free; only a helper of a run can tell whether others can connect")
    return Check("port", PROBLEM, f"another program listens on {port}", "end it, or name another port with --listen")


def check_free_memory(device: torch.device) -> Check:
    """How much memory is free; only a run says how much it needs."""
    free = free_memory(device)
    on_gpu = f"{human_bytes(free.device_bytes)} free on the GPU, " if device.type == "cuda" else ""
    found = f"{on_gpu}{human_bytes(free.ram_bytes)} RAM free, {human_bytes(free.shared_bytes)} of it can be shared"
    if min(free.ram_bytes, free.shared_bytes) < MIN_RAM_BYTES:
        fix = "end other programs; in a container: docker run --shm-size=8g; a run says how much it needs"
        return Check("memory", WARNING, found, fix)
    return Check("memory", OK, found)
