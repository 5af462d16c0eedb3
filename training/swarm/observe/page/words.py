"""How a run works and whom it admits, in plain words, from its settings."""

from dalle_lean.memory.parameters import parameters
from training.swarm.config import SwarmSettings

SENT = {"8bit": "8 bits", "fp16": "16 bits", "fp32": "32 bits"}
ADMITTED = {
    "open": "Anybody with the address can take part.",
    "invite": "Only those whom the host invited take part: every peer refuses a machine without a pass.",
    "list": "Only machines on the host's list take part: every peer refuses a machine without a pass.",
}


def how_it_trains(settings: SwarmSettings) -> str:
    """Steps, and what travels between the trainers."""
    wire, bits = settings.wire, SENT[settings.wire.compression]
    if wire.mode == "diloco":
        steps = (
            f"Each trainer takes {wire.inner_steps} steps on its own part of the data. Then all average how far their "
            f"weights moved, in {bits}, and go on from there, so little has to travel."
        )
    else:
        form = f", as products of matrices of rank {wire.power_sgd_rank} (PowerSGD)" if wire.power_sgd_rank else ""
        steps = (
            "Each trainer computes gradients from its own part of the data, at its own pace. When all together have "
            f"the {settings.target_batch_size:,} samples of one batch, they average the gradients and take the same "
            f"step, so a fast machine gives more and a slow one delays nobody. Gradients travel in {bits}{form}."
        )
    return f"{steps} Trainers come and go; newcomers fetch the weights from a donor and check them."


def what_it_trains(settings: SwarmSettings) -> str:
    """The model's size, and by what it stays small."""
    config, blocks = settings.model, len(set(settings.model.layer_blocks))
    said = f"The model has {parameters(config):,} parameters in {config.num_layers} layers."
    if blocks < config.num_layers:
        one = "one set" if blocks == 1 else f"{blocks} sets"
        said += f" These share {one} of weights, which makes it small enough to send."
    if settings.recipe.memory.activations_for(config) in ("checkpoint", "reversible"):
        said += " Training recomputes instead of storing, so it takes little memory."
    return said


def security(settings: SwarmSettings) -> list[str]:
    """A paragraph on what protects the run and those who take part, and one on what does not."""
    rule = "averaged by a rule that one bad peer among several cannot steer"
    if settings.wire.aggregation == "mean":
        rule = "averaged as it is, so one bad peer can spoil a step"
    return [
        "Peers exchange numbers, never code: nothing that others send is run on your machine. Others see your network "
        f"address, the name you choose and what you gave. What a peer sends is checked for size and sense, and {rule}. "
        "Addresses end in a key, so nobody else can answer for the run.",
        f"{ADMITTED[settings.swarm.admission]} The samples and hours above are what the run's helpers averaged; "
        "whether those gradients were computed from the data is not proven. "
        "What peers claim of themselves is marked so.",
    ]
