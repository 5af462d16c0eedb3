"""What every training counts and tells on its way."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dalle_lean.errors import UserError
from training.data.sampler import Position

OnNotice = Callable[[str], None]
"""Called with a line that a person should read at once."""


class TrainingDiverged(UserError):
    """Too many steps in a row had a loss or a gradient that is not finite."""


@dataclass
class StepCount:
    """The numbers of a run that move; its checkpoint holds them. A loss is the latest one (nan: none yet)."""

    step: int = 0
    loss: float = math.nan
    skipped: int = 0
    """Steps that changed nothing, because a loss or a gradient was not finite."""
    skipped_in_row: int = 0

    def count_step(self, numbers: Mapping[str, float]) -> bool:
        """Count a step by its `numbers` (its "loss" and whatever else must be finite); returns whether it was taken."""
        self.step += 1
        taken = all(math.isfinite(number) for number in numbers.values())
        if taken:
            self.loss, self.skipped_in_row = numbers["loss"], 0
        else:
            self.skipped, self.skipped_in_row = self.skipped + 1, self.skipped_in_row + 1
        return taken

    def refuse_divergence(self, numbers: Mapping[str, float], limit: int, out: Path, saved_step: int) -> None:
        """TrainingDiverged once `limit` steps in a row were skipped; `saved_step` is what `out` goes back to."""
        if self.skipped_in_row >= limit:
            listed = ", ".join(f"{name} {number}" for name, number in numbers.items())
            raise TrainingDiverged(
                f"{self.skipped_in_row} steps in a row had a loss or gradient that is not finite, until step "
                f"{self.step} ({listed}); {out} keeps the state of step {saved_step}; "
                "try a lower learning rate, a longer warm-up or fp32"
            )

    def note(self, total_steps: int) -> str:
        """A few words for a progress bar."""
        words = [f"step {self.step}/{total_steps}"]
        if math.isfinite(self.loss):
            words.append(f"loss {self.loss:.4g}")
        words += self.findings()
        if self.skipped:
            words.append(f"{self.skipped} steps skipped (not finite)")
        return ", ".join(words)

    def end(self, total_steps: int, result: str) -> str:
        """The last line of a command: a note, and what is there now, or that the same command goes on."""
        if self.step < total_steps:
            result = f"the time is up, and the same command goes on from here; so far {result}"
        return f"{self.note(total_steps)}; {result}"

    def findings(self) -> list[str]:
        """What a kind of training adds to the note."""
        return []


@dataclass
class Progress(StepCount):
    """The numbers of a transformer's run that move."""

    position: Position = field(default_factory=Position)
    tokens: int = 0
    """Positions learnt from."""
    tokens_per_s: float = math.nan
    sample_tokens: int = 0
    """Positions of a sample, which grow with the length."""
    heldout_image_bits: float = math.nan
    """The last time it was measured."""
    rescaled: int = 0
    """Steps that changed nothing but a scale of float16 gradients."""

    def findings(self) -> list[str]:
        words = []
        if math.isfinite(self.heldout_image_bits):
            words.append(f"held-out {self.heldout_image_bits:.3f} bits/code")
        if math.isfinite(self.tokens_per_s):
            words.append(f"{self.tokens_per_s:,.0f} tokens/s, {self.sample_tokens} a sample")
        if self.rescaled:
            words.append(f"{self.rescaled} steps skipped (gradient scales lowered)")
        if self.position.skipped:
            words.append(f"{self.position.skipped} damaged shards passed over")
        return words


@dataclass(kw_only=True)
class MeasuredProgress(StepCount):
    """The numbers that move of a run that learns to tell pictures apart."""

    among: Mapping[str, int]
    """So many captions, or things, compete for the first place, by the name of what is measured."""
    measured: dict[str, float] = field(default_factory=dict)
    """Shares in 0..1 of held-out pictures, the last time they were measured."""
    unusable: dict[str, int] = field(default_factory=dict)
    """Lines of the listing that were passed over, by reason."""

    def findings(self) -> list[str]:
        words = [
            f"{name.replace('_', ' ')} of {self.among[name]}: {share:.1%}" for name, share in self.measured.items()
        ]
        return words + [f"passed over {count} ({reason})" for reason, count in self.unusable.items()]
