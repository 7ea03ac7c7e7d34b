"""Accuracy statistics of next-token distributions, accumulated over row blocks in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.int64]

#: Lower edges, in logits, of the histogram of margins; the last bin is open.
MARGIN_EDGES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
#: Rows that are held in float64 at a time: 16 rows of a vocabulary of 262,144 are 32 MiB an array.
ROW_BLOCK = 16


@dataclasses.dataclass(frozen=True)
class RowStatistics:
    """Per-row results; every array has shape [rows].

    Attributes:
        kl: KL(reference || exported) in nats; NaN where a row holds NaN or +inf.
        nll_reference: Negative log-likelihood of the target id in nats; NaN where there is no target.
        nll_exported: The same of the exported model.
        top_reference: Id of the reference's highest logit (the lowest such id).
        top_exported: The same of the exported model.
        margin: The reference's top-1 minus top-2 logit where the two top ids differ, NaN elsewhere.
    """

    kl: npt.NDArray[np.float64]
    nll_reference: npt.NDArray[np.float64]
    nll_exported: npt.NDArray[np.float64]
    top_reference: Ids
    top_exported: Ids
    margin: npt.NDArray[np.float64]


def top_margin(logits: FloatArray) -> float:
    """Highest minus second highest logit of one row [vocab]; 0.0 for an exact tie, NaN if a logit is NaN."""
    if np.isnan(logits).any():
        return math.nan
    if logits.size < 2:
        return math.inf
    second, first = np.partition(logits, logits.size - 2)[-2:]
    return float(first) - float(second)


def row_statistics(reference: FloatArray, exported: FloatArray, targets: Ids) -> RowStatistics:
    """Compare two blocks of logits [rows, vocab] row by row, in float64.

    Args:
        reference: Logits of the reference, [rows, vocab].
        exported: Logits of the exported model, [rows, vocab].
        targets: The id that follows each row, [rows]; -1 where none does.

    Raises:
        ValueError: The shapes differ.
    """
    if reference.shape != exported.shape or reference.shape[:1] != targets.shape:
        raise ValueError(
            f"logits of shape {reference.shape} cannot be compared with {exported.shape} "
            f"for targets of shape {targets.shape}"
        )
    top_reference = reference.argmax(axis=1).astype(np.int64)
    top_exported = exported.argmax(axis=1).astype(np.int64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        x = reference.astype(np.float64)
        y = exported.astype(np.float64)
        x -= x.max(axis=1, keepdims=True)
        y -= y.max(axis=1, keepdims=True)
        weight = np.exp(x)
        sum_x = weight.sum(axis=1)
        log_x, log_y = np.log(sum_x), np.log(np.exp(y).sum(axis=1))
        difference = x - y
        if not np.isfinite(difference).all():
            # A logit of -inf on both sides (a masked id) adds nothing; on the exported side alone it adds inf.
            difference[(weight == 0.0) & ~np.isnan(y)] = 0.0
        kl = np.einsum("rv,rv->r", weight, difference) / sum_x - (log_x - log_y)
        rows = np.arange(len(targets))
        clipped = np.maximum(targets, 0)
        nll_reference = np.where(targets >= 0, log_x - x[rows, clipped], np.nan)
        nll_exported = np.where(targets >= 0, log_y - y[rows, clipped], np.nan)
    margin = np.full(len(targets), np.nan)
    for row in np.flatnonzero(top_reference != top_exported):
        margin[row] = top_margin(reference[row])
    # Rounding may leave -1e-17 for equal rows; np.maximum keeps NaN.
    return RowStatistics(np.maximum(kl, 0.0), nll_reference, nll_exported, top_reference, top_exported, margin)


@dataclasses.dataclass(frozen=True)
class Divergence:
    """One position where the two top ids differ.

    Attributes:
        window: Index of the window.
        position: Position in the window whose logits differ in their top id.
        reference_id: The reference's top id.
        exported_id: The exported model's top id.
        margin: The reference's top-1 minus top-2 logit there.
        verdict: "tie" when the margin is under the stated one, else "fault".
    """

    window: int
    position: int
    reference_id: int
    exported_id: int
    margin: float
    verdict: str


@dataclasses.dataclass(frozen=True)
class PositionBin:
    """Means over the window positions start <= position < stop."""

    start: int
    stop: int
    tokens: int
    kl_mean: float
    top1_agreement: float


@dataclasses.dataclass(frozen=True)
class Disagreements:
    """Positions where the top ids differ, by the reference's margin there.

    ``counts[i]`` belongs to margins in [edges[i], edges[i + 1]); the last bin is open, and a NaN counts there.
    """

    count: int
    ties: int
    faults: int
    tie_margin: float
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Figures:
    """What teacher forcing says of one exported model against its reference.

    KL is KL(reference || exported) in nats. Standard errors take tokens as independent draws; those of perplexities
    and of their relative difference come from the standard error of the mean (paired) log-likelihood.
    """

    tokens: int
    kl_mean: float
    kl_mean_standard_error: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    perplexity: float
    perplexity_standard_error: float
    perplexity_reference: float
    perplexity_reference_standard_error: float
    perplexity_delta: float
    perplexity_delta_standard_error: float
    nonfinite_rows: int
    first_divergence: Divergence | None
    worst_divergence: Divergence | None
    disagreements: Disagreements
    by_position: tuple[PositionBin, ...]


def standard_error(values: npt.NDArray[np.float64]) -> float:
    """Standard error of the mean of [n] values, NaN for fewer than two."""
    if len(values) < 2:
        return math.nan
    return float(values.std(ddof=1) / math.sqrt(len(values)))


class TokenStatistics:
    """Accumulates rows of two models' logits; keeps a few numbers a token, never the logits."""

    def __init__(self, *, tie_margin: float, position_bins: int = 64) -> None:
        self.tie_margin = tie_margin
        self.position_bins = position_bins
        self._rows: list[RowStatistics] = []
        self._windows: list[Ids] = []
        self._positions: list[Ids] = []

    def add(self, window: int, position: int, reference: FloatArray, exported: FloatArray, targets: Ids) -> None:
        """Add consecutive rows of one window.

        Args:
            window: Index of the window.
            position: Position in the window of the first row.
            reference: Logits, [rows, vocab].
            exported: Logits, [rows, vocab].
            targets: The id after each row, [rows]; -1 where none follows.

        Raises:
            ValueError: The shapes differ.
        """
        for start in range(0, len(targets), ROW_BLOCK):
            block = slice(start, start + ROW_BLOCK)
            self._rows.append(row_statistics(reference[block], exported[block], targets[block]))
        self._windows.append(np.full(len(targets), window, np.int64))
        self._positions.append(np.arange(position, position + len(targets), dtype=np.int64))

    def _column(self, name: str) -> npt.NDArray[Any]:
        if not self._rows:
            return np.zeros(0)
        return np.concatenate([getattr(row, name) for row in self._rows])

    def kl(self) -> npt.NDArray[np.float64]:
        """KL of every row added so far, [tokens], in nats."""
        return self._column("kl")

    def agreement(self) -> npt.NDArray[np.bool_]:
        """Whether the top ids agree, [tokens]."""
        return np.asarray(self._column("top_reference") == self._column("top_exported"))

    def figures(self) -> Figures:
        """The summary.

        Raises:
            ValueError: No row was added.
        """
        if not self._rows:
            raise ValueError("no tokens were compared")
        kl, agree = self.kl(), self.agreement()
        nll_reference, nll = self._column("nll_reference"), self._column("nll_exported")
        predicted = ~np.isnan(nll_reference)
        nll_reference, nll = nll_reference[predicted], nll[predicted]
        perplexity, perplexity_error = _perplexity(nll)
        reference, reference_error = _perplexity(nll_reference)
        ratio = perplexity / reference if reference else math.nan
        divergences, disagreements = self._divergences(agree)
        return Figures(
            tokens=len(kl),
            kl_mean=float(kl.mean()),
            kl_mean_standard_error=standard_error(kl),
            kl_p99=float(np.quantile(kl, 0.99)) if np.isfinite(kl).all() else math.nan,
            kl_max=float(kl.max()),
            top1_agreement=float(agree.mean()),
            perplexity=perplexity,
            perplexity_standard_error=perplexity_error,
            perplexity_reference=reference,
            perplexity_reference_standard_error=reference_error,
            perplexity_delta=ratio - 1.0,
            perplexity_delta_standard_error=ratio * standard_error(nll - nll_reference),
            nonfinite_rows=int((~np.isfinite(kl)).sum()),
            first_divergence=divergences[0] if divergences else None,
            worst_divergence=max(
                divergences,
                key=lambda found: math.inf if math.isnan(found.margin) else found.margin,
                default=None,
            ),
            disagreements=disagreements,
            by_position=self._by_position(kl, agree),
        )

    def _divergences(self, agree: npt.NDArray[np.bool_]) -> tuple[list[Divergence], Disagreements]:
        windows, positions = np.concatenate(self._windows), np.concatenate(self._positions)
        reference, exported = self._column("top_reference"), self._column("top_exported")
        margins = self._column("margin")
        found = [
            Divergence(
                window=int(windows[row]),
                position=int(positions[row]),
                reference_id=int(reference[row]),
                exported_id=int(exported[row]),
                margin=float(margins[row]),
                verdict=margin_verdict(float(margins[row]), self.tie_margin),
            )
            for row in np.flatnonzero(~agree)
        ]
        ties = sum(divergence.verdict == "tie" for divergence in found)
        disagreeing = np.nan_to_num(margins[~agree], nan=MARGIN_EDGES[-1])
        counts = np.bincount(np.searchsorted(MARGIN_EDGES, disagreeing, side="right") - 1, minlength=len(MARGIN_EDGES))
        return found, Disagreements(
            count=len(found),
            ties=ties,
            faults=len(found) - ties,
            tie_margin=self.tie_margin,
            edges=MARGIN_EDGES,
            counts=tuple(int(count) for count in counts),
        )

    def _by_position(self, kl: npt.NDArray[np.float64], agree: npt.NDArray[np.bool_]) -> tuple[PositionBin, ...]:
        positions = np.concatenate(self._positions)
        length = int(positions.max()) + 1
        width = max(1, math.ceil(length / self.position_bins))
        bins = []
        for start in range(0, length, width):
            inside = (positions >= start) & (positions < start + width)
            if inside.any():
                bins.append(
                    PositionBin(
                        start=start,
                        stop=min(start + width, length),
                        tokens=int(inside.sum()),
                        kl_mean=float(kl[inside].mean()),
                        top1_agreement=float(agree[inside].mean()),
                    )
                )
        return tuple(bins)


def margin_verdict(margin: float, tie_margin: float) -> str:
    """Return "tie" for a margin under ``tie_margin``, "fault" for any other, NaN included."""
    return "tie" if margin < tie_margin else "fault"


def _perplexity(nll: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Perplexity and its standard error, by the delta method, from log-likelihoods [n] in nats."""
    if not len(nll):
        return math.nan, math.nan
    mean = float(nll.mean())
    perplexity = math.inf if mean > 700 else math.exp(mean)  # exp overflows a double at 709
    return perplexity, perplexity * standard_error(nll)
