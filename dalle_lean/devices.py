"""Choice of the device."""

import torch

from dalle_lean.errors import UserError


def pick_device(device: str | torch.device) -> torch.device:
    """The named device; "auto" is CUDA if there is a GPU, else the CPU. ValueError if it is not usable here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError:
        picked = torch.device("meta")
    if picked.type not in ("cpu", "cuda"):
        raise UserError(f"device={str(device)!r}: it must be auto, cpu, cuda or cuda:N")
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={str(device)!r}: no CUDA device is usable here; use cpu")
    if picked.index is not None and picked.type == "cuda" and picked.index >= torch.cuda.device_count():
        raise UserError(f"device={str(device)!r}: there are only {torch.cuda.device_count()} CUDA devices here")
    return picked
