"""The folder of a run: locked by one process at a time, and never a folder of something else."""

import fcntl
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dalle_lean.errors import UserError
from dalle_lean.tokenizer import Tokenizer
from dalle_lean.vocabulary import Vocabulary
from training.run.checkpoint import has_checkpoint

LOCK = ".run.lock"
"""Written first, so that the folder is known to be a run's even if the run was killed at once."""
DECODED = tuple(f"{name}.{kind}" for name in ("pictures", "heldout", "decoded") for kind in ("npy", "json"))
"""Files of decoded pictures; see training.data.pixels."""


@contextmanager
def run_folder(out: Path, option: str = "") -> Iterator[None]:
    """Lock `out` for this process while it trains; the kernel releases the lock even if the process is killed.

    ValueError, before anything is written, if another process works there, or `out` is neither empty nor a run's
    folder. Files that a killed process left incomplete are removed. If the run fails before it has written more than
    decoded pictures, a folder created here is removed; if it is interrupted, decoded pictures stay.

    Args:
        option: that names the folder on the command line, for the messages; empty if an argument does.
    """
    another = other_folder(option)
    made = not out.exists()
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder for the run")
    if out.is_dir() and any(out.iterdir()) and not (out / LOCK).exists() and not has_checkpoint(out):
        raise UserError(f"{out} is not empty and holds no run; {another}")
    out.mkdir(parents=True, exist_ok=True)
    with open(out / LOCK, "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(busy(out, option)) from None
        remove_leftovers(out)
        try:
            yield
        except BaseException as error:
            disposable = {LOCK, *DECODED} if isinstance(error, Exception) else {LOCK}
            if made and {path.name for path in out.iterdir()} <= disposable:
                shutil.rmtree(out)
            raise


def is_locked(out: Path) -> bool:
    """Whether a process works in `out`; writes nothing there."""
    if not (out / LOCK).exists():
        return False
    with open(out / LOCK, "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def busy(out: Path, option: str = "") -> str:
    """What to say of a folder in which another process works."""
    return f"another process works in {out}; end it first, or {other_folder(option)}"


def other_folder(option: str) -> str:
    return f"name another folder{f' with {option}' if option else ''}"


def remove_leftovers(out: Path) -> None:
    """Remove hidden files whose names end in .tmp."""
    for pattern in (".*.tmp", "checkpoint/.*.tmp", "samples/.*.tmp"):
        for path in out.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def place_tokenizer(out: Path, source: Path | None, captions: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return the run's tokenizer; until the first checkpoint, save `source` or one trained on the captions as its
    tokenizer.json."""
    path = out / "tokenizer.json"
    if not has_checkpoint(out):
        tokenizer = Tokenizer.from_file(source) if source else Tokenizer.train(captions, vocab_size)
        tokenizer.save(path)
    return Tokenizer.from_file(path)


def place_vocabulary(out: Path, init: Path | None, captions: Iterable[str]) -> None:
    """Write the run's vocabulary.json: the words of the captions, and those that the model `init` already knows.

    A run with a checkpoint keeps the one it has. If `init` has none, neither does the run: words that only `init` has
    learnt would be called unknown.
    """
    path = out / "vocabulary.json"
    if path.exists() and has_checkpoint(out):
        return
    if init is not None and not (init / "vocabulary.json").exists():
        path.unlink(missing_ok=True)
        return
    before = Vocabulary.load(init / "vocabulary.json") if init is not None else None
    Vocabulary.count(captions, before).save(path)


def placed_vocabulary(out: Path) -> Path | None:
    path = out / "vocabulary.json"
    return path if path.exists() else None
