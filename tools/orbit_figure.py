"""Draw the angular momentum of a satellite along time as SVG, without any library."""

from typing import Any

COLOURS = {"L_x": "#c8553d", "L_y": "#33518f", "L_z": "#1b7f79"}
LEFT, TOP, WIDTH, HEIGHT = 90, 30, 560, 220
GREY = "#c9c6bd"


def figure(result: dict[str, Any]) -> str:
    """Return curves of the three components, relative to the first value of their norm."""
    hours = [float(hour) for hour in result["data"]["hours"]]
    curves = {name: [100 * float(v) for v in result["data"][name]] for name in COLOURS}
    values = [value for curve in curves.values() for value in curve]
    low, high = min(values), max(values)

    def x(hour: float) -> float:
        return LEFT + WIDTH * hour / hours[-1]

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - value) / (high - low)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 300" font-family="sans-serif" '
        'font-size="13">',
        '<rect width="760" height="300" fill="white"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" '
        f'stroke="{GREY}"/>',
        _text(LEFT, 20, "change of the angular momentum of a satellite, % of its size"),
        _text(LEFT + WIDTH / 2, TOP + HEIGHT + 36, "hours", "middle"),
    ]
    for hour in (0.0, hours[-1] / 2, hours[-1]):
        parts.append(_text(x(hour), TOP + HEIGHT + 18, f"{hour:.0f}", "middle"))
    for value in (low, 0.0, high):
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value:.1f}", "end"))
    for name, curve in curves.items():
        points = " ".join(f"{x(h):.1f},{y(v):.1f}" for h, v in zip(hours, curve, strict=True))
        colour = COLOURS[name]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(_text(LEFT + WIDTH + 10, y(curve[-1]) + 4, name, colour=colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "black") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{text}</text>'
