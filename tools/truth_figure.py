"""Draw the figure of the benchmark of known answers as SVG, without any library."""

from collections.abc import Sequence
from html import escape
from typing import Any

GREEN, GREY, RED, BLUE = "#1b7f79", "#c9c6bd", "#c8553d", "#33518f"
VERDICTS = (("right", GREEN), ("undecided", GREY), ("wrong", RED))
BAR_LEFT, BAR_WIDTH, BAR_HEIGHT, BAR_GAP = 190, 300, 20, 12
TOP = 46
CHART_LEFT, CHART_SIDE = 590, 200

Result = dict[str, Any]


def figure(result: Result, half: str, method: str) -> str:
    """Return bars of all methods on one half, and the reliability diagram of one method.

    Args:
        result: the result file.
        half: which half of the tasks.
        method: whose calibration to draw.
    """
    totals = [_named(result["columns"], row) for row in result["rows"]]
    totals = [row for row in totals if row["tasks"] == "all" and row["half"] == half]
    columns, *lines = result["calibration"]
    points = [_named(columns, line) for line in lines]
    points = [point for point in points if point["method"] == method and point["half"] == half]
    height = max(TOP + len(totals) * (BAR_HEIGHT + BAR_GAP) + 30, TOP + CHART_SIDE + 50)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="820" height="{height}" fill="white"/>',
        _text(BAR_LEFT, 20, f"Claims of the {half} half, %", bold=True),
        *_legend(),
        *(part for index, row in enumerate(totals) for part in _bar(index, row)),
        _text(CHART_LEFT, 20, f"Calibration of {method}", bold=True),
        *_reliability(points),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _named(columns: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(columns, row, strict=True))


def _text(x: float, y: float, text: str, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _legend() -> list[str]:
    parts = []
    for index, (name, colour) in enumerate(VERDICTS):
        x = BAR_LEFT + 100 * index
        parts.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 15, 38, name))
    return parts


def _bar(index: int, row: dict[str, Any]) -> list[str]:
    """Return the stacked bar of one method, with its percentage of right claims."""
    y, x = TOP + index * (BAR_HEIGHT + BAR_GAP), float(BAR_LEFT)
    parts = [_text(BAR_LEFT - 8, y + 15, row["method"], anchor="end")]
    for name, colour in VERDICTS:
        width = BAR_WIDTH * float(row[f"{name} %"]) / 100
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>'
        )
        x += width
    parts.append(_text(BAR_LEFT + BAR_WIDTH + 8, y + 15, row["right %"]))
    return parts


def _reliability(points: Sequence[dict[str, Any]]) -> list[str]:
    """Return the share of right claims against the stated probability, from 50 to 100 %."""
    bottom = TOP + CHART_SIDE
    parts = [
        f'<rect x="{CHART_LEFT}" y="{TOP}" width="{CHART_SIDE}" height="{CHART_SIDE}" fill="none" '
        f'stroke="{GREY}"/>',
        f'<line x1="{CHART_LEFT}" y1="{bottom - CHART_SIDE / 2:g}" x2="{CHART_LEFT + CHART_SIDE}" '
        f'y2="{TOP}" stroke="{GREY}" stroke-dasharray="4 3"/>',
        _text(CHART_LEFT + CHART_SIDE / 2, bottom + 34, "stated probability, %", anchor="middle"),
        _text(CHART_LEFT, bottom + 16, "50", anchor="middle"),
        _text(CHART_LEFT + CHART_SIDE, bottom + 16, "100", anchor="middle"),
        _text(CHART_LEFT - 6, TOP + 5, "100", anchor="end"),
        _text(CHART_LEFT - 6, bottom + 5, "0", anchor="end"),
        _text(CHART_LEFT + 6, TOP + 16, "right, %"),
    ]
    for point in points:
        x = CHART_LEFT + CHART_SIDE * (float(point["mean %"]) - 50) / 50
        y = bottom - CHART_SIDE * float(point["right %"]) / 100
        radius = min(12.0, 2 + float(point["claims"]) ** 0.5)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{BLUE}" fill-opacity="0.7"/>'
        )
    return parts
