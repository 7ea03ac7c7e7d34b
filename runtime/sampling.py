"""Logits to distributions: repetition penalty, temperature, top-k, top-p, min-p, in Transformers' order and meaning."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from specexport.plugins.errors import InputError

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

BLOCK = 64  # logits, a stride apart, whose maximum stands for them while top-k candidates are sought


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """How a token is chosen. 0 turns ``top_k`` and ``min_p`` off, 1 the other three."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        rules = (
            ("temperature", self.temperature > 0, "above 0; for greedy decoding pass do_sample=False"),
            ("top_k", self.top_k >= 0, "at least 1, or 0 for no limit"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise InputError(f"{name} must be {rule}; got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class Distributions:
    """Rows of probabilities over a shared set of tokens; every other token has probability 0.

    Attributes:
        support: Token ids, ascending, int64 [U].
        probabilities: float64 [R, U], each row's sum 1.
    """

    support: Ints
    probabilities: Doubles

    def over(self, support: Ints) -> Doubles:
        """The rows over a larger ``support``, float64 [R, len(support)]."""
        if len(support) == len(self.support):
            return self.probabilities
        rows = np.zeros((len(self.probabilities), len(support)))
        rows[:, np.searchsorted(support, self.support)] = self.probabilities
        return rows


def joint_support(left: Ints, right: Ints) -> Ints:
    """Tokens of either, ascending."""
    return left if np.array_equal(left, right) else np.union1d(left, right)


def stack(parts: list[Distributions]) -> Distributions:
    """The rows of all parts, over the tokens of any."""
    support = parts[0].support
    for part in parts[1:]:
        support = joint_support(support, part.support)
    return Distributions(support, np.concatenate([part.over(support) for part in parts]))


def penalize(logits: Floats, ids: Ints, penalty: float) -> None:
    """Repetition penalty on one row [V], in place: negative logits of ``ids`` times ``penalty``, others divided."""
    values = logits[ids]
    logits[ids] = np.where(values < 0, values * np.float32(penalty), values / np.float32(penalty))


def distributions(logits: Floats, settings: SamplingSettings) -> Distributions:
    """The distributions that float32 ``logits`` [R, V] stand for under ``settings``.

    Tokens tied with the last one kept by top-k or top-p are kept too. A row's numbers are the same bit for bit
    whatever rows stand beside it: sums run sequentially, where the zeros of others' tokens change nothing.
    """
    support, totals = _candidates(logits, settings)
    rows = logits if len(support) == logits.shape[1] else logits[:, support]
    scores = rows.astype(np.float64) / settings.temperature
    count = scores.shape[1]
    if 0 < settings.top_k < count:
        last = np.partition(scores, count - settings.top_k, axis=1)[:, count - settings.top_k]
        scores[scores < last[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    if settings.top_p < 1:
        _keep_top_p(weights, settings.top_p, totals)
    if settings.min_p > 0:
        weights[weights < settings.min_p] = 0  # the most likely token's weight is exactly 1
    return Distributions(support, weights / weights.cumsum(axis=1)[:, -1:])


def _keep_top_p(weights: Doubles, top_p: float, totals: Doubles | None) -> None:
    """Zero, in place, every token before which the likelier ones already hold ``top_p`` of the mass."""
    descending = -np.sort(-weights, axis=1)
    cumulative = descending.cumsum(axis=1)
    before = np.concatenate([np.zeros((len(weights), 1)), cumulative[:, :-1]], axis=1)
    mass = cumulative[:, -1:] if totals is None else totals[:, None]
    kept = np.maximum((before < top_p * mass).sum(axis=1), 1)
    weights[weights < np.take_along_axis(descending, kept[:, None] - 1, axis=1)] = 0


def _candidates(logits: Floats, settings: SamplingSettings) -> tuple[Ints, Doubles | None]:
    """Token ids that may have probability in any row (a superset, found cheaply), and masses for top-p.

    The masses, float64 [R] in units of the likeliest token's weight, are given where top-p acts without top-k, and
    count the tokens left out here too.
    """
    size = logits.shape[1]
    found = np.zeros(size, bool)
    if 0 < settings.top_k < size:
        blocks = size // BLOCK
        if blocks < settings.top_k:
            return np.arange(size), None
        for row in logits:  # at least top_k logits reach the top_k-th largest block maximum
            peaks = row[: blocks * BLOCK].reshape(BLOCK, blocks).max(axis=0)
            found |= row >= np.partition(peaks, blocks - settings.top_k)[blocks - settings.top_k]
        return np.flatnonzero(found), None
    if settings.top_p < 1:
        totals = np.empty(len(logits))
        for i, row in enumerate(logits):
            scores = row.astype(np.float64) / settings.temperature
            weights = np.exp(scores - scores.max())
            totals[i] = weights.sum()
            # Tokens this light add up to less than 1 - top_p, so top-p drops them all; half, for rounding.
            found |= weights >= (1 - settings.top_p) * totals[i] / size / 2
        return np.flatnonzero(found), totals
    if settings.min_p > 0:
        reach = np.float32(settings.temperature * np.log(settings.min_p) * 1.001 - 0.001)
        for row in logits:
            found |= row >= row.max() + reach
        return np.flatnonzero(found), None
    return np.arange(size), None


def draw(probabilities: Doubles, uniform: Doubles) -> Ints:
    """Index of the token that each ``uniform`` [...] picks from ``probabilities`` [..., U], by inverting the sum."""
    cumulative = probabilities.cumsum(axis=-1)
    total = cumulative[..., -1:]
    point = np.minimum(uniform[..., None] * total, np.nextafter(total, 0))
    picked: Ints = (cumulative <= point).sum(axis=-1)
    return picked
