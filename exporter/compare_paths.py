"""The three ways an engine computes the same rows: prefill in chunks, token by token, verify of k+1 rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specexport.exporter.compare_statistics import Ids, TokenStatistics

Logits = npt.NDArray[np.float32]
Rows = Iterator[tuple[int, Logits]]


class EngineLike(Protocol):
    """What the comparison needs of an engine; `specexport.runtime.engine` has the real one."""

    vocab_size: int
    context_length: int

    def new_cache(self, batch: int = 1, capacity: int = 256) -> Any:
        """Make an empty cache with room for ``capacity`` rows a sequence; it has ``rewind(length)``."""
        ...

    def forward(
        self,
        input_ids: npt.ArrayLike,
        cache: Any,
        *,
        query_length: npt.ArrayLike | None = None,
        logits_rows: npt.ArrayLike | None = None,
        copy: bool = True,
    ) -> Logits:
        """Append input_ids int64 [batch, sequence] and return float32 logits [rows, vocab]."""
        ...


@dataclasses.dataclass(frozen=True)
class Segment:
    """Positions start <= position < stop of one window, computed again through the other paths."""

    window: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class PathFigures:
    """One path against the reference, and against prefill on the same rows.

    Attributes:
        tokens: Rows that this path computed.
        kl_mean: KL(reference || exported) in nats, over those rows.
        kl_max: Its maximum.
        top1_agreement: Share of rows whose top id is the reference's, 0 to 1.
        max_difference: Largest absolute difference of a logit from prefill's; 0.0 for prefill itself, NaN where one
            of them is not finite and the other is.
        identical: Whether every logit equals prefill's bit for bit.
        first_difference: Window and position of the first row that is not prefill's, None if all are.
    """

    tokens: int
    kl_mean: float
    kl_max: float
    top1_agreement: float
    max_difference: float
    identical: bool
    first_difference: tuple[int, int] | None


def choose_segments(lengths: Sequence[int], tokens: int | None) -> list[Segment]:
    """Where to recompute: all of every window, or ``tokens`` rows, half at the start and half at the deepest end.

    Args:
        lengths: Tokens of each window.
        tokens: About how many rows to recompute; None for all.
    """
    if not lengths:
        return []
    if tokens is None or tokens >= sum(lengths):
        return [Segment(window, 0, length) for window, length in enumerate(lengths)]
    last = max(range(len(lengths)), key=lambda window: (lengths[window], window))
    half = max(1, tokens // 2)
    if last == 0 and lengths[0] <= 2 * half:
        return [Segment(0, 0, lengths[0])]
    start = Segment(0, 0, min(half, lengths[0]))
    return [start, Segment(last, max(0, lengths[last] - half), lengths[last])]


def prefill(engine: EngineLike, ids: Ids, chunk: int) -> Rows:
    """Yield (position, logits [rows, vocab]) of a whole window [tokens], in chunks of ``chunk`` rows."""
    cache = engine.new_cache(1, capacity=len(ids))
    for start in range(0, len(ids), chunk):
        block = ids[start : start + chunk]
        yield start, _forward(engine, block, cache)


def token_by_token(engine: EngineLike, ids: Ids, segment: Segment, chunk: int) -> Rows:
    """Yield (position, logits [1, vocab]) of the segment, one token a call after a prefill of what precedes it."""
    cache = _prefilled(engine, ids, segment.start, chunk, spare=0)
    for position in range(segment.start, segment.stop):
        yield position, _forward(engine, ids[position : position + 1], cache)


def verify(engine: EngineLike, ids: Ids, segment: Segment, chunk: int, rows: int) -> Rows:
    """Yield (position, logits [rows, vocab]) of the segment in blocks of ``rows`` = k+1 rows.

    After each block a block of other ids is appended and rewound, so a cache whose rewind leaves anything behind
    shows in the next block.
    """
    cache = _prefilled(engine, ids, segment.start, chunk, spare=rows)
    for start in range(segment.start, segment.stop, rows):
        block = ids[start : min(start + rows, segment.stop)]
        yield start, _forward(engine, block, cache)
        length = start + len(block)
        wrong = np.roll(ids, 1)[start:length][: engine.context_length - length]
        if len(wrong):
            _forward(engine, wrong, cache)
            cache.rewind(np.array([length], np.int64))


class PathStatistics:
    """Accumulates one path's rows against the reference's and prefill's."""

    def __init__(self, tie_margin: float) -> None:
        self._statistics = TokenStatistics(tie_margin=tie_margin)
        self._max_difference = 0.0
        self._first_difference: tuple[int, int] | None = None
        self._tokens = 0

    def add(
        self, window: int, position: int, reference: Logits, exported: Logits, prefilled: Logits, targets: Ids
    ) -> None:
        """Add consecutive rows of one window: logits [rows, vocab] of the reference, this path and prefill."""
        self._statistics.add(window, position, reference, exported, targets)
        self._tokens += len(targets)
        if exported.tobytes() == prefilled.tobytes():
            return
        differing = (exported != prefilled) & ~(np.isnan(exported) & np.isnan(prefilled))
        rows = np.flatnonzero(differing.any(axis=1))
        if not len(rows):
            return
        if self._first_difference is None:
            self._first_difference = (window, position + int(rows[0]))
        with np.errstate(invalid="ignore"):
            difference = np.abs(exported[differing].astype(np.float64) - prefilled[differing])
        self._max_difference = float(np.maximum(self._max_difference, difference.max()))

    def figures(self) -> PathFigures:
        """The summary; NaN means where no row was added."""
        kl, agreement = self._statistics.kl(), self._statistics.agreement()
        return PathFigures(
            tokens=self._tokens,
            kl_mean=float(kl.mean()) if len(kl) else math.nan,
            kl_max=float(kl.max()) if len(kl) else math.nan,
            top1_agreement=float(agreement.mean()) if len(kl) else math.nan,
            max_difference=self._max_difference,
            identical=self._first_difference is None,
            first_difference=self._first_difference,
        )


Path = Callable[[EngineLike, Ids, Segment, int], Rows]


def other_paths(rows: int) -> dict[str, Path]:
    """The paths besides prefill by name; ``rows`` is k+1."""
    return {
        "token_by_token": token_by_token,
        "verify": lambda engine, ids, segment, chunk: verify(engine, ids, segment, chunk, rows),
    }


def _prefilled(engine: EngineLike, ids: Ids, length: int, chunk: int, spare: int) -> Any:
    """A cache that holds the first ``length`` ids, with room for the window and ``spare`` rows more."""
    cache = engine.new_cache(1, capacity=len(ids) + spare)
    for start in range(0, length, chunk):
        block = ids[start : min(start + chunk, length)]
        engine.forward(block[None], cache, logits_rows=np.array([len(block) - 1], np.int64))
    return cache


def _forward(engine: EngineLike, block: Ids, cache: Any) -> Logits:
    """Logits [rows, vocab] of a block of ids [rows]; valid until the next call."""
    return engine.forward(block[None], cache, copy=False)
