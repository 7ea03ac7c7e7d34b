"""Medians, percentiles and ratios of repeated measurements, and running them in turn."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specexport.plugins.errors import InputError

Clock = Callable[[], float]
#: Above this relative spread of one and the same step, single figures say little; ratios hold better.
NOISY = 0.10


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``values`` lie, between neighbours by straight line."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclasses.dataclass(frozen=True)
class Summary:
    """Repeated measurements of one thing.

    Attributes:
        count: How many.
        median: The figure to quote.
        p10: 10 % lie below.
        p90: 90 % lie below.
        p99: 99 % lie below; with few measurements nearly the largest.
        spread: The middle half's width, as a share of the median.
    """

    count: int
    median: float
    p10: float
    p90: float
    p99: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Of at least two measurements: a figure never comes from a single one.

        Raises:
            InputError: There are fewer.
        """
        if len(values) < 2:
            raise InputError(f"a figure needs at least 2 measurements, there are {len(values)}; raise --rounds")
        median = statistics.median(values)
        width = percentile(values, 0.75) - percentile(values, 0.25)
        return cls(
            count=len(values),
            median=median,
            p10=percentile(values, 0.1),
            p90=percentile(values, 0.9),
            p99=percentile(values, 0.99),
            spread=width / median if median else 0.0,
        )

    def to_json(self) -> dict[str, Any]:
        """Rounded to six digits."""
        return {
            name: value if isinstance(value, int) else float(f"{value:.6g}")
            for name, value in dataclasses.asdict(self).items()
        }


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Pair by pair: the i-th of each was measured one after the other."""
    if len(numerators) != len(denominators):
        raise InputError(f"{len(numerators)} measurements cannot be paired with {len(denominators)}")
    return [a / b for a, b in zip(numerators, denominators)]


def in_turn(
    tasks: Mapping[str, Callable[[], float]],
    rounds: int,
    *,
    warm_up: int = 1,
    advance: Callable[[float], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Run every task once a round, A B C A B C, so that what disturbs the machine disturbs all alike.

    Args:
        tasks: Name to what measures once and returns the measurement.
        rounds: Rounds that count.
        warm_up: Rounds before them that do not.
        advance: Called with 1 after every round.

    Returns:
        Name to its measurements [rounds], the i-th of all tasks from the same round.
    """
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(warm_up + rounds):
        for name, task in tasks.items():
            value = task()
            if turn >= warm_up:
                found[name].append(value)
        advance(1)
    return found


def noise(samples: Sequence[float]) -> dict[str, Any]:
    """How far one and the same step's times differ, as ``spread``, whether that is ``noisy``, and a sentence."""
    spread = Summary.of(samples).spread
    noisy = spread > NOISY
    text = f"the middle half of one step's times spans {spread:.0%} of their median"
    advice = "; the machine is noisy: quote ratios, not single figures" if noisy else ""
    return {"spread": round(spread, 4), "noisy": noisy, "text": text + advice}
