"""What a run puts into its folder before it begins."""

from collections.abc import Iterable
from pathlib import Path

from dalle_lean.tokenizer import Tokenizer
from training.checkpoint import has_checkpoint


def place_tokenizer(out: Path, source: Path | None, captions: Iterable[str], vocab_size: int) -> Tokenizer:
    """The run's tokenizer.json, put there before the first checkpoint: `source`, or one made from the captions."""
    path = out / "tokenizer.json"
    if not has_checkpoint(out):
        tokenizer = Tokenizer.from_file(source) if source else Tokenizer.train(captions, vocab_size)
        tokenizer.save(path)
    return Tokenizer.from_file(path)
