"""One sequence: prefill, then rounds of propose, verify, choose, rewind."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from specexport.runtime.accept import accept
from specexport.runtime.cache import KVCache
from specexport.runtime.drafts.base import Context, Proposal, Proposer
from specexport.runtime.engine import Floats, Model
from specexport.runtime.noise import Purpose
from specexport.runtime.prefill import feed
from specexport.runtime.sampler import Sampler
from specexport.runtime.sampling import joint_support


@dataclasses.dataclass(frozen=True)
class Round:
    """What one verify pass gave: ``accepted`` drafted tokens and one of the target's own, in ``tokens``.

    ``draft_s`` and ``verify_s`` are seconds in the draft and in the target.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    draft_s: float
    verify_s: float


class Decoder:
    """Target, cache, sampler and draft of one sequence. The caller keeps the tokens and decides what is committed."""

    def __init__(self, engine: Model, cache: KVCache, sampler: Sampler, proposer: Proposer | None) -> None:
        self._engine = engine
        self._cache = cache
        self._sampler = sampler
        self._proposer = proposer

    def prefill(self, prompt: Sequence[int]) -> int:
        """Run the prompt through target and draft; the first new token."""
        logits = feed(self._engine, self._cache, prompt)
        self._sampler.commit(prompt)
        token = int(self._sampler.choose(logits)[0])
        if self._proposer is not None:
            self._proposer.prefill(prompt)
        return token

    def round(self, tokens: Sequence[int], count: int) -> Round:
        """Propose up to ``count`` tokens after ``tokens``, verify them in one pass, and keep what the target allows.

        The cache holds all of ``tokens`` but the last; afterwards it holds the accepted ones too, and again not the
        last token of the round. The sampler has all of ``tokens`` committed.
        """
        start = time.perf_counter()
        proposal = Proposal()
        if self._proposer is not None and count > 0:
            proposal = self._proposer.propose(Context(tokens, count))
        proposed = time.perf_counter()
        ids = np.array([(tokens[-1], *proposal.tokens)], np.int64)
        logits = self._engine.forward(ids, self._cache, copy=False)
        verified = time.perf_counter()
        accepted, chosen = self._choose(logits, proposal)
        self._cache.rewind(len(tokens) + accepted)
        return Round(chosen, len(proposal.tokens), accepted, draft_s=proposed - start, verify_s=verified - proposed)

    def _choose(self, logits: Floats, proposal: Proposal) -> tuple[int, tuple[int, ...]]:
        """How many drafted tokens stay, and the tokens that come out: those and one of the target's own."""
        drafted, rows, sampler = proposal.tokens, proposal.rows, self._sampler
        if rows is None:
            tokens = sampler.follow(logits, drafted)
            return len(tokens) - 1, tuple(tokens)
        own = sampler.distributions(logits, drafted)
        support = joint_support(own.support, rows.support)
        count, last = accept(
            own.over(support),
            rows.over(support),
            np.searchsorted(support, drafted),
            sampler.uniforms(len(drafted), Purpose.ACCEPT),
            sampler.uniforms(len(drafted) + 1, Purpose.DRAW),
        )
        return int(count), (*drafted[: int(count)], int(support[int(last)]))
