"""The child that trains dalle-pytorch's model; benchmarks/worker_training.py tells what it measures.

It runs in an environment of its own, which benchmarks/reference.py makes.
"""

from typing import Any

import torch
from dalle_pytorch import DALLE, DiscreteVAE
from safetensors.torch import load_file

from benchmarks.worker_training import Workload, serve
from dalle_lean.errors import UserError


def build(task: dict[str, Any]) -> Workload:
    """DALLE with task["arguments"], and task["weights"] or fresh ones."""
    # The smallest VAE with this grid: the model reads its sizes, and training from codes never runs it.
    side, codes = task["image_side"], task["image_vocab_size"]
    vae = DiscreteVAE(image_size=2 * side, num_layers=1, num_tokens=codes, codebook_dim=1, hidden_dim=1)
    model = DALLE(vae=vae, **task["arguments"])
    if task["weights"]:
        load_weights(model, task["weights"])
    batch = load_file(task["batch"])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Workload(parameters, lambda: model(batch["text_ids"], batch["image_codes"], return_loss=True))


@torch.no_grad()
def load_weights(model: DALLE, path: str) -> None:
    """Load every trained tensor from a file that stores shared ones once."""
    wanted = dict(model.named_parameters(remove_duplicate=False))
    stored = load_file(path)
    for name, value in stored.items():
        wanted[name].copy_(value)
    filled = {id(wanted[name]) for name in stored}
    missing = [name for name, parameter in wanted.items() if parameter.requires_grad and id(parameter) not in filled]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}")


if __name__ == "__main__":
    serve(build)
