"""The report as one HTML page that needs nothing else: tables, plots as SVG, pictures inside."""

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence

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
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
"""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which most people can tell apart."""


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
    """A picture with its caption below, marked right or wrong where that is known."""
    file = io.BytesIO()
    picture.save(file, format="PNG")
    mark = "" if right is None else ' class="right"' if right else ' class="wrong"'
    source = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    text = html.escape(caption)
    return f'<figure><img{mark} src="{source}" alt="{text}"><figcaption>{text}</figcaption></figure>'


def plot(lines: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> str:
    """Lines through points (x > 0, y in 0..1), x on a logarithmic axis."""
    width, height, left, bottom = 560, 280, 56, 40
    places = sorted({x for points in lines.values() for x, _ in points})
    low, high = math.log(places[0]), math.log(places[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log(x) - low) / (high - low) if high > low else 0.5
        return left + share * (width - left - 150), (1 - y) * (height - bottom - 10) + 10

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(up)} by {html.escape(across)}">']
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = at(places[0], tick)[1]
        parts.append(f'<line x1="{left}" x2="{width - 150}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{100 * tick:.0f} %</text>')
    for place in places:
        parts.append(f'<text x="{at(place, 0)[0]:.1f}" y="{height - bottom + 8}" text-anchor="middle">{place:g}</text>')
    parts.append(f'<text x="{left}" y="{height - 8}">{html.escape(across)}</text>')
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        dots = [at(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
        parts.append(f'<text x="{width - 140}" y="{24 + 18 * number}" fill="{colour}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])
