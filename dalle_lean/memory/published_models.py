"""Published transformers that the calculator knows by name."""

from dalle_lean.memory.shapes import TransformerShape
from dalle_lean.model.config import DalleConfig


def bert(layers: int, hidden: int) -> TransformerShape:
    """Post-norm encoder with heads of 64, segments and a pooler.

    Source: Devlin et al. 2019, section 3; the uncased English checkpoints, without the heads of pretraining.
    """
    return TransformerShape(
        family="bert",
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=hidden // 64,
        head_size=64,
        vocabulary=30522,
        tokens=512,
        learnt_positions=512,
    )


def t5(layers: int, hidden: int, ffn: int, heads: int, head_size: int = 64) -> TransformerShape:
    """Encoder and decoder without biases, with relative positions; 512 tokens on either side.

    Source: Raffel et al. 2020, section 3.7; the checkpoints of version 1.0, 32,128 rows of vocabulary.
    """
    return TransformerShape(
        family="t5",
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        head_size=head_size,
        vocabulary=32128,
        tokens=512,
    )


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
    "bert-base": bert(12, 768),
    "bert-large": bert(24, 1024),
    "t5-small": t5(6, 512, 2048, 8),
    "t5-base": t5(12, 768, 3072, 12),
    "t5-large": t5(24, 1024, 4096, 16),
    "t5-3b": t5(24, 1024, 16384, 32, 128),
    "t5-11b": t5(24, 1024, 65536, 128, 128),
    "gpt2": gpt(12, 768, 12),
    "gpt2-medium": gpt(24, 1024, 16),
    "gpt2-large": gpt(36, 1280, 20),
    "gpt2-xl": gpt(48, 1600, 25),
    "gpt3": gpt(96, 12288, 96, tokens=2048),
    "gpt-j": GPT_J,
    "dalle-12b": DALLE_12B,
}
