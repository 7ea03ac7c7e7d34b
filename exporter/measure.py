"""What a pair costs where it was built: milliseconds of the target by number of rows, and of the draft."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

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
    engines = {"target": pair.target, "draft": getattr(pair.draft, "engine", None)}
    context = min(CONTEXT, pair.target.context_length - max(WIDTHS))
    with (progress or Silent()).stage("Measuring the engines", REPEATS) as advance:
        samples: dict[tuple[str, int], list[float]] = {}
        steps = [("target", width) for width in WIDTHS]
        if engines["draft"] is not None:
            steps.append(("draft", 1))
        caches = {role: _filled(engine, context) for role, engine in engines.items() if engine is not None}
        for repeat in range(REPEATS + 1):
            for role, width in steps:
                milliseconds = _step(engines[role], caches[role], context, width)
                if repeat:  # the first round warms up
                    samples.setdefault((role, width), []).append(milliseconds)
            advance(1)
    medians = {step: round(statistics.median(values), 4) for step, values in samples.items()}
    return {
        "verify_ms": {str(width): medians["target", width] for width in WIDTHS},
        "draft_ms": medians.get(("draft", 1)),
        "context": context,
        "repeats": REPEATS,
    }


def _filled(engine: Any, context: int) -> Any:
    cache = engine.new_cache(batch=1, capacity=context + max(WIDTHS))
    engine.forward(np.ones((1, context), np.int64), cache, logits_rows=np.array([context - 1]))
    return cache


def _step(engine: Any, cache: Any, context: int, width: int) -> float:
    ids = np.ones((1, width), np.int64)
    start = time.perf_counter()
    engine.forward(ids, cache)
    milliseconds = (time.perf_counter() - start) * 1e3
    cache.rewind(context)
    return milliseconds
