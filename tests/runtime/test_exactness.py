"""Sampled speculation follows the target's own distribution: chi-square of the joint law of three tokens.

200,000 draws go through the very functions of the loop (`distributions`, `draw`, `uniforms`, `accept`), all
draws at once; the loop itself must give the same tokens for the same seeds, which makes its law the same.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from runtime_fakes import TableModel, make_pair

from specexport.runtime.accept import accept
from specexport.runtime.drafts.base import Context
from specexport.runtime.drafts.model import ModelDraft
from specexport.runtime.drafts.ngram import NgramDraft, NgramProposer
from specexport.runtime.noise import Purpose, uniforms
from specexport.runtime.sampling import SamplingSettings, distributions, draw

V = 6
K = 3
DRAWS = 200_000
PROMPT = (0, 3, 1, 4, 0, 3)
SEEDS = np.arange(1000, 1000 + DRAWS)
TRUNCATIONS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "all": {"temperature": 1.4, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
}


@functools.cache
def models() -> tuple[TableModel, TableModel]:
    target = TableModel.random(7, V)
    return target, target.near(8, 0.9)


def reference(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """One row's distribution as Transformers' warpers define it, written the plain way."""
    scores = logits.astype(np.float64) / temperature

    def softmax():
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()

    if top_k:
        scores[scores < np.sort(scores)[-top_k]] = -np.inf
    if top_p < 1:
        ascending = np.argsort(scores)
        removed = np.cumsum(softmax()[ascending]) <= 1 - top_p
        removed[-1] = False
        scores[ascending[removed]] = -np.inf
    if min_p:
        law = softmax()
        scores[law < min_p * law.max()] = -np.inf
    return softmax()


def exact_joint(options: dict) -> np.ndarray:
    """P(first, second, third), [V, V, V]."""
    table = models()[0].table
    law = np.array([[reference(table[a, b], **options) for b in range(V)] for a in range(V)])
    before, last = PROMPT[-2:]
    first = law[before, last]
    return first[:, None, None] * law[last][:, :, None] * law


def all_rows(model: TableModel, options: dict) -> np.ndarray:
    """The loop's own distribution after every two tokens, [V, V, V]."""
    rows = distributions(model.table.reshape(-1, V), SamplingSettings(do_sample=True, **options))
    return rows.over(np.arange(V)).reshape(V, V, V)


def speculate(options: dict, rule=accept) -> np.ndarray:
    """The first three tokens of every seed, int64 [DRAWS, 3], with a sampling draft and rounds of K tokens."""
    target, draft = (all_rows(model, options) for model in models())
    length = len(PROMPT)
    tokens = np.full((DRAWS, length + 3 + K), -1)
    tokens[:, :length] = PROMPT
    first = draw(np.broadcast_to(target[PROMPT[-2:]], (DRAWS, V)), uniforms(SEEDS, length, Purpose.DRAW))
    tokens[:, length] = first
    done = np.full(DRAWS, length + 1)
    while (todo := np.flatnonzero(done < length + 3)).size:
        seeds, at = SEEDS[todo, None], done[todo, None] + np.arange(K + 1)
        chain = np.concatenate([tokens[todo[:, None], at[:, :1] - 2], tokens[todo[:, None], at[:, :1] - 1]], axis=1)
        for i in range(K):
            q = draft[chain[:, -2], chain[:, -1]]
            x = draw(q, uniforms(seeds[:, 0], at[:, i], Purpose.DRAFT))
            chain = np.concatenate([chain, x[:, None]], axis=1)
        p = target[chain[:, :-1], chain[:, 1:]]
        q = draft[chain[:, :-2], chain[:, 1:-1]]
        drafted = chain[:, 2:]
        accepted, last = rule(
            p, q, drafted, uniforms(seeds, at[:, :K], Purpose.ACCEPT), uniforms(seeds, at, Purpose.DRAW)
        )
        for i in range(K):
            stays = i < accepted
            tokens[todo[stays], at[stays, i]] = drafted[stays, i]
        tokens[todo, at[:, 0] + accepted] = last
        done[todo] += accepted + 1
    return tokens[:, length : length + 3]


def look_up(options: dict) -> np.ndarray:
    """The same with prompt lookup: every prefix's proposal, kept while the target draws the same tokens."""
    target = all_rows(models()[0], options)
    length = len(PROMPT)
    tokens = np.full((DRAWS, length + 3 + K), -1)
    tokens[:, :length] = PROMPT
    tokens[:, length] = draw(np.broadcast_to(target[PROMPT[-2:]], (DRAWS, V)), uniforms(SEEDS, length, Purpose.DRAW))
    done = np.full(DRAWS, length + 1)
    for position in (length + 1, length + 2):
        codes = (tokens[:, length:position] * V ** np.arange(position - length)).sum(axis=1)
        for code in np.unique(codes[done == position]):
            todo = np.flatnonzero((codes == code) & (done == position))
            prefix = tokens[todo[0], :position].tolist()
            drafted = np.array(NgramProposer(3).propose(Context(prefix, K)).tokens, np.int64)
            chain = [*prefix[-2:], *drafted]
            p = target[chain[:-1], chain[1:]]
            noise = uniforms(SEEDS[todo, None], position + np.arange(len(p)), Purpose.DRAW)
            chosen = draw(np.broadcast_to(p, (len(todo), *p.shape)), noise)
            accepted = np.cumprod(chosen[:, : len(drafted)] == drafted, axis=1).sum(axis=1).astype(int)
            for i in range(len(p)):
                stays = i <= accepted
                tokens[todo[stays], position + i] = chosen[stays, i]
            done[todo] += accepted + 1
    return tokens[:, length : length + 3]


def z_score(tokens: np.ndarray, law: np.ndarray) -> float:
    """Chi-square of the joint counts against ``law``, as a normal deviate (Wilson-Hilferty); inf if impossible."""
    counts = np.bincount(np.ravel_multi_index(tokens.T, law.shape), minlength=law.size)
    expected = law.ravel() * len(tokens)
    if counts[expected == 0].any():
        return float("inf")
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    spread = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


@pytest.mark.parametrize("options", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_a_sampling_draft_leaves_the_targets_joint_law(options):
    tokens = speculate(options)
    assert abs(z_score(tokens, exact_joint(options))) < 4.5
    pair = make_pair(models()[0], ModelDraft(models()[1]))
    for i in range(150):
        out = pair.generate(PROMPT, max_new_tokens=3 + K, seed=int(SEEDS[i]), **loop_options(options))
        assert out.token_ids[:3] == tokens[i].tolist()
        assert out.metrics.drafted > 0


@pytest.mark.parametrize("options", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_prompt_lookup_leaves_the_targets_joint_law(options):
    tokens = look_up(options)
    assert abs(z_score(tokens, exact_joint(options))) < 4.5
    pair = make_pair(models()[0], NgramDraft(3))
    for i in range(150):
        out = pair.generate(PROMPT, max_new_tokens=3 + K, seed=int(SEEDS[i]), **loop_options(options))
        assert out.token_ids[:3] == tokens[i].tolist()


def loop_options(options: dict) -> dict:
    return {"do_sample": True, "top_k": 0, "num_assistant_tokens": K, **options}


def recover_from_target(target, draft, drafted, accept_uniforms, draw_uniforms):
    """Wrong: after a rejection it draws from p, not from the residual."""
    accepted, _ = accept(target, draft, drafted, accept_uniforms, draw_uniforms)
    last = np.take_along_axis(target, accepted[..., None, None], axis=-2)[..., 0, :]
    return accepted, draw(last, np.take_along_axis(draw_uniforms, accepted[..., None], axis=-1)[..., 0])


def accept_where_p_exceeds_q(target, draft, drafted, accept_uniforms, draw_uniforms):
    """Wrong: it keeps a token exactly if p >= q, without a random number."""
    p = np.take_along_axis(target[..., :-1, :], drafted[..., None], axis=-1)[..., 0]
    q = np.take_along_axis(draft, drafted[..., None], axis=-1)[..., 0]
    certain = np.where(p >= q, -1.0, np.inf)
    return accept(target, draft, drafted, certain, draw_uniforms)


def reuse_the_drafts_noise(target, draft, drafted, accept_uniforms, draw_uniforms):
    """Wrong: one number decides both acceptance and the recovered token."""
    tied = np.concatenate([accept_uniforms, draw_uniforms[..., -1:]], axis=-1)
    return accept(target, draft, drafted, accept_uniforms, tied)


@pytest.mark.parametrize("rule", [recover_from_target, accept_where_p_exceeds_q, reuse_the_drafts_noise])
@pytest.mark.parametrize("options", [TRUNCATIONS["temperature"], TRUNCATIONS["top_k"]], ids=["temperature", "top_k"])
def test_wrong_rules_fail_the_same_test(options, rule):
    assert z_score(speculate(options, rule), exact_joint(options)) > 20


def test_a_law_that_differs_slightly_fails_the_same_test():
    tokens = speculate({"temperature": 1.0})
    assert abs(z_score(tokens, exact_joint({"temperature": 1.0}))) < 4.5
    assert z_score(tokens, exact_joint({"temperature": 1.03})) > 10


def test_a_repetition_penalty_leaves_the_targets_law():
    """Through the loop itself: the penalty depends on every token before, drafted ones included."""
    target, draft = TableModel.random(1, 4), TableModel.random(2, 4)
    pair = make_pair(target, ModelDraft(draft))
    draws, penalty = 2500, 1.5
    options = {"do_sample": True, "top_k": 0, "repetition_penalty": penalty, "num_assistant_tokens": 2}
    tokens = np.array([pair.generate([0, 1], max_new_tokens=4, seed=i, **options).token_ids[:3] for i in range(draws)])
    law = np.zeros((4, 4, 4))
    for index in np.ndindex(law.shape):
        chain, probability = [0, 1], 1.0
        for token in index:
            logits = target.table[chain[-2], chain[-1]].astype(np.float64)
            seen = np.isin(np.arange(4), chain)
            logits = np.where(seen, np.where(logits < 0, logits * penalty, logits / penalty), logits)
            probability *= reference(logits)[token]
            chain.append(token)
        law[index] = probability
    assert abs(z_score(tokens, law)) < 4.5
    assert law.sum() == pytest.approx(1)
