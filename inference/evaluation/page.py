"""The report as one HTML page that needs nothing else: tables, pictures inside."""

import base64
import html
import io
from collections.abc import Sequence

from PIL import Image

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid #8884; padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; }
figure { display: inline-block; margin: 0 .6rem .8rem 0; width: 8.5rem; vertical-align: top; }
figure img { width: 8rem; image-rendering: pixelated; border-radius: .4rem; display: block; }
figcaption { font-size: .8rem; line-height: 1.3; }
.right { border-bottom: .2rem solid #2a2; } .wrong { border-bottom: .2rem solid #d33; }
svg { max-width: 100%; height: auto; }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """The whole document."""
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">\n'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>\n<h1>{html.escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</html>\n"
    )


def heading(text: str) -> str:
    """Of a section."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Plain text."""
    return f"<p>{html.escape(text)}</p>"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Plain cells."""

    def row(cells: Sequence[object], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in cells) + "</tr>"

    return "<table>" + row(header, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def figure(picture: Image.Image, caption: str, right: bool | None = None) -> str:
    """A picture with its caption below, marked right or wrong, by colour and sign, where that is known."""
    file = io.BytesIO()
    picture.save(file, format="PNG")
    mark = "" if right is None else ' class="right"' if right else ' class="wrong"'
    source = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    text = html.escape(caption if right is None else f"{'✓' if right else '✗'} {caption}")
    return f'<figure><img{mark} src="{source}" alt="{text}"><figcaption>{text}</figcaption></figure>'
