"""Sampling and ranking on CUDA tensors without values: nothing stays on the CPU, nothing waits for the GPU."""

import pytest
import torch

from dalle_lean import MemoryPlan
from dalle_lean.model import attention
from dalle_lean.tokenizer import Tokenizer
from inference.request import Settings
from inference.sampling import kv_cache
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.prefill import read_prompts
from inference.sampling.sampler import Row, sample_codes
from tests.fake_cuda import fake_cuda, moved
from tests.inference.tiny_model import CAPTIONS, tiny_clip, tiny_dalle


class Eager:
    """Runs the very step that CUDA graphs record, without recording it."""

    def __init__(self, step, batch: int, device: torch.device):
        self.step, self.row = step, torch.zeros(1, dtype=torch.long, device=device)

    def __call__(self, codes, column, row, place):
        return self.step(codes, column, self.row.fill_(row), place)


@pytest.mark.parametrize(  # every two choices meet
    ("precision", "guidance", "given"),
    [("fp32", 1, 0), ("fp32", 2, 5), ("bf16", 1, 5), ("bf16", 2, 0), ("fp16", 1, 0), ("fp16", 2, 5)],
)
def test_drawing_a_batch(monkeypatch, precision, guidance, given):
    monkeypatch.setattr(kv_cache, "StepGraphs", Eager)
    model = tiny_dalle()
    with fake_cuda():
        decoder = PackedDecoder(moved(model), precision)
        text_ids = torch.zeros(2, model.config.text_len, dtype=torch.long)  # as the tokenizer gives them
        codes = torch.zeros(2, given, dtype=torch.long, device="cuda")
        prompts = read_prompts(decoder, text_ids, codes, guided=guidance != 1)
        rows = [Row(picture, Settings(guidance=guidance)) for picture in range(6)]
        *_, drawn = sample_codes(decoder, prompts, rows)
        assert (drawn.device.type, drawn.shape) == ("cuda", (6, model.config.image_len))


def test_reading_prompts_does_not_wait_for_a_kernel_to_be_compiled(monkeypatch):
    monkeypatch.setattr(MemoryPlan, "fuses_attention", lambda *_: True)
    monkeypatch.setattr(attention, "attend_fused", lambda *_: pytest.fail("compiles FlexAttention"))
    model = tiny_dalle()
    with fake_cuda():
        decoder = PackedDecoder(moved(model))
        codes = torch.zeros(1, 5, dtype=torch.long, device="cuda")
        read_prompts(decoder, torch.zeros(1, model.config.text_len, dtype=torch.long), codes)


def test_scoring_pictures():
    scorer = tiny_clip(Tokenizer.train(CAPTIONS, vocab_size=300))
    with fake_cuda():
        moved(scorer.model)
        scorer.device = torch.device("cuda")
        scorer._mean, scorer._std = (torch.empty(3, 1, 1, device="cuda") for _ in range(2))
        scorer._caption_ids = lambda captions: torch.zeros(len(captions), 16, dtype=torch.long)
        scores = scorer.score(torch.empty(5, 3, 32, 32, device="cuda"), CAPTIONS[0])
        assert (scores.device.type, scores.shape) == ("cuda", (5,))
