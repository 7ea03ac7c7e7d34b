"""The cache: layout, growth, rewinding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.plugins.errors import InputError, SpecexportError
from specexport.runtime.cache import CapacityError, KVCache, cache_tensors
from specexport.runtime.manifest import CacheLayer, CacheLayout

LAYOUT = CacheLayout((CacheLayer(2, 8, 8, 16, 4, 0, 0), CacheLayer(1, 4, 16, 8, 0, 2, 0)))


def make(**options) -> KVCache:
    return KVCache(LAYOUT, **{"context_length": 40, "capacity": 4, **options})


def test_tensors_stand_in_the_engines_order():
    assert [(t.name, t.output, t.dtype, t.heads, t.width) for t in cache_tensors(LAYOUT)] == [
        ("key_cache.0", "key_cache_out.0", "int8", 2, 8),
        ("key_scale.0", "key_scale_out.0", "float16", 2, 2),
        ("value_cache.0", "value_cache_out.0", "float16", 2, 8),
        ("key_cache.1", "key_cache_out.1", "float16", 1, 4),
        ("value_cache.1", "value_cache_out.1", "int8", 1, 4),
        ("value_scale.1", "value_scale_out.1", "float16", 1, 2),
    ]


@pytest.mark.parametrize("layer", [CacheLayer(2, 8, 4, 16, 4, 0, 0), CacheLayer(2, 8, 8, 16, 3, 0, 0)])
def test_a_layout_that_cannot_be_held(layer):
    with pytest.raises(InputError, match="layer 0: a key cache of"):
        KVCache(CacheLayout((layer,)), context_length=8)


def test_bytes_are_those_of_the_buffers():
    assert make(capacity=10, batch=3).nbytes == 3 * 10 * (2 * 8 + 2 * 2 * 2 + 2 * 8 * 2 + 4 * 2 + 4 + 2 * 2)


def test_growing_doubles_up_to_the_context_and_copies_what_is_valid():
    cache = make(batch=2)
    rng = np.random.default_rng(0)
    for buffer in cache.buffers.values():
        buffer[...] = rng.integers(-100, 100, buffer.shape)
    before = {name: buffer.copy() for name, buffer in cache.buffers.items()}
    cache.advance([2, 4])
    cache.bindings[(1, 1, 1)] = "stale"
    for wanted, capacity in ((4, 4), (5, 8), (17, 32), (33, 40), (40, 40)):
        cache.reserve(wanted)
        assert cache.capacity == capacity
        for name, buffer in cache.buffers.items():
            assert buffer.shape[2] == capacity
            np.testing.assert_array_equal(buffer[:, :, :4], before[name])
            assert not buffer[:, :, 4:].any()
    assert cache.bindings == {}
    with pytest.raises(CapacityError, match="41 positions are needed, the model has 40"):
        cache.reserve(41)
    assert cache.length.tolist() == [2, 4]


def test_the_first_capacity_is_within_the_context():
    assert make(capacity=100).capacity == 40


@pytest.mark.parametrize("options", [{"batch": 0}, {"capacity": 0}])
def test_an_empty_cache_is_refused(options):
    with pytest.raises(InputError, match="at least 1"):
        make(**options)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), max_size=12), st.integers(1, 3))
def test_any_sequence_of_appends_and_rewinds_keeps_exactly_the_kept_rows(steps, batch):
    cache = make(batch=batch)
    kept: list[int] = []
    stamp = 0
    for count, length in steps:
        count = min(count, 40 - len(kept))
        cache.reserve(len(kept) + count)
        for _ in range(count):  # as an engine does: every row written carries its own mark
            stamp += 1
            for buffer in cache.buffers.values():
                buffer[:, :, len(kept)] = stamp
            kept.append(stamp)
        cache.advance(count)
        length = min(length, len(kept))
        buffers = {name: id(buffer) for name, buffer in cache.buffers.items()}
        cache.rewind(length)
        assert {name: id(buffer) for name, buffer in cache.buffers.items()} == buffers
        del kept[length:]
        assert cache.length.tolist() == [length] * batch
        for buffer in cache.buffers.values():
            assert (buffer[:, :, :length] == np.array(kept, buffer.dtype)[:, None]).all()


def test_lengths_move_only_where_they_may():
    cache = make(batch=2)
    cache.advance([1, 3])
    with pytest.raises(InputError, match=r"cannot rewind to \[2, 2\]: the cache holds \[1, 3\]"):
        cache.rewind(2)
    with pytest.raises(InputError, match="cannot rewind"):
        cache.rewind([0, -1])
    with pytest.raises(SpecexportError, match="cannot advance"):
        cache.advance(2)
    cache.rewind([0, 3])
    assert cache.length.tolist() == [0, 3]
