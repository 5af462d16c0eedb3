"""The model's forward passes on CUDA tensors without values: nothing stays on the CPU, nothing waits for the GPU."""

import pytest
import torch

from dalle_lean import Dalle, DalleConfig, MemoryPlan
from tests.fake_cuda import fake_cuda, moved
from tests.tiny import DALLE_FIELDS, tiny_dalle, tiny_vqgan


def test_what_waits_for_the_gpu_or_stays_on_the_cpu_is_found():
    with fake_cuda():
        there = torch.zeros(2, device="cuda")
        with pytest.raises(RuntimeError):
            there.tolist()
        with pytest.raises(Exception, match="cpu"):
            there + torch.zeros(2)


@pytest.mark.parametrize(
    ("dtype", "pattern"), [(torch.float32, ("row", "column", "row", "row")), (torch.bfloat16, ("full",))]
)
@pytest.mark.parametrize(
    ("reversible", "activations"),
    [(True, "keep"), (True, "reversible"), (False, "keep"), (False, "selective"), (False, "checkpoint")],
)
def test_the_training_loss_of_every_plan(reversible, activations, dtype, pattern):
    config = DalleConfig(**{**DALLE_FIELDS, "reversible": reversible, "attention_pattern": pattern})
    with fake_cuda(), torch.enable_grad():
        plan = MemoryPlan(activations=activations, samples=2, loss_tokens=5)
        model = Dalle(config, plan, device="cuda", dtype=dtype)
        text_ids = torch.zeros(3, config.text_len, dtype=torch.long, device="cuda")
        codes = torch.zeros(3, config.image_len, dtype=torch.long, device="cuda")
        loss = model.loss(text_ids, codes)
        assert loss.device.type == "cuda"
        assert loss.requires_grad


def test_logits():
    model, (text, codes) = tiny_dalle(), ((3, 6), (3, 9))
    with fake_cuda():
        ids = (torch.zeros(shape, dtype=torch.long, device="cuda") for shape in (text, codes))
        logits = moved(model)(*ids)
        assert (logits.device.type, logits.shape) == ("cuda", (3, 6 + 1 + 9, model.config.num_tokens))


@pytest.mark.parametrize("quantizer", ["vq", "gumbel"])
def test_pictures_to_codes_and_back(quantizer):
    vqgan = tiny_vqgan(quantizer=quantizer)
    with fake_cuda():
        moved(vqgan)
        codes = vqgan.most_likely_codes(torch.empty(2, 3, 32, 32, device="cuda"))
        assert (codes.device.type, codes.shape) == ("cuda", (2, 16))
        pixels = vqgan.decode_checked(codes)
        assert (pixels.device.type, pixels.shape) == ("cuda", (2, 3, 32, 32))
