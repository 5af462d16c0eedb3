"""What every training run counts and reports."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dalle_lean.errors import UserError


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
        """The last line of a command: a note and the result, or that the same command continues."""
        if self.step < total_steps:
            result = f"the time is up, and the same command goes on from here; so far {result}"
        return f"{self.note(total_steps)}; {result}"

    def findings(self) -> list[str]:
        """What a kind of training adds to the note."""
        return []


@dataclass(kw_only=True)
class MeasuredProgress(StepCount):
    """The numbers that move of a run that learns to rank captions or things."""

    among: Mapping[str, int]
    """How many captions, or things, are ranked, by the name of the measurement."""
    measured: dict[str, float] = field(default_factory=dict)
    """Shares in 0..1 of held-out pictures, the last time they were measured."""
    unusable: dict[str, int] = field(default_factory=dict)
    """Lines of the listing that were passed over, by reason."""

    def findings(self) -> list[str]:
        words = [
            f"{name.replace('_', ' ')} of {self.among[name]}: {share:.1%}" for name, share in self.measured.items()
        ]
        return words + skipped_by_reason(self.unusable)


def skipped_by_reason(counts: Mapping[str, int]) -> list[str]:
    """What was passed over, as words for a note."""
    return [f"passed over {count} ({reason})" for reason, count in counts.items()]
