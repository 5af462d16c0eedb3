"""The child that trains this package's model; benchmarks/worker_training.py tells what it measures."""

from typing import Any

from safetensors.torch import load_file

from benchmarks.worker_training import Workload, serve
from dalle_lean import Dalle, DalleConfig
from dalle_lean.convert import from_dalle_pytorch
from dalle_lean.memory import MemoryPlan


def build(task: dict[str, Any]) -> Workload:
    """The model of task["config"] with task["plan"]; task["weights"] has dalle-pytorch's names, None is untrained."""
    config = DalleConfig.from_dict(task["config"])
    model = from_dalle_pytorch(load_file(task["weights"]), config) if task["weights"] else Dalle(config)
    model.plan = MemoryPlan(**task["plan"])
    batch = load_file(task["batch"])
    return Workload(list(model.parameters()), lambda: model.loss(batch["text_ids"], batch["image_codes"]))


if __name__ == "__main__":
    serve(build)
