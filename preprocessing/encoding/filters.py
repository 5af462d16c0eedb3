"""The filter of pictures with captions: the rules of "Training Transformers Together" (arXiv 2207.03481), and more."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dalle_lean.errors import UserError

SAFE_LABEL = "UNLIKELY"
LAION_LABELS = (SAFE_LABEL, "UNSURE", "NSFW")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Thresholds of the filter; the defaults are the paper's. Raises UserError for values out of range. Captions are
    Unicode text in any language, measured in characters and never changed."""

    min_caption_length: int = 3
    """Characters, without leading and trailing blanks; 0 also takes pictures without a caption."""
    allowed_nsfw: Sequence[str] | None = (SAFE_LABEL,)
    """Labels to keep, as the data set spells them; None keeps all. A picture without a label is kept."""
    min_side: int = 1  # pixels of the original's shorter side; 0 also takes claimed sizes that are not positive
    max_aspect_ratio: float | None = 2.0  # longer : shorter side of the original; None for any
    max_hash_distance: int | None = None
    """At most this many of 64 bits differ between the perceptual hashes of duplicates; None keeps duplicates."""

    def __post_init__(self) -> None:
        if self.allowed_nsfw is not None:
            if isinstance(self.allowed_nsfw, str):
                raise UserError(f"allowed_nsfw={self.allowed_nsfw!r}: must be a sequence of labels, or None")
            object.__setattr__(self, "allowed_nsfw", tuple(self.allowed_nsfw))
        if self.min_caption_length < 0:
            raise UserError(f"min_caption_length={self.min_caption_length}: must be 0 (off) or more characters")
        if self.min_side < 0:
            raise UserError(f"min_side={self.min_side}: must be 0 (off) or more pixels")
        if self.max_aspect_ratio is not None and not self.max_aspect_ratio >= 1:
            raise UserError(f"max_aspect_ratio={self.max_aspect_ratio}: must be at least 1, or None (off)")
        if self.max_hash_distance is not None and not 0 <= self.max_hash_distance < 64:
            raise UserError(f"max_hash_distance={self.max_hash_distance}: must be 0..63 bits, or None (off)")

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON stores them."""
        labels = None if self.allowed_nsfw is None else list(self.allowed_nsfw)
        return {**asdict(self), "allowed_nsfw": labels}

    def text_reject_reason(self, caption: str | None, nsfw: str | None) -> str | None:
        """Why to reject a picture by its caption and the data set's label (None or "" if it has none): in the order of
        the checks "caption_missing", "caption_short", "nsfw"; None to keep it."""
        length = len((caption or "").strip())
        if length < self.min_caption_length:
            return "caption_short" if length else "caption_missing"
        if nsfw and self.allowed_nsfw is not None and nsfw not in self.allowed_nsfw:
            return "nsfw"
        return None

    def size_reject_reason(self, width: int, height: int) -> str | None:
        """As `text_reject_reason`, by the original's pixels: "size_not_positive", "side_short", "aspect_ratio"."""
        shorter, longer = sorted((width, height))
        if self.min_side and shorter < self.min_side:
            return "side_short" if shorter > 0 else "size_not_positive"
        if self.max_aspect_ratio is not None and longer > self.max_aspect_ratio * shorter:
            return "aspect_ratio"
        return None
