"""The features of the published Frechet inception distances.

Shapes: N pictures, S side in pixels.
"""

import io
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.require import require

WEIGHTS = "pt_inception-2015-12-05"
WIDTH = 2048
BATCH = 16


class Inception:
    """The Inception network of Heusel et al. 2017 (arXiv 1706.08500) as torch-fidelity builds it, with TensorFlow 1's
    resizing.

    Args:
        weights: the published file pt_inception-2015-12-05-6726825d.pth, which is loaded weights-only.

    Raises:
        ValueError: the file is missing or holds something else.
    """

    def __init__(self, weights: Path, device: torch.device | str = "cpu"):
        fidelity = require("torch_fidelity", extra="evaluation")
        self.device = torch.device(device)
        # The package unpickles any file that it is given, so it gets a copy of the tensors, loaded weights-only.
        copy = io.BytesIO()
        torch.save(read_tensors(weights), copy)
        copy.seek(0)
        try:
            network = fidelity.FeatureExtractorInceptionV3("fid", [str(WIDTH)], feature_extractor_weights_path=copy)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{weights} does not hold the weights {WEIGHTS}: {reason}") from None
        self.network = network.to(self.device)

    @torch.inference_mode()
    def features(self, pixels: Tensor, on_batch: Callable[[int], None] = lambda done: None) -> Tensor:
        """uint8 [N, 3, S, S] -> [N, 2048] float32."""
        found = []
        for batch in pixels.split(BATCH):
            found.append(self.network(batch.to(self.device))[0])
            on_batch(len(batch))
        return torch.cat(found)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors, by name, of a torch.save file; ValueError for any other file, and if a number is not finite."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises nearly anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read as the weights {WEIGHTS}: {reason}") from None
    tensors = dict(content) if isinstance(content, dict) else {}
    if not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UserError(f"{path} does not hold the weights {WEIGHTS}: it is not a state dict")
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path}: {name} holds numbers that are not finite")
    return tensors
