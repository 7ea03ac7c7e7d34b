"""Prompt lookup against a naive scan, and a model draft whose cache follows the committed tokens."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import TableModel

from specexport.plugins.errors import InputError
from specexport.runtime.drafts.base import Context
from specexport.runtime.drafts.model import ModelDraft
from specexport.runtime.drafts.ngram import NgramDraft, NgramProposer
from specexport.runtime.sampler import Sampler
from specexport.runtime.sampling import SamplingSettings


def naive(tokens: list[int], count: int, max_ngram_size: int) -> tuple[int, ...]:
    """Scan for the longest suffix that occurs earlier, latest occurrence first."""
    for n in range(min(max_ngram_size, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[start + n + i])
                return tuple(text[len(tokens) :])
    return ()


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8),
    count=st.integers(1, 6),
    size=st.integers(1, 4),
    prefill=st.booleans(),
)
def test_the_index_finds_what_a_scan_finds(pieces, count, size, prefill):
    proposer = NgramDraft(size).start(Sampler(SamplingSettings(), 0, 4), do_sample=False)
    tokens: list[int] = []
    for at, piece in enumerate(pieces):
        tokens += piece
        if at == 0 and prefill:
            proposer.prefill(tokens)
        proposal = proposer.propose(Context(tokens, count))
        assert proposal.tokens == naive(tokens, count, size)
        assert proposal.rows is None


def test_examples():
    def propose(tokens, count=4):
        return NgramProposer(3).propose(Context(tokens, count)).tokens

    assert propose([1, 2, 3, 4, 9, 1, 2, 3]) == (4, 9, 1, 2)
    assert propose([1, 2, 5, 7, 2, 6, 1, 2]) == (5, 7, 2, 6), "the longest match wins over the latest"
    assert propose([1, 5, 1, 6, 1]) == (6, 1, 6, 1), "of equal ones the latest; the copy reads itself"
    assert propose([7, 7]) == (7, 7, 7, 7)
    assert propose([1, 2, 3]) == ()
    assert propose([1]) == ()


def test_a_proposal_stays_cheap_in_a_long_text():
    tokens = np.random.default_rng(0).integers(0, 50, 8000).tolist()
    proposer = NgramProposer(3)
    proposer.prefill(tokens)
    start = time.process_time()
    for _ in range(1000):
        tokens.append(proposer.propose(Context(tokens, 4)).tokens[0])
    assert time.process_time() - start < 0.1  # 100 microseconds each would be a scan; it takes about 5


def test_ngrams_of_no_tokens_are_refused():
    with pytest.raises(InputError, match="max_ngram_size must be at least 1, is 0"):
        NgramDraft(0)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rounds=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 5), st.lists(st.integers(0, 5), max_size=2)), max_size=8
    ),
    do_sample=st.booleans(),
)
def test_a_model_drafts_cache_holds_the_committed_tokens_whatever_was_rejected(seed, rounds, do_sample):
    model = TableModel.random(seed, context_length=40)
    sampler = Sampler(SamplingSettings(do_sample=do_sample), seed, 6)
    draft = ModelDraft(model)
    proposer = draft.start(sampler, do_sample=do_sample)
    tokens = [0, 1, 2]
    sampler.commit(tokens)
    proposer.prefill(tokens)
    for count, accepted, others in rounds:
        chain: tuple[int, ...] = ()
        if count:  # a count of 0 is a round that asks for nothing
            proposal = proposer.propose(Context(tokens, count))
            chain = proposal.tokens
            expected, text = [], list(tokens)
            for i in range(min(count, 40 - len(tokens) + 1)):
                logits = model.table[text[-2], text[-1]][None]
                if do_sample:
                    fresh = Sampler(sampler.settings, seed, 6)
                    fresh.commit(text)
                    row = fresh.distributions(logits)
                    np.testing.assert_array_equal(proposal.rows.probabilities[i], row.probabilities[0])
                    assert row.probabilities[0, chain[i]] > 0
                    expected.append(chain[i])
                else:
                    expected.append(int(logits.argmax()))
                text.append(expected[-1])
            assert list(chain) == expected
        new = [*chain[:accepted], *others]
        tokens += new
        sampler.commit(new)
    proposer.close()
    again = draft.start(sampler, do_sample=do_sample)
    assert again._cache is proposer._cache and again._cache.length.tolist() == [0]


def test_a_sampling_draft_gives_the_law_it_drew_from():
    model = TableModel.random(1)
    counts = np.zeros(6)
    for seed in range(3000):
        sampler = Sampler(SamplingSettings(do_sample=True, top_k=4), seed, 6)
        proposer = ModelDraft(model).start(sampler, do_sample=True)
        sampler.commit([0, 1])
        proposal = proposer.propose(Context([0, 1], 1))
        counts[proposal.tokens[0]] += 1
    law = np.zeros(6)
    law[proposal.rows.support] = proposal.rows.probabilities[0]
    assert np.abs(counts / 3000 - law).max() < 0.03
    assert (law == 0).sum() == 2
