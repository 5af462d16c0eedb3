"""What every training run counts and reports."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dalle_lean.errors import UserError
from dalle_lean.words import counted


class TrainingDiverged(UserError):
    """Too many consecutive steps had a non-finite loss or gradient."""


@dataclass
class StepCount:
    """The counters and measurements of a run, which its checkpoint stores."""

    loss_unit: ClassVar[str] = ""
    """Said after the loss; empty if it has none, like a sum of unlike terms."""
    step: int = 0
    loss: float = math.nan
    """Of the latest step; nan before the first."""
    skipped: int = 0
    """Steps that changed nothing, because loss or gradient was not finite."""
    skipped_in_row: int = 0

    def count_step(self, numbers: Mapping[str, float]) -> bool:
        """Count a step with its `numbers`, the "loss" among them; returns whether it was taken, i.e. all are finite."""
        self.step += 1
        taken = all(math.isfinite(number) for number in numbers.values())
        if taken:
            self.loss, self.skipped_in_row = numbers["loss"], 0
        else:
            self.skipped, self.skipped_in_row = self.skipped + 1, self.skipped_in_row + 1
        return taken

    def note(self, total_steps: int) -> str:
        """A short status for a progress bar."""
        words = [f"step {self.step}/{total_steps}"]
        if math.isfinite(self.loss):
            words.append(f"loss {self.loss:.4g} {self.loss_unit}".rstrip())
        words += self.details()
        if self.skipped:
            words.append(f"{counted(self.skipped, 'step')} skipped (not finite)")
        return ", ".join(words)

    def last_line(self, total_steps: int, result: str) -> str:
        """The last line of a command: the note, and the `result` or how to continue."""
        if self.step < total_steps:
            result = f"the time is up, and the same command continues from here; so far {result}"
        return f"{self.note(total_steps)}; {result}"

    def details(self) -> list[str]:
        """What a subclass adds to the note."""
        return []


@dataclass(kw_only=True)
class MeasuredProgress(StepCount):
    """Progress of a run that learns to rank captions or things."""

    loss_unit: ClassVar[str] = "nats"
    among: Mapping[str, int]
    """Number of captions or things ranked, by measurement."""
    measured: dict[str, float] = field(default_factory=dict)
    """The latest measurements: shares of held-out pictures, in 0..1."""
    unusable: dict[str, int] = field(default_factory=dict)
    """Skipped lines of the listing, by reason."""

    def details(self) -> list[str]:
        words = [
            f"{name.replace('_', ' ')} of {self.among[name]}: {share:.1%}" for name, share in self.measured.items()
        ]
        return words + skipped_by_reason(self.unusable)


def skipped_by_reason(counts: Mapping[str, int]) -> list[str]:
    """Counts of skipped pictures, for a note."""
    return [f"skipped {count} ({reason})" for reason, count in counts.items()]
