"""Line plots as self-contained SVG."""

import html
import math
from collections.abc import Callable, Mapping, Sequence

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette, which colour-blind people can tell apart."""
DASHES = ("", "6 3", "2 3")  # tell lines of the same colour apart
WIDTH, LEFT, TOP, BOTTOM = 480, 56, 10, 44
LINE_HEIGHT = 18


def plot(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    across: str,
    up: str,
    up_range: tuple[float, float],
    up_text: Callable[[float], str],
    logarithmic: bool = False,
    legend_width: int = 180,
) -> str:
    """An SVG of lines through points (x, y), with the lines' names as a legend on the right.

    Args:
        across, up: labels of the horizontal and the vertical axis.
        up_range: (lowest, highest) value on the vertical axis.
        up_text: formats a value on the vertical axis.
        logarithmic: the horizontal axis is logarithmic; every x must be above 0.
        legend_width: in pixels.
    """
    scale = math.log if logarithmic else float
    places = sorted({x for points in lines.values() for x, _ in points})
    low, high = scale(places[0]), scale(places[-1])
    bottom, top = up_range
    height = max(280, TOP + BOTTOM + LINE_HEIGHT * len(lines))

    def at(x: float, y: float) -> tuple[float, float]:
        share = (scale(x) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - 20), TOP + (top - y) / (top - bottom) * (height - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + legend_width} {height}" role="img" '
        f'aria-label="{html.escape(up)} by {html.escape(across)}" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="currentColor">'
    ]
    for tick in (bottom + (top - bottom) * quarter / 4 for quarter in range(5)):
        y = at(places[0], tick)[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{html.escape(up_text(tick))}</text>')
    for place in places:
        x = at(place, bottom)[0]
        parts.append(f'<text x="{x:.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{place:,g}</text>')
    parts.append(f'<text x="{LEFT}" y="{height - 6}">{html.escape(across)}</text>')
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        dots = [at(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        y = TOP + 10 + LINE_HEIGHT * number
        stroke = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
        parts.append(f'<line x1="{WIDTH - 8}" x2="{WIDTH + 12}" y1="{y - 4}" y2="{y - 4}" {stroke}/>')
        parts.append(f'<text x="{WIDTH + 18}" y="{y}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])
