"""Small charts as inline SVG; colours come from the page's CSS variables, so they follow light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 400, 236
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 16, 44

Format = Callable[[float], str]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that span low to high, about ``count`` of them; the ends lie on or outside both."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 1.0]
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(1, count - 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def line_chart(
    title: str,
    x: Sequence[float],
    y: Sequence[float | None],
    *,
    x_label: str,
    format_y: Format,
    low: float | None = None,
    high: float | None = None,
    level: float | None = None,
    level_label: str = "",
    hover: Sequence[str] = (),
) -> str:
    """A line over x with its area, an optional dashed level, and a tooltip a point.

    Args:
        title: Heading, also read by screen readers.
        x: Positions, rising.
        y: Values; None leaves a gap.
        x_label: Under the axis.
        format_y: Turns a tick's value into its label.
        low: Lower end of the y axis; None takes the smallest value.
        high: Upper end; None takes the largest.
        level: A value to mark.
        level_label: Its name.
        hover: One text a point.
    """
    known = [value for value in y if value is not None]
    if not known:
        return _figure(title, _message("no finite values"))
    y_ticks = ticks(min(known) if low is None else low, max(known) if high is None else high)
    x_ticks = [tick for tick in ticks(x[0], x[-1], 6) if x[0] <= tick <= x[-1]]
    x_of = _scale(x[0], x[-1] if x[-1] > x[0] else x[0] + 1, LEFT, WIDTH - RIGHT)
    y_of = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_y_axis(y_ticks, y_of, format_y), _x_label(x_label)]
    parts += [_text(x_of(tick), HEIGHT - BOTTOM + 17, f"{tick:g}", "middle") for tick in x_ticks]
    base = y_of(y_ticks[0])
    for run in _runs(x, y):
        points = " ".join(f"{x_of(a):.1f},{y_of(b):.1f}" for a, b in run)
        first, last = x_of(run[0][0]), x_of(run[-1][0])
        parts.append(f'<polygon class="area" points="{first:.1f},{base:.1f} {points} {last:.1f},{base:.1f}"/>')
        parts.append(f'<polyline class="line" points="{points}"/>')
    if level is not None:
        at = y_of(level)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(WIDTH - RIGHT - 2, at - 5, level_label, "end", "level-label"))
    for index, (a, b) in enumerate(zip(x, y)):
        if b is not None and index < len(hover):
            tip = f"<title>{html.escape(hover[index])}</title>"
            parts.append(f'<circle class="dot" cx="{x_of(a):.1f}" cy="{y_of(b):.1f}" r="5">{tip}</circle>')
    return _figure(title, "".join(parts))


def bar_chart(
    title: str,
    labels: Sequence[str],
    values: Sequence[int],
    *,
    x_label: str,
    classes: Sequence[str],
) -> str:
    """Bars of counts, each with its label, its value on top, and a CSS class."""
    if not any(values):
        return _figure(title, _message("none"))
    y_ticks = [tick for tick in ticks(0, max(values)) if tick == int(tick)]
    x_of = _scale(0, len(values), LEFT, WIDTH - RIGHT)
    y_of = _scale(0, y_ticks[-1] if y_ticks[-1] >= max(values) else max(values), HEIGHT - BOTTOM, TOP)
    parts = [_y_axis(y_ticks, y_of, lambda value: f"{value:,.0f}"), _x_label(x_label)]
    for index, (label, value, style) in enumerate(zip(labels, values, classes)):
        left, width, top = x_of(index) + 3, x_of(index + 1) - x_of(index) - 6, y_of(value)
        height = HEIGHT - BOTTOM - top
        tip = f"<title>{html.escape(f'{label}: {value}')}</title>"
        parts.append(
            f'<rect class="bar {html.escape(style, quote=True)}" x="{left:.1f}" y="{top:.1f}" rx="2" '
            f'width="{width:.1f}" height="{height:.1f}">{tip}</rect>'
        )
        middle = left + width / 2
        if value:
            parts.append(_text(middle, top - 4, f"{value:,}", "middle", "value"))
        parts.append(_text(middle, HEIGHT - BOTTOM + 17, label, "middle"))
    return _figure(title, "".join(parts))


def _figure(title: str, body: str) -> str:
    name = html.escape(title, quote=True)
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{name}">{body}</svg></figure>'
    )


def _message(text: str) -> str:
    return _text(WIDTH / 2, HEIGHT / 2, text, "middle", "message")


def _text(x: float, y: float, text: str, anchor: str, style: str = "tick") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _x_label(text: str) -> str:
    return _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, text, "middle", "label")


def _y_axis(values: Sequence[float], y_of: Callable[[float], float], format_y: Format) -> str:
    parts = []
    for value in values:
        y = y_of(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, format_y(value), "end"))
    return "".join(parts)


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def _runs(x: Sequence[float], y: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """Stretches without a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for a, b in zip(x, y):
        if b is None:
            runs.append([])
        else:
            runs[-1].append((a, b))
    return [run for run in runs if run]
