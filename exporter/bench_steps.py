"""Times single calls of an engine, in turn: a verify by number of rows, and a draft's step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specexport.exporter.bench_statistics import Clock, in_turn
from specexport.exporter.progress import Progress

CHUNK = 512
VERIFY = "verify"
DRAFT = "draft"
BANDWIDTH = "bandwidth"


def some_ids(count: int, vocab_size: int) -> Any:
    """int64 [1, count] of different ids, the same at every call: what they are changes no kernel's work."""
    return np.random.default_rng(0).integers(0, vocab_size, (1, count))


def fill(engine: Any, context: int, room: int) -> Any:
    """A cache of ``engine`` with ``context`` positions, and room for ``room`` more."""
    cache = engine.new_cache(batch=1, capacity=context + room)
    ids = some_ids(context, engine.vocab_size)
    for start in range(0, context, CHUNK):
        chunk = ids[:, start : start + CHUNK]
        engine.forward(chunk, cache, logits_rows=np.array([chunk.shape[1] - 1]), copy=False)
    return cache


def stepper(engine: Any, cache: Any, context: int, width: int, clock: Clock = time.perf_counter) -> Callable[[], float]:
    """What runs ``width`` rows behind ``context`` positions, forgets them, and returns the milliseconds."""
    ids = some_ids(width, engine.vocab_size)

    def step() -> float:
        start = clock()
        engine.forward(ids, cache, copy=False)
        milliseconds = (clock() - start) * 1e3
        cache.rewind(context)
        return milliseconds

    return step


def time_steps(
    pair: Any,
    context: int,
    widths: Sequence[int],
    rounds: int,
    progress: Progress,
    *,
    beside: Mapping[str, Callable[[], float]] | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds of target and draft behind ``context`` positions, all of them in turn.

    Args:
        pair: `specexport.runtime.load`'s.
        context: Positions in the caches.
        widths: Rows of a verify.
        rounds: Measurements of each.
        progress: Told of the stage.
        beside: More tasks for every round. A step that does not count follows each, so that the next that does finds
            the processor's caches as decoding leaves them.
        clock: Seconds; tests put their own.

    Returns:
        ``verify 1``, ``verify 2`` ... , ``draft`` where it has an engine, and the names of ``beside``.
    """
    room = max(widths)
    draft = getattr(pair.draft, "engine", None)
    with progress.stage(f"Steps at {context:,} tokens", rounds + 1) as advance:
        cache = fill(pair.target, context, room)
        tasks = {f"{VERIFY} {width}": stepper(pair.target, cache, context, width, clock) for width in widths}
        if draft is not None and draft.context_length >= context + room:
            tasks[DRAFT] = stepper(draft, fill(draft, context, room), context, 1, clock)
        settle = stepper(pair.target, cache, context, widths[0], clock)
        tasks |= {name: _settled(task, settle) for name, task in (beside or {}).items()}
        return in_turn(tasks, rounds, advance=advance)


def _settled(task: Callable[[], float], settle: Callable[[], float]) -> Callable[[], float]:
    def measure() -> float:
        value = task()
        settle()
        return value

    return measure
