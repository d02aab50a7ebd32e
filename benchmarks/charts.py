"""Line and bar charts as small SVG files that look the same everywhere: no scripts, no fonts of their own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM, LINE = 66, 16, 58, 46, 17
COLOURS = ("#2457d6", "#d9480f", "#0b7f74", "#8a35c9", "#a16207", "#5b6675", "#be185d", "#4d7c0f")
FONT = 'font-family="system-ui, sans-serif" font-size="12"'

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """A range of values and where they are drawn."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Place of a value on the page."""
        if self.log:
            part = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values: 1, 2, 5 steps, on a logarithmic axis of more than a decade powers of ten alone."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            wide = math.log10(self.high / self.low) > 2.5
            found = [factor * 10.0**power for power in powers for factor in ((1,) if wide else (1, 2, 5))]
        else:
            step = _step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            found = [step * count for count in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [value for value in found if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]


def lines(
    title: str, x_label: str, y_label: str, series: Mapping[str, Points], *, log_x: bool = False, log_y: bool = False
) -> str:
    """A chart of named lines through points."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    across = Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, log_x)
    up = _vertical(ys, log_y, list(series))
    parts = [_frame(title, x_label, y_label), _x_ticks(across), _y_ticks(up), _legend(list(series))]
    for colour, points in zip(COLOURS, series.values(), strict=False):
        places = [(across.at(x), up.at(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return _svg(parts)


def bars(title: str, y_label: str, groups: Mapping[str, Mapping[str, float]], *, log_y: bool = False) -> str:
    """A chart of groups of bars; every group has the same names."""
    names = list(next(iter(groups.values())))
    up = _vertical([value for group in groups.values() for value in group.values()], log_y, names)
    parts = [_frame(title, "", y_label), _y_ticks(up), _legend(names)]
    slot = (WIDTH - LEFT - RIGHT) / len(groups)
    width = 0.8 * slot / len(names)
    for place, (label, group) in enumerate(groups.items()):
        left = LEFT + place * slot + 0.1 * slot
        for number, (colour, value) in enumerate(zip(COLOURS, group.values(), strict=False)):
            top = up.at(value)
            parts.append(
                f'<rect x="{left + number * width:.1f}" y="{top:.1f}" width="{0.92 * width:.1f}" '
                f'height="{HEIGHT - BOTTOM - top:.1f}" fill="{colour}"/>'
            )
        parts.append(_text(left + 0.4 * slot, HEIGHT - BOTTOM + 17, label))
    return _svg(parts)


def _vertical(values: Sequence[float], log: bool, names: Sequence[str]) -> Axis:
    high = max(values) * 1.05
    low = min(values) / 1.2 if log else 0.0
    return Axis(low, high, HEIGHT - BOTTOM, TOP + LINE * _legend_places(names)[-1][1], log)


def _frame(title: str, x_label: str, y_label: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return (
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
        + _text(LEFT, 18, title, "start", 'font-weight="600" font-size="13.5"')
        + _text(middle, HEIGHT - 9, x_label)
        + f'<g transform="rotate(-90 14 {HEIGHT / 2})">{_text(14, HEIGHT / 2, y_label)}</g>'
    )


def _x_ticks(axis: Axis) -> str:
    return "".join(_text(axis.at(value), HEIGHT - BOTTOM + 17, _number(value)) for value in axis.ticks())


def _y_ticks(axis: Axis) -> str:
    found = []
    for value in axis.ticks():
        y = axis.at(value)
        found.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e1e5ea"/>')
        found.append(_text(LEFT - 7, y + 4, _number(value), "end"))
    return "".join(found)


def _legend(names: Sequence[str]) -> str:
    found = []
    for colour, name, (left, row) in zip(COLOURS, names, _legend_places(names), strict=False):
        y = 28 + LINE * row
        found.append(f'<rect x="{left:.1f}" y="{y}" width="11" height="11" fill="{colour}"/>')
        found.append(_text(left + 16, y + 10, name, "start"))
    return "".join(found)


def _legend_places(names: Sequence[str]) -> list[tuple[float, int]]:
    """(left, row) of each name; a row that is full is followed by another."""
    places, left, row = [], float(LEFT), 0
    for name in names:
        width = 34 + 6.6 * len(name)
        if left > LEFT and left + width > WIDTH:
            left, row = float(LEFT), row + 1
        places.append((left, row))
        left += width
    return places


def _text(x: float, y: float, text: str, anchor: str = "middle", look: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#17202c" {look}>{escape(text)}</text>'


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:.4g}"


def _step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _svg(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>'
    return f"{head}\n" + "\n".join(parts) + "\n</svg>\n"
