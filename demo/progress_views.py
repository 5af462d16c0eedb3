"""The page's texts and pictures as HTML, without Gradio. All quoted text is escaped."""

import base64
import html
import io
import textwrap
from collections.abc import Sequence

from PIL import Image

from dalle_lean.errors import is_out_of_memory
from dalle_lean.vocabulary import did_you_mean, enumerated, named
from dalle_lean.words import counted
from demo.service.drawing_service import LACK_OF_MEMORY, PREVIEWS, Done, DrawingService, Queued, Running
from demo.service.latency_model import PAPER_NUM_IMAGES, PATIENCE_S
from demo.service.scheduler import Busy
from inference.generator import Generator

QUOTES = ("“", "”")
EMPTY = "Your pictures will grow here."
STOPPED = "Stopped. Change the prompt or press Draw to start again."
FADED = 60  # alpha of what is not kept of an upload, of 255
LONGEST_ERROR = 200  # characters of an exception's message to show


def explanation(generator: Generator) -> str:
    """What happens on this page, in a sentence."""
    drawing = "A transformer draws your words code by code"
    if generator.scorer is None:
        return f"{drawing}."
    return f"{drawing}; {html.escape(generator.scorer.name)} ranks the pictures, and you see the best."


def welcome(service: DrawingService) -> str:
    """The status line of a fresh page."""
    return line(f"Describe in a few words what to draw, then press Enter. {estimate(service, service.default_drawn())}")


def estimate(service: DrawingService, num_images: int, guidance: float | None = None) -> str:
    """How long a prompt takes if nobody else draws."""
    generator = service.generator
    plural = "candidates" if generator.scorer else "pictures"  # without a ranking, all are shown
    what = "1 picture takes" if num_images == 1 else f"{num_images} {plural} take"
    device = "GPU" if generator.device.type == "cuda" else "CPU"
    return f"{what} about {duration(service.seconds(num_images, guidance))} on this {device}."


def advice(service: DrawingService) -> str:
    """Why the default number of candidates is what it is."""
    chosen, affordable = "The best are chosen from this many", service.affordable()
    if affordable == PAPER_NUM_IMAGES:
        return f"{chosen}; {PAPER_NUM_IMAGES} as in the paper"
    paper = duration(service.seconds(PAPER_NUM_IMAGES))
    return f"{chosen}. The paper's {PAPER_NUM_IMAGES} would take about {paper} here, so the default is {affordable}"


def default_count(service: DrawingService) -> str:
    """For the terminal: how many pictures are drawn by default, how long that takes, and why."""
    count = service.default_drawn()
    seconds = service.seconds(count)
    if service.generator.scorer is None:
        return f"by default {count} pictures, about {duration(seconds)}"
    if count == PAPER_NUM_IMAGES:
        why = "as in the paper"
    elif seconds <= PATIENCE_S:
        why = f"the paper's {PAPER_NUM_IMAGES}, halved until they take at most {PATIENCE_S:.0f} s"
    else:
        why = "the fewest; this machine is slow now"
    return f"by default {count} candidates, about {duration(seconds)} ({why})"


def asked() -> str:
    """What a browser shows until the server answers."""
    hint = "Other tabs may hold this browser's connections: wait for their pictures, or close some tabs."
    return f'<div class="status asked" role="status">Waiting for the server. <span class="later">{hint}</span></div>'


def stopping() -> str:
    """What a browser shows until a drawing is stopped."""
    return line("Stopping after this row.", kind="status stopping")


def waiting(event: Queued) -> str:
    place = "You are next" if event.line == 1 else f"You are number {event.line} in line"
    return line(f"{place}; your turn comes in about {duration(event.seconds)}.", kind="status wait")


def drawing(event: Running) -> str:
    """A progress bar with the share drawn and the time left."""
    words = event.note.capitalize()
    if event.seconds >= 1:
        words += f", about {duration(event.seconds)} left"
    if event.others:
        words += f" (with {counted(event.others, 'other prompt')})"
    percent = f"{event.share:.0%}"
    bar = (
        f'<div class="bar" role="progressbar" aria-label="Drawing" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{percent[:-1]}"><div style="width: {percent}"></div></div>'
    )
    return f'<div class="status">{bar}<span class="percent">{percent}</span><span>{html.escape(words)}</span></div>'


def finished(event: Done, note: str = "") -> str:
    """How many pictures there are, how they were chosen, and how long drawing took."""
    count, pictures = event.request.settings.num_images, event.pictures
    shown = counted(len(pictures), "picture")
    if pictures[0].score is None:
        shown += ", not ranked" if len(pictures) > 1 else ""
    elif count > len(pictures):
        shown = f"The best of {count}" if len(pictures) == 1 else f"The {len(pictures)} best of {count}, best first"
    return line(f"{shown}, drawn in {event.seconds:.1f} s. {note}".strip())


def captions(event: Done) -> list[str]:
    scores = ["" if picture.score is None else f"score {picture.score:.3f} · " for picture in event.pictures]
    seed = event.request.settings.seed
    return [f"{score}no. {picture.index}\nseed {seed}" for score, picture in zip(scores, event.pictures, strict=True)]


def read_as(plain: str) -> str:
    """Says how a prompt with emoji was read."""
    return line(f"I read this as “{plain}”.", kind="status unknown")


def unknown(words: Sequence[str], known: Sequence[str] | None = None, suggestions: dict[str, str] | None = None) -> str:
    """Names the words that the model has not learnt; empty if there are none.

    Args:
        known: prompts to suggest if the model knows no word of this one.
        suggestions: words that may be meant if those are misspelt, by misspelt word.
    """
    if not words:
        return ""
    it = "it" if len(words) == 1 else "them"
    said = f"I have not learnt to draw {enumerated(named(words, QUOTES), 'or')}, so these pictures may not show {it}."
    if suggestions:
        said += f" D{did_you_mean(suggestions, words, QUOTES)[1:]}"
    if known:
        said += f" I know nothing in this prompt; I do know {enumerated([f'“{prompt}”' for prompt in known])}."
    elif known is not None:
        said += " I know nothing in this prompt."
    return line(said, kind="status unknown")


def cut(prompt: str, shorter: str) -> str:
    """Says that a prompt was cut to a shorter one; empty if it was not."""
    if prompt == shorter:
        return ""
    return line(
        f"Only the first {len(shorter)} of the prompt's {len(prompt)} characters are read; the rest is ignored.",
        "status cut",
    )


def busy(error: Busy) -> str:
    sentence = (
        f"The page is busy: {error.served} drawing, {error.waiting} waiting. "
        f"Please try again in about {duration(error.seconds)}."
    )
    return line(sentence, kind="status wait")


def broken(error: Exception) -> str:
    """Why drawing failed, if neither the visitor nor a full queue is the reason: one sentence, not HTML."""
    if is_out_of_memory(error):
        return LACK_OF_MEMORY
    first, *_ = str(error).strip().splitlines() or [""]
    message = textwrap.shorten(first, LONGEST_ERROR, placeholder=" ...")
    cause = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"Drawing failed because of a bug in the program ({cause}); the server's log has the traceback."


def failure(message: str) -> str:
    """What went wrong, as a sentence."""
    message = message[:1].upper() + message[1:]
    return line(message if message.endswith((".", "!", "?")) else message + ".", kind="status mistake")


def line(text: str, kind: str = "status") -> str:
    """A sentence as HTML that screen readers read out when it changes."""
    return f'<div class="{kind}" role="status">{html.escape(text)}</div>'


def empty_stage() -> str:
    """Empty frames where the pictures will be."""
    tiles = '<div class="tile"></div>' * PREVIEWS
    return f'<div class="stage empty"><div class="tiles" aria-hidden="true">{tiles}</div><p>{EMPTY}</p></div>'


def growing_stage(previews: Sequence[Image.Image], num_images: int) -> str:
    """Unfinished pictures, and empty frames for those that have not begun."""
    shown = min(PREVIEWS, num_images)
    tiles = [f'<div class="tile">{picture_tag(image, "A picture being drawn")}</div>' for image in previews]
    tiles += ['<div class="tile"></div>'] * (shown - len(tiles))
    more = f"<p>{shown} of the {num_images} being drawn</p>" if num_images > shown else ""
    return f'<div class="stage growing"><div class="tiles">{"".join(tiles)}</div>{more}</div>'


def given_stage(image: Image.Image, rows: int, of: int) -> str:
    """An uploaded picture, faded below the rows that are kept."""
    image, kept = image.convert("RGBA"), image.height * rows // of
    below = (0, kept, image.width, image.height)
    faded = image.crop(below)
    faded.putalpha(FADED)
    image.paste(faded, below)
    words = f"As the model sees it: the upper {rows} of {of} rows are kept, the rest is drawn."
    return (
        f'<div class="given"><div class="tile">{picture_tag(image, "The uploaded picture")}</div><p>{words}</p></div>'
    )


def picture_tag(image: Image.Image, words: str) -> str:
    """An <img> that holds the picture itself instead of a file's address."""
    file = io.BytesIO()
    image.save(file, format="WEBP", quality=85)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{html.escape(words)}" src="data:image/webp;base64,{data}">'


def facts(generator: Generator) -> str:
    """One line about the model for the foot of the page."""
    config = generator.model.config
    parameters = sum(parameter.numel() for parameter in generator.model.parameters())
    side = generator.picture_side
    ranked = f"ranked by {generator.scorer.name}" if generator.scorer else "not ranked"
    return (
        f"{parameters:,} parameters · {config.num_layers} layers · pictures of {side} × {side} pixels, "
        f"drawn as {config.image_len} codes out of {config.image_vocab_size:,} · {ranked} · on {generator.device.type}"
    )


def duration(seconds: float) -> str:
    """A rough duration: "4 s", "3 min", "2 h"."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{round(seconds / 3600)} h"
