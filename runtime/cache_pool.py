"""Caches kept between requests, so that a request neither allocates nor binds anew."""

from __future__ import annotations

from specexport.runtime.cache import KVCache
from specexport.runtime.engine import Model


class CachePool:
    """Batch-1 caches of one engine. Two requests at once get two caches."""

    def __init__(self, engine: Model) -> None:
        self._engine = engine
        self._free: list[KVCache] = []

    def acquire(self) -> KVCache:
        """An empty cache."""
        try:
            cache = self._free.pop()
        except IndexError:
            return self._engine.new_cache()
        cache.rewind(0)
        return cache

    def release(self, cache: KVCache) -> None:
        """Keep the cache for the next request."""
        self._free.append(cache)
