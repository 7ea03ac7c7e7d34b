"""Prompt lookup: continue as the text went on after the latest occurrence of its last few tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specexport.plugins.errors import InputError
from specexport.runtime.drafts.base import Context, Proposal
from specexport.runtime.sampler import Sampler


@dataclasses.dataclass(frozen=True)
class NgramDraft:
    """Matches ``max_ngram_size`` tokens, then fewer, down to one; the longest match that exists is taken."""

    max_ngram_size: int = 3

    def __post_init__(self) -> None:
        if self.max_ngram_size < 1:
            raise InputError(f"max_ngram_size must be at least 1, is {self.max_ngram_size}")

    def start(self, sampler: Sampler, *, do_sample: bool) -> NgramProposer:
        """Begin a sequence; a proposal is one-hot, so how tokens are sampled changes nothing here."""
        return NgramProposer(self.max_ngram_size)


class NgramProposer:
    """An index of every n-gram seen, kept up to date token by token; a proposal costs a few dictionary look-ups."""

    def __init__(self, max_ngram_size: int) -> None:
        # _ends[n - 1]: an n-gram to the index of the token that followed its latest occurrence.
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram_size)]
        self._indexed = 0

    def prefill(self, tokens: Sequence[int]) -> None:
        """Index the prompt."""
        self._index(tokens)

    def propose(self, context: Context) -> Proposal:
        """What followed the latest earlier occurrence of the longest suffix that has one; empty if none has."""
        tokens = context.tokens
        self._index(tokens)
        for n in range(min(len(self._ends), len(tokens)), 0, -1):
            start = self._ends[n - 1].get(tuple(tokens[-n:]))
            if start is not None:
                return Proposal(_copy(tokens, start, context.count))
        return Proposal()

    def close(self) -> None:
        """Nothing is held."""

    def _index(self, tokens: Sequence[int]) -> None:
        """Add the n-grams that have got a follower since the last call: those that end before the last token."""
        for follower in range(max(self._indexed, 1), len(tokens)):
            for n, ends in enumerate(self._ends, start=1):
                if n > follower:
                    break
                ends[tuple(tokens[follower - n : follower])] = follower
        self._indexed = max(self._indexed, len(tokens))


def _copy(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """``count`` tokens from ``start`` on; past the end the copy reads itself, so a short period goes on."""
    known = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(known) < count:
        known.append(known[len(known) - period])
    return tuple(known)
