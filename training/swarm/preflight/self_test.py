"""Self-tests of this machine, independent of a run."""

import tempfile
from pathlib import Path

import torch

from dalle_lean.errors import UserError
from dalle_lean.io.model_folder import bundled_model
from dalle_lean.memory.plan_search import human_bytes
from training.swarm.preflight.batch_size import free_memory
from training.swarm.preflight.checks import INSTALL, OK, PROBLEM, WARNING, Check

MIN_RAM_BYTES = 2_000_000_000
"""For a tiny model and hivemind's processes."""


def check_torch(device: torch.device) -> Check:
    """Whether a matrix product works in each precision, forward and backward."""
    worked, failed = [], ""
    precisions = {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        **({"fp16": torch.float16} if device.type == "cuda" else {}),
    }
    for name, dtype in precisions.items():
        try:
            factor = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
            (factor @ factor).sum().backward()
            assert factor.grad is not None
            if float(factor.grad[0, 0]) == 128:
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
        from training.swarm.network.dht import log_to, open_dht

        log_to(None)
        with tempfile.TemporaryDirectory() as folder:
            dht = open_dht([], client_mode=False, listen=["/ip4/127.0.0.1/tcp/0"], identity=Path(folder) / "identity")
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
        return Check(
            "memory",
            WARNING,
            found,
            "end other programs; in a container: docker run --shm-size=8g; a run says how much it needs",
        )
    return Check("memory", OK, found)
