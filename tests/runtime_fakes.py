"""Models that are tables of logits, and tokenizers of a few letters: the generation loop without a device."""

from __future__ import annotations

from collections.abc import Sequence

import bundle_files
import numpy as np

from specexport.runtime.cache import KVCache
from specexport.runtime.drafts.base import Draft
from specexport.runtime.manifest import CacheLayout, ContractEntry, DraftEntry, TokensEntry
from specexport.runtime.pair import Pair


class TableCache(KVCache):
    """Keeps the tokens where an engine keeps keys and values, so stale rows would show."""

    def __init__(self, context_length: int, batch: int, capacity: int) -> None:
        super().__init__(CacheLayout(()), context_length=context_length, batch=batch, capacity=capacity)
        self.rows = np.full((batch, context_length), -1, np.int64)


class TableModel:
    """Logits of the next token are a table's entry for the last two."""

    def __init__(self, table: np.ndarray, context_length: int = 4096) -> None:
        """``table``: float32 [V, V, V], by the token before the last, the last, the next."""
        self.table = np.asarray(table, np.float32)
        self.vocab_size = self.table.shape[-1]
        self.context_length = context_length
        self.widths: list[int] = []

    @classmethod
    def random(cls, seed: int, vocab_size: int = 6, spread: float = 1.5, context_length: int = 4096) -> TableModel:
        rng = np.random.default_rng(seed)
        return cls(rng.normal(0, spread, (vocab_size,) * 3), context_length)

    def near(self, seed: int, noise: float) -> TableModel:
        """A draft that mostly agrees with this model."""
        rng = np.random.default_rng(seed)
        return TableModel(self.table + rng.normal(0, noise, self.table.shape), self.context_length)

    def new_cache(self, batch: int = 1, capacity: int = 16) -> TableCache:
        return TableCache(self.context_length, batch, capacity)

    def forward(self, input_ids, cache, *, query_length=None, logits_rows=None, copy=True):
        ids = np.asarray(input_ids, np.int64)
        batch, width = ids.shape
        assert (batch, query_length) == (1, None), "the loop runs one sequence"
        self.widths.append(width)
        start = int(cache.length[0])
        cache.reserve(start + width)
        cache.rows[0, start : start + width] = ids[0]
        cache.advance(width)
        last = cache.rows[0, start : start + width]
        before = np.where(np.arange(start, start + width) > 0, cache.rows[0, np.arange(start, start + width) - 1], 0)
        logits = self.table[before, last]
        return logits if logits_rows is None else logits[np.asarray(logits_rows)]


class LetterTokenizer:
    """Id i is the i-th letter; what the pair needs of a tokenizer."""

    def __init__(self, letters: str = "abcdefghijklmnopqrstuvwxyz") -> None:
        self.letters = letters

    def encode(self, text: str) -> list[int]:
        return [self.letters.index(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.letters[i] for i in ids)


def make_pair(target: TableModel, draft: Draft | None = None, *, eos: Sequence[int] = (), **options) -> Pair:
    """A pair of fakes with the letters as tokenizer."""
    size = options.pop("vocab_size", target.vocab_size)
    manifest = bundle_files.manifest(
        contract=ContractEntry(size, target.vocab_size, target.vocab_size, target.vocab_size - size),
        tokens=TokensEntry(None, tuple(eos), None),
        draft=None if draft is None else DraftEntry("ngram", 3, max_ngram_size=3),
    )
    return Pair(target, draft, manifest, **{"tokenizer": LetterTokenizer(), **options})
