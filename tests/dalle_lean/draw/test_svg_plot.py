"""A plot puts points where their values say."""

import re
from xml.etree import ElementTree

import pytest

from dalle_lean.draw.svg_plot import plot

SVG = "{http://www.w3.org/2000/svg}"


def drawn(lines, **settings):
    axes = {"across": "steps", "up": "share", "up_range": (0, 1), "up_text": "{:.0%}".format}
    return ElementTree.fromstring(plot(lines, **axes, **settings))


def dots(svg):
    return [(float(dot.get("cx")), float(dot.get("cy"))) for dot in svg.iter(f"{SVG}circle")]


def test_equal_steps_are_equal_ways_across_and_up():
    (x0, y0), (x1, y1), (x2, y2) = dots(drawn({"a": [(1, 0.0), (2, 0.5), (3, 1.0)]}))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x0 < x1
    assert y1 < y0


def test_equal_factors_are_equal_ways_on_a_logarithmic_axis():
    (x0, _), (x1, _), (x2, _) = dots(drawn({"a": [(1, 0.5), (4, 0.5), (16, 0.5)]}, logarithmic=True))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)


def test_every_name_and_axis_is_written_and_nothing_in_them_is_markup():
    lines = {f"line {number} <b>": [(1, 0.1 * number), (2, 0.5)] for number in range(8)}
    svg = drawn(lines)
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert [text for text in texts if text.startswith("line")] == list(lines)
    assert {"steps", "0%", "50%", "100%", "1", "2"} <= {*texts}
    strokes = [(line.get("stroke"), line.get("stroke-dasharray")) for line in svg.iter(f"{SVG}polyline")]
    assert len({*strokes}) == len(lines)


def test_one_point_stands_in_the_middle():
    ((x, _),) = dots(drawn({"a": [(5, 0.5)]}))
    assert 200 < x < 300


def test_all_is_inside_the_picture():
    svg = drawn({str(number): [(1, 0.0), (2, 1.0)] for number in range(30)})
    _, _, width, height = map(float, svg.get("viewBox").split())
    places = [float(number) for dot in svg for name in ("y", "y1", "cy") if (number := dot.get(name))]
    assert max(places) <= height
    assert all(x <= width for x, _ in dots(svg))
    assert not re.search("nan|inf", ElementTree.tostring(svg, encoding="unicode"))
