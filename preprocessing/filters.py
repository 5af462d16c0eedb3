"""Which pictures with captions are used: the rules of "Training Transformers Together" (arXiv 2207.03481)."""

MIN_CAPTION_LENGTH = 3
MAX_ASPECT_RATIO = 2.0
SAFE_LABEL = "UNLIKELY"


def reject_reason(caption: str | None, nsfw: str | None, width: int, height: int) -> str | None:
    """Why a picture is not used, or None for one to keep.

    `nsfw` is the data set's label (None or "" where it has none); `width` and `height` are the original picture's, in
    pixels. The reasons, in the order they are tried: "caption_missing", "caption_short" (under 3 characters without
    outer blanks), "nsfw" (any label but UNLIKELY), "size_not_positive", "aspect_ratio" (longer : shorter side above 2).
    """
    if reason := text_reject_reason(caption, nsfw):
        return reason
    if width <= 0 or height <= 0:
        return "size_not_positive"
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        return "aspect_ratio"
    return None


def text_reject_reason(caption: str | None, nsfw: str | None) -> str | None:
    """The part of `reject_reason` that needs no picture."""
    if caption is None or not caption.strip():
        return "caption_missing"
    if len(caption.strip()) < MIN_CAPTION_LENGTH:
        return "caption_short"
    if nsfw and nsfw != SAFE_LABEL:
        return "nsfw"
    return None
