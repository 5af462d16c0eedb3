"""Published transformers that the calculator knows by name."""

from functools import partial

from dalle_lean.memory.shapes import TransformerShape
from dalle_lean.model.config import DalleConfig

# Post-norm encoders with segments and a pooler. Source: Devlin et al. 2019, section 3; the uncased English checkpoints,
# without the heads of pretraining.
bert = partial(TransformerShape, family="bert", head_size=64, vocabulary=30522, tokens=512, learnt_positions=512)

# Encoders and decoders without biases, with relative positions; 512 tokens on either side. Source: Raffel et al. 2020,
# section 3.7; the checkpoints of version 1.0, 32,128 rows of vocabulary.
t5 = partial(TransformerShape, family="t5", head_size=64, vocabulary=32128, tokens=512)


def gpt(layers: int, hidden: int, heads: int, tokens: int = 1024) -> TransformerShape:
    """Pre-norm decoder with learnt positions.

    Sources: Radford et al. 2019, table 2; for GPT-3 Brown et al. 2020, table 2.1, with dense attention in every layer.
    """
    return TransformerShape(
        family="gpt",
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        head_size=hidden // heads,
        vocabulary=50257,
        tokens=tokens,
        learnt_positions=tokens,
    )


GPT_J = TransformerShape(
    # Wang and Komatsuzaki 2021, GPT-J-6B, its configuration file.
    family="gpt-j",
    layers=28,
    hidden=4096,
    ffn=16384,
    heads=16,
    head_size=256,
    vocabulary=50400,
    tokens=2048,
)

DALLE_12B = DalleConfig(
    # Ramesh et al. 2021, section 2 and appendix B.1. Unpublished, so taken as in our models: one table for input and
    # output, and the reach of the last layer's convolution.
    text_vocab_size=16384,
    hidden_size=62 * 64,
    num_heads=62,
    ffn_gated=False,
    shared_blocks=None,
    token_shift=False,
    rotary=False,
    reversible=False,
)

PRESETS: dict[str, TransformerShape | DalleConfig] = {
    "bert-base": bert(layers=12, hidden=768, ffn=3072, heads=12),
    "bert-large": bert(layers=24, hidden=1024, ffn=4096, heads=16),
    "t5-small": t5(layers=6, hidden=512, ffn=2048, heads=8),
    "t5-base": t5(layers=12, hidden=768, ffn=3072, heads=12),
    "t5-large": t5(layers=24, hidden=1024, ffn=4096, heads=16),
    "t5-3b": t5(layers=24, hidden=1024, ffn=16384, heads=32, head_size=128),
    "t5-11b": t5(layers=24, hidden=1024, ffn=65536, heads=128, head_size=128),
    "gpt2": gpt(12, 768, 12),
    "gpt2-medium": gpt(24, 1024, 16),
    "gpt2-large": gpt(36, 1280, 20),
    "gpt2-xl": gpt(48, 1600, 25),
    "gpt3": gpt(96, 12288, 96, tokens=2048),
    "gpt-j": GPT_J,
    "dalle-12b": DALLE_12B,
}
