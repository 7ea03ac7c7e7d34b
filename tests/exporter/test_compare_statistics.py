"""Statistics of a comparison against hand-made tables of distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specexport.exporter.compare_statistics import TokenStatistics, row_statistics, top_margin


def logits(rows: list[list[float]]) -> np.ndarray:
    """Logits, up to a constant a row, of rows of probabilities."""
    with np.errstate(divide="ignore"):
        return (np.log(np.array(rows)) + np.arange(len(rows))[:, None]).astype(np.float32)


def test_kl_of_known_distributions_and_its_direction() -> None:
    p = [[0.5, 0.5], [0.9, 0.1], [0.25, 0.75]]
    q = [[0.25, 0.75], [0.1, 0.9], [0.25, 0.75]]
    found = row_statistics(logits(p), logits(q), np.array([0, 1, -1]))
    expected = [
        0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75),
        0.9 * math.log(9) + 0.1 * math.log(1 / 9),
        0.0,
    ]
    np.testing.assert_allclose(found.kl, expected, atol=1e-6)
    np.testing.assert_allclose(found.nll_reference[:2], -np.log([0.5, 0.1]), rtol=1e-6)
    np.testing.assert_allclose(found.nll_exported[:2], -np.log([0.25, 0.9]), rtol=1e-6)
    assert math.isnan(found.nll_exported[2])


def test_a_masked_id_adds_nothing_on_both_sides_and_infinity_on_the_exported_alone() -> None:
    p = logits([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]])
    q = logits([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    kl = row_statistics(p, q, np.array([0, 0])).kl
    assert kl[0] == pytest.approx(0.0, abs=1e-7)
    assert kl[1] == math.inf


def test_tiny_differences_are_not_lost_to_cancellation() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(0, 3, (4, 1000)).astype(np.float32)
    y = x + rng.normal(0, 1e-4, x.shape).astype(np.float32)
    p = np.exp(x.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    q = np.exp(y.astype(np.float64))
    q /= q.sum(1, keepdims=True)
    np.testing.assert_allclose(row_statistics(x, y, np.zeros(4, int)).kl, (p * np.log(p / q)).sum(1), rtol=1e-5)


def test_figures_means_quantile_and_standard_errors() -> None:
    rng = np.random.default_rng(1)
    reference = rng.normal(0, 1, (300, 7)).astype(np.float32)
    exported = reference + rng.normal(0, 0.3, reference.shape).astype(np.float32)
    targets = rng.integers(0, 7, 300)
    targets[[99, 199, 299]] = -1
    statistics = TokenStatistics(tie_margin=0.2, position_bins=10)
    for window in range(3):
        rows = slice(window * 100, window * 100 + 100)
        statistics.add(window, 0, reference[rows], exported[rows], targets[rows])
    figures = statistics.figures()

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    p, q = log_softmax(reference), log_softmax(exported)
    kl = (np.exp(p) * (p - q)).sum(1)
    keep = np.flatnonzero(targets >= 0)
    nll_p, nll_q = -p[keep, targets[keep]], -q[keep, targets[keep]]
    root = math.sqrt(297)
    assert figures.tokens == 300
    assert figures.kl_mean == pytest.approx(kl.mean())
    assert figures.kl_mean_standard_error == pytest.approx(kl.std(ddof=1) / math.sqrt(300))
    assert figures.kl_p99 == pytest.approx(np.quantile(kl, 0.99))
    assert figures.kl_max == pytest.approx(kl.max())
    assert figures.top1_agreement == (reference.argmax(1) == exported.argmax(1)).mean()
    assert figures.perplexity == pytest.approx(math.exp(nll_q.mean()))
    assert figures.perplexity_reference == pytest.approx(math.exp(nll_p.mean()))
    assert figures.perplexity_standard_error == pytest.approx(figures.perplexity * nll_q.std(ddof=1) / root)
    ratio = figures.perplexity / figures.perplexity_reference
    assert figures.perplexity_delta == pytest.approx(ratio - 1)
    assert figures.perplexity_delta_standard_error == pytest.approx(ratio * (nll_q - nll_p).std(ddof=1) / root)
    # Pairing removes what both models share: the error of the difference is far below either's own.
    assert figures.perplexity_delta_standard_error < 0.5 * figures.perplexity_standard_error / figures.perplexity

    assert [(b.start, b.stop, b.tokens) for b in figures.by_position][:2] == [(0, 10, 30), (10, 20, 30)]
    first_bin = [w * 100 + i for w in range(3) for i in range(10)]
    assert figures.by_position[0].kl_mean == pytest.approx(kl[first_bin].mean())


def test_disagreements_by_margin_ties_faults_first_and_worst() -> None:
    reference = np.array([[3.0, 2.95, 0], [3, 1, 0], [0, 5, 4.5], [1, 0, 0]], np.float32)
    exported = np.array([[2.9, 3.0, 0], [1, 3, 0], [0, 5, 4.5], [1, 0, 0]], np.float32)
    statistics = TokenStatistics(tie_margin=0.1)
    statistics.add(4, 10, reference, exported, np.full(4, -1))
    figures = statistics.figures()
    assert figures.top1_agreement == 0.5
    first, worst = figures.first_divergence, figures.worst_divergence
    assert first is not None and worst is not None
    assert (first.window, first.position, first.reference_id, first.exported_id) == (4, 10, 0, 1)
    assert first.margin == pytest.approx(0.05, abs=1e-6)
    assert first.verdict == "tie"
    assert (worst.position, worst.margin, worst.verdict) == (11, 2.0, "fault")
    found = figures.disagreements
    assert (found.count, found.ties, found.faults) == (2, 1, 1)
    assert {edge: count for edge, count in zip(found.edges, found.counts) if count} == {0.02: 1, 2.0: 1}
    assert sum(found.counts) == 2


def test_a_nan_reaches_the_figures() -> None:
    reference = np.eye(3, dtype=np.float32)
    exported = reference.copy()
    exported[1, 2] = np.nan
    statistics = TokenStatistics(tie_margin=0.1)
    statistics.add(0, 0, reference, exported, np.array([1, 2, -1]))
    figures = statistics.figures()
    assert figures.nonfinite_rows == 1
    assert math.isnan(figures.kl_mean) and math.isnan(figures.kl_p99) and math.isnan(figures.kl_max)
    assert math.isnan(figures.perplexity)
    assert figures.top1_agreement == pytest.approx(2 / 3)


def test_margin_of_ties_and_of_one_id() -> None:
    assert top_margin(np.array([1.0, 2.0, 2.0], np.float32)) == 0.0
    assert top_margin(np.array([1.0], np.float32)) == math.inf
    assert math.isnan(top_margin(np.array([1.0, np.nan], np.float32)))


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) cannot be compared with \(2, 4\)"):
        row_statistics(np.zeros((2, 3)), np.zeros((2, 4)), np.zeros(2, int))
