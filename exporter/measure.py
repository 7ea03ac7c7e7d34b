"""What a pair costs where it was built, in short: `specexport bench` measures the same at length."""

from __future__ import annotations

import statistics
from typing import Any

from specexport.exporter.bench_steps import DRAFT, VERIFY, time_steps
from specexport.exporter.progress import Progress, Silent

WIDTHS = (1, 2, 3, 4, 5, 8)
CONTEXT = 128
REPEATS = 15


def measure_pair(pair: Any, progress: Progress | None = None) -> dict[str, Any]:
    """Medians over interleaved repeats at a context of 128 tokens.

    Args:
        pair: `specexport.runtime.load`'s.
        progress: Told of the stage.

    Returns:
        ``verify_ms`` (rows to milliseconds of the target), ``draft_ms`` (of one draft step; None where it has no
        engine), ``context`` and ``repeats``.
    """
    context = max(1, min(CONTEXT, pair.target.context_length - max(WIDTHS)))
    widths = [width for width in WIDTHS if context + width <= pair.target.context_length]
    samples = time_steps(pair, context, widths, REPEATS, progress or Silent())
    medians = {name: round(statistics.median(values), 4) for name, values in samples.items()}
    return {
        "verify_ms": {str(width): medians[f"{VERIFY} {width}"] for width in widths},
        "draft_ms": medians.get(DRAFT),
        "context": context,
        "repeats": REPEATS,
    }
