"""A model as draft: its own engine and cache, token by token, greedy or sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specexport.runtime.cache_pool import CachePool
from specexport.runtime.drafts.base import Context, Proposal
from specexport.runtime.engine import Floats, Model
from specexport.runtime.noise import Purpose
from specexport.runtime.prefill import feed
from specexport.runtime.sampler import Sampler
from specexport.runtime.sampling import Distributions, stack


class ModelDraft:
    """A draft with an engine: the target's first layers, or another model of the same tokenizer."""

    def __init__(self, engine: Model) -> None:
        self.engine = engine
        self.caches = CachePool(engine)

    def start(self, sampler: Sampler, *, do_sample: bool) -> ModelProposer:
        """Begin a sequence with an empty cache."""
        return ModelProposer(self, sampler, do_sample)


class ModelProposer:
    """One sequence: the cache follows the committed tokens, rewinding what was rejected and feeding what is new."""

    def __init__(self, draft: ModelDraft, sampler: Sampler, do_sample: bool) -> None:
        self._draft = draft
        self._engine = draft.engine
        self._cache = draft.caches.acquire()
        self._sampler = sampler
        self._do_sample = do_sample
        self._fed: list[int] = []  # the tokens whose keys and values the cache holds
        self._agreed = 0  # of those, how many are known to be committed

    def prefill(self, tokens: Sequence[int]) -> None:
        """Feed the prompt, as far as the draft's context reaches; its logits are not needed yet."""
        if len(tokens) <= self._engine.context_length:
            feed(self._engine, self._cache, tokens)
            self._fed.extend(tokens)

    def propose(self, context: Context) -> Proposal:
        """A chain from the draft's own distributions; shorter, down to empty, where its context ends."""
        tokens = context.tokens
        count = min(context.count, self._engine.context_length - len(tokens) + 1)
        if count < 1:
            return Proposal()
        logits = self._catch_up(tokens)
        drafted: list[int] = []
        rows: list[Distributions] = []
        while True:
            at = len(drafted)
            if self._do_sample:
                row = self._sampler.distributions(logits, drafted, first=at, who="draft")
                rows.append(row)
                token = self._sampler.draw(row, Purpose.DRAFT, first=at)
            else:
                token = self._sampler.argmax(logits, drafted, first=at, who="draft")
            drafted.append(int(token[0]))
            if len(drafted) == count:
                return Proposal(tuple(drafted), stack(rows) if rows else None)
            self._fed.append(drafted[-1])
            logits = self._engine.forward(np.array([drafted[-1:]]), self._cache, copy=False)

    def close(self) -> None:
        """Give the cache back."""
        self._draft.caches.release(self._cache)

    def _catch_up(self, tokens: Sequence[int]) -> Floats:
        """Make the cache hold exactly ``tokens``; returns the logits after the last, float32 [1, V].

        After a rejection the cache holds drafted tokens that were not committed; after a full acceptance it lacks
        the last drafted one, and after rounds without a proposal more than that.
        """
        while self._agreed < min(len(self._fed), len(tokens)) and self._fed[self._agreed] == tokens[self._agreed]:
            self._agreed += 1
        keep = min(self._agreed, len(tokens) - 1)  # the last token is fed again if need be: its logits are wanted
        self._cache.rewind(keep)
        self._fed[keep:] = tokens[keep:]
        self._agreed = len(tokens)
        return feed(self._engine, self._cache, tokens[keep:])
