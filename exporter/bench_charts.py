"""Horizontal bars with the range around each, as inline SVG in the colours of the page."""

from __future__ import annotations

import html
from collections.abc import Sequence

WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 400, 118, 46, 26, 8, 22


def ratio_bars(title: str, labels: Sequence[str], rows: Sequence[tuple[float, float, float]]) -> str:
    """One bar a label, up to its median, with a line from the low to the high value; dashed where the ratio is 1.

    Args:
        title: Heading, also read by screen readers.
        labels: One a bar.
        rows: Median, low and high of each.
    """
    most = max([1.2, *(high for _, _, high in rows)])
    height = TOP + ROW * len(rows) + BOTTOM

    def x_of(value: float) -> float:
        return LEFT + value / most * (WIDTH - LEFT - RIGHT)

    at = x_of(1)
    parts = [f'<line class="level" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>']
    parts.append(f'<text x="{at:.1f}" y="{height - 6}" text-anchor="middle">1</text>')
    for index, (label, (median, low, high)) in enumerate(zip(labels, rows)):
        top = TOP + ROW * index
        middle = top + ROW / 2
        tip = html.escape(f"{label}: {median:.2f}, 10 % {low:.2f}, 90 % {high:.2f}")
        parts.append(
            f'<text x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{html.escape(label)}</text>'
            f'<rect style="fill: var(--line); opacity: .75" x="{LEFT}" y="{top + 4}" rx="2" '
            f'width="{max(0.0, x_of(median) - LEFT):.1f}" height="{ROW - 8}"><title>{tip}</title></rect>'
            f'<line style="stroke: var(--soft); stroke-width: 2" x1="{x_of(low):.1f}" x2="{x_of(high):.1f}" '
            f'y1="{middle:.1f}" y2="{middle:.1f}"/>'
            f'<text class="value" x="{x_of(max(median, high)) + 6:.1f}" y="{middle + 4:.1f}">{median:.2f}</text>'
        )
    name = html.escape(title, quote=True)
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{name}">{"".join(parts)}</svg></figure>'
    )
