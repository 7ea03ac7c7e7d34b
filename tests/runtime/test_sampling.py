"""Distributions against a plain statement of them and against Transformers' own; draws, noise, acceptance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.runtime.accept import accept, residual
from specexport.runtime.noise import Purpose, uniforms
from specexport.runtime.sampler import Sampler
from specexport.runtime.sampling import Distributions, SamplingSettings, distributions, draw, penalize, stack

OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.9]),
        "top_k": st.sampled_from([0, 1, 2, 5, 50, 1000]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    }
)


def dense(rows: Distributions, size: int) -> np.ndarray:
    return rows.over(np.arange(size))


def transformers_law(logits: np.ndarray, penalty: float, seen: list[int], options: dict) -> np.ndarray:
    torch = pytest.importorskip("torch")
    from transformers import generation as g

    steps = [g.RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
    steps.append(g.TemperatureLogitsWarper(options["temperature"]))
    if options["top_k"]:
        steps.append(g.TopKLogitsWarper(options["top_k"]))
    if options["top_p"] < 1:
        steps.append(g.TopPLogitsWarper(options["top_p"]))
    if options["min_p"]:
        steps.append(g.MinPLogitsWarper(options["min_p"]))
    scores = torch.tensor(logits, dtype=torch.float64)
    ids = torch.tensor([seen] * len(logits))
    for step in steps:
        scores = step(ids, scores)
    return scores.softmax(-1).numpy()


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
@pytest.mark.parametrize("size", [7, 300])
def test_laws_are_those_of_transformers(size, penalty):
    rng = np.random.default_rng(size)
    seen = [0, 3, 3, 6]
    for top_k in (0, 1, 5, 50):
        for top_p in (1.0, 0.9, 0.3):
            for min_p in (0.0, 0.05, 0.5):
                options = {"temperature": 0.7, "top_k": min(top_k, size), "top_p": top_p, "min_p": min_p}
                logits = rng.normal(0, 2, (3, size)).astype(np.float32)
                sampler = Sampler(SamplingSettings(True, repetition_penalty=penalty, **options), 0, size)
                sampler.commit(seen)
                law = dense(sampler.distributions(logits), size)
                expected = transformers_law(logits, penalty, seen, options)
                np.testing.assert_array_equal(law == 0, expected == 0, err_msg=str(options))
                np.testing.assert_allclose(law, expected, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), options=OPTIONS, size=st.sampled_from([3, 70, 3000]), rows=st.integers(1, 5))
def test_a_row_does_not_depend_on_its_company(seed, options, size, rows):
    logits = np.random.default_rng(seed).normal(0, 3, (rows, size)).astype(np.float32)
    settings_ = SamplingSettings(do_sample=True, **options)
    together = distributions(logits, settings_)
    uniform = np.random.default_rng(seed).random(rows)
    picked = together.support[draw(together.probabilities, uniform)]
    for i in range(rows):
        alone = distributions(logits[i : i + 1], settings_)
        np.testing.assert_array_equal(dense(alone, size)[0], dense(together, size)[i])
        assert alone.support[draw(alone.probabilities, uniform[i : i + 1])][0] == picked[i]


@pytest.mark.parametrize("spread", [0.1, 2.0, 12.0])
@pytest.mark.parametrize("options", [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.5}])
def test_the_candidate_shortcut_loses_nothing_in_a_large_vocabulary(options, spread):
    logits = np.random.default_rng(0).normal(0, spread, (3, 20_011)).astype(np.float32)
    law = dense(distributions(logits, SamplingSettings(do_sample=True, **options)), 20_011)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    expected = transformers_law(logits, 1.0, [0], full)
    assert (law > 0).sum() == (expected > 0).sum()
    np.testing.assert_allclose(law, expected, rtol=1e-6)


def test_ties_at_the_cut_are_kept():
    logits = np.array([[3, 1, 1, 1, 0]], np.float32)
    for options in ({"top_k": 2}, {"top_p": 0.75}):
        law = dense(distributions(logits, SamplingSettings(do_sample=True, **options)), 5)[0]
        assert (law > 0).tolist() == [True, True, True, True, False]


def test_masked_logits_have_no_probability():
    logits = np.array([[0, -np.inf, 1]], np.float32)
    for options in ({}, {"top_k": 2}, {"top_p": 0.99}, {"min_p": 0.1}):
        law = dense(distributions(logits, SamplingSettings(do_sample=True, **options)), 3)
        assert law[0, 1] == 0 and law.sum() == pytest.approx(1)


def test_extreme_logits_stay_finite():
    logits = np.array([[3e38, -3e38, 0], [-3e38, -3e38, -3e38]], np.float32)
    law = dense(distributions(logits, SamplingSettings(do_sample=True, temperature=1e-3)), 3)
    np.testing.assert_allclose(law, [[1, 0, 0], [1 / 3] * 3])


def test_the_penalty_sees_the_chain_before_each_row():
    sampler = Sampler(SamplingSettings(repetition_penalty=2.0), 0, 4)
    sampler.commit([0])
    logits = np.tile(np.array([4, 3, 2.5, -1], np.float32), (4, 1))
    assert sampler.argmax(logits, [1, 2, 0]).tolist() == [1, 2, 0, 0]
    assert sampler.argmax(logits[:1], [1, 2], first=2).tolist() == [0]
    row = logits[0].copy()
    penalize(row, np.array([0, 3]), 2.0)
    assert row.tolist() == [2, 3, 2.5, -2]
    assert logits[0].tolist() == [4, 3, 2.5, -1], "the caller's logits stay"


def test_draws_invert_the_sum():
    law = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniform = np.array([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53])
    assert draw(np.broadcast_to(law, (6, 6)), uniform).tolist() == [1, 1, 3, 3, 4, 4]


def test_noise_is_uniform_and_depends_on_each_of_its_three():
    numbers = {
        (seed, purpose): uniforms(seed, np.arange(20_000), purpose) for seed in (0, 1, 2**63) for purpose in Purpose
    }
    for sample in numbers.values():
        assert sample.min() >= 0 and sample.max() < 1
        counts = np.bincount((sample * 20).astype(int), minlength=20)
        assert ((counts - 1000) ** 2 / 1000).sum() < 60
        assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.03
    table = np.array(list(numbers.values()))
    correlations = np.corrcoef(table) - np.eye(len(table))
    assert np.abs(correlations).max() < 0.04
    by_seed = uniforms(np.arange(20_000), 7, Purpose.DRAW)
    assert abs(by_seed.mean() - 0.5) < 0.01 and len(np.unique(by_seed)) == 20_000
    assert uniforms(5, [3, 9], Purpose.DRAFT)[1] == uniforms(5, 9, Purpose.DRAFT)[0]


def test_following_a_chain_ends_at_the_first_difference():
    logits = np.eye(4, dtype=np.float32)[[1, 2, 3, 0]]
    sampler = Sampler(SamplingSettings(), 0, 4)
    assert sampler.follow(logits, [1, 2, 3]) == [1, 2, 3, 0]
    assert sampler.follow(logits, [1, 3, 3]) == [1, 2]
    assert sampler.follow(logits, [0, 2, 3]) == [1]
    assert sampler.follow(logits[:1], []) == [1]


def test_accept_by_hand():
    p = np.array([[0.5, 0.5, 0, 0], [0.1, 0.2, 0.3, 0.4], [0, 0, 1, 0]])
    q = np.array([[0.8, 0.2, 0, 0], [0.4, 0.3, 0.2, 0.1]])
    half = np.full(3, 0.5)
    # p/q = 0.625 and 1.5: 0.6 accepts both, and the bonus comes from the last row.
    assert accept(p, q, np.array([0, 2]), np.array([0.6, 0.99]), half) == (2, 2)
    # 0.63 rejects the first; the residual is all on token 1.
    assert accept(p, q, np.array([0, 2]), np.array([0.63, 0.0]), half) == (0, 1)
    # the second has ratio 0.25; residual (0, 0, 0.1, 0.3) / 0.4.
    assert accept(p, q, np.array([1, 0]), np.array([0.9, 0.3]), np.array([0, 0.2, 0])) == (1, 2)
    assert accept(p, q, np.array([1, 0]), np.array([0.9, 0.3]), np.array([0, 0.3, 0])) == (1, 3)
    # p = 0 is never accepted, not even by u = 0.
    zero = np.array([[0, 1.0], [1, 0]])
    assert accept(zero, np.array([[1.0, 0]]), np.array([0]), np.zeros(1), np.zeros(2)) == (0, 1)


def test_enumerated_over_every_branch_the_output_is_the_targets():
    """One drafted token, three in the vocabulary: sum the exact probabilities of all ways to each output."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        p, q = rng.dirichlet([0.5] * 3), rng.dirichlet([0.5] * 3)
        stays = np.minimum(1, p / q)
        law = q * stays + (q * (1 - stays)).sum() * residual(p, q)
        np.testing.assert_allclose(law, p, atol=1e-14)


def test_the_residual_of_equal_laws_is_the_law():
    p = np.array([0.2, 0.3, 0.5])
    np.testing.assert_allclose(residual(p, p + 1e-17), p)


def test_laws_over_different_supports_are_stacked():
    rows = stack(
        [
            Distributions(np.array([1, 4]), np.array([[0.3, 0.7]])),
            Distributions(np.array([0, 4]), np.array([[0.6, 0.4]])),
        ]
    )
    assert rows.support.tolist() == [0, 1, 4]
    assert rows.probabilities.tolist() == [[0, 0.3, 0.7], [0.6, 0, 0.4]]
