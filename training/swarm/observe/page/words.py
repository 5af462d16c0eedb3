"""Texts on the run's page, from its settings: how the run works and whom it admits."""

from dalle_lean.memory.parameters import parameters
from training.swarm.config import SwarmSettings

SENT = {"8bit": "8 bits", "fp16": "16 bits", "fp32": "32 bits"}
ADMITTED = {
    "open": "Anybody with the address can take part.",
    "invite": "Only machines that the host has invited can take part: every peer refuses a machine without a pass.",
    "list": "Only machines on the host's list can take part: every peer refuses a machine without a pass.",
}


def how_it_trains(settings: SwarmSettings) -> str:
    """How a step is taken, and what the trainers exchange."""
    wire, bits = settings.wire, SENT[settings.wire.compression]
    if wire.mode == "diloco":
        steps = (
            f"Each trainer takes {wire.inner_steps} steps on its own part of the data. Then all average the changes of "
            f"their weights, sent in {bits}, and continue from there, so little data is exchanged."
        )
    else:
        form = f", compressed to rank {wire.power_sgd_rank} (PowerSGD)" if wire.power_sgd_rank else ""
        steps = (
            "Each trainer computes gradients on its own part of the data, at its own pace. Once they have "
            f"{settings.target_batch_size:,} samples together, they average the gradients and take the same step. A "
            f"fast machine contributes more, and a slow one delays nobody. Gradients are sent in {bits}{form}."
        )
    return (
        f"{steps} Trainers can join and leave at any time; newcomers download the weights from a donor and check them."
    )


def what_it_trains(settings: SwarmSettings) -> str:
    """The model's size, and how it is kept small."""
    config, blocks = settings.model, len(set(settings.model.layer_blocks))
    said = f"The model has {parameters(config):,} parameters in {config.num_layers} layers."
    if blocks < config.num_layers:
        one = "one set" if blocks == 1 else f"{blocks} sets"
        said += f" They share {one} of weights, which makes the model small enough to send."
    if settings.recipe.memory.activations_for(config) in ("checkpoint", "reversible"):
        said += " Training recomputes activations instead of storing them, so it takes little memory."
    return said


def security(settings: SwarmSettings) -> list[str]:
    """Two paragraphs: what protects the run and its participants, and what is not proven."""
    rule = "averaged by a rule that one bad peer among several cannot steer"
    if settings.wire.aggregation == "mean":
        rule = "averaged without further protection, so one bad peer can spoil a step"
    return [
        "Peers exchange numbers, never code: your machine runs nothing that others send. Others see your network "
        f"address, the name you choose and your contribution. What a peer sends is checked for size and validity, and "
        f"{rule}. Addresses end in the hash of a key, so nobody else can answer for the run.",
        f"{ADMITTED[settings.swarm.admission]} The samples and hours above are what the run's helpers averaged; "
        "it is not proven that those gradients were computed from the data. "
        "What peers claim about themselves is marked as such.",
    ]
