"""Feeding many tokens: in chunks, with logits of the last one only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specexport.runtime.cache import KVCache
from specexport.runtime.engine import Floats, Model

PREFILL_CHUNK = 512  # rows per call: enough to be bound by arithmetic, little enough to bound the activations' memory


def feed(engine: Model, cache: KVCache, tokens: Sequence[int]) -> Floats:
    """Append ``tokens`` (at least one) to the cache; logits after the last one, float32 [1, V], the engine's buffer."""
    cache.reserve(int(cache.length[0]) + len(tokens))
    ids = np.asarray(tokens, np.int64)[None]
    for start in range(0, len(tokens), PREFILL_CHUNK):
        chunk = ids[:, start : start + PREFILL_CHUNK]
        logits = engine.forward(chunk, cache, logits_rows=(chunk.shape[1] - 1,), copy=False)
    return logits
