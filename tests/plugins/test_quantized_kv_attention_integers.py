"""QuantizedKVAttention over int8 caches with AMX: sums of integers, exact, so that tiles and dot products agree."""

from __future__ import annotations

import numpy as np
import pytest
from attention_node import Node, Sequence, available_isas, bits, kernels, qkv_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.plugins.quantized_kv_attention.reference import oracle, random_inputs

pytestmark = pytest.mark.skipif("amx" not in available_isas(), reason="needs AMX")
GROUPS = {16: (16,), 48: (16, 48), 64: (16, 32, 64), 80: (16, 80), 96: (32, 96), 128: (64, 128), 256: (64, 256)}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    head_dim=st.sampled_from(sorted(GROUPS)),
    group=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    repeats=st.sampled_from([1, 3, 4, 7]),
    rows=st.sampled_from([2, 5, 6, 16, 17, 40, 97]),
    past=st.sampled_from([0, 15, 16, 63, 64, 239, 255, 256, 500]),
    window=st.sampled_from([0, 1, 20, 300]),
)
def test_tiles_give_the_bits_of_dot_products(
    seed: int, head_dim: int, group: tuple[int, int], repeats: int, rows: int, past: int, window: int
) -> None:
    groups = GROUPS[head_dim]
    inputs, attributes = random_inputs(
        np.random.default_rng(seed),
        batch=1,
        rows=rows,
        q_num_heads=2 * repeats,
        kv_num_heads=2,
        head_dim=head_dim,
        capacity=past + rows,
        past_length=[past],
        query_length=[rows],
        key_group_size=groups[group[0] % len(groups)],
        value_group_size=groups[group[1] % len(groups)],
        rotary_dim=0,
        window=window,
    )
    with kernels("amx", num_threads=2):
        together, single = Sequence.of(inputs, attributes), Sequence.of(inputs, attributes)
        y = together.append(qkv_rows(inputs))
        y_single = [single.append(qkv_rows(inputs)[s : s + 1]) for s in range(rows)]  # Up to four heads: no tiles.
    assert bits(y) == bits(np.concatenate(y_single))
    np.testing.assert_allclose(y, oracle(inputs, attributes)["y"][0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 20])
def test_queries_of_one_large_element_keep_their_small_ones(rows: int) -> None:
    # One element 1000 times the others meets a key of 0: what decides the scores is 10 bits below a query's largest.
    inputs, attributes = random_inputs(
        np.random.default_rng(0),
        batch=1,
        rows=rows,
        head_dim=64,
        capacity=50,
        past_length=[30],
        query_length=[rows],
        rotary_dim=0,
    )
    qkv, cache = inputs["qkv"], inputs["key_cache"]
    assert qkv is not None and cache is not None
    qkv[:, :, :] = np.random.default_rng(1).standard_normal(qkv.shape)
    heads = qkv.reshape(1, rows, -1, 64)
    heads[:, :, : int(attributes["q_num_heads"]), 5] = 3000
    heads[:, :, int(attributes["q_num_heads"]) :, 5] = 0
    cache[..., 5] = 0
    with kernels("amx"):
        outputs = Node(inputs, attributes).run(inputs)
    np.testing.assert_allclose(outputs["y"], oracle(inputs, attributes)["y"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e30])
def test_queries_of_any_size(rows: int, size: float) -> None:
    inputs, attributes = random_inputs(
        np.random.default_rng(2),
        batch=1,
        rows=rows,
        head_dim=64,
        capacity=50,
        past_length=[30],
        query_length=[rows],
        rotary_dim=0,
    )
    qkv = inputs["qkv"]
    assert qkv is not None
    qkv.reshape(1, rows, -1, 64)[:, :, : int(attributes["q_num_heads"])] *= np.float32(size)
    with kernels("amx"):
        outputs = Node(inputs, attributes).run(inputs)
    assert np.all(np.isfinite(outputs["y"]))
    if size < 1:  # All keys weigh the same.
        np.testing.assert_allclose(outputs["y"], oracle(inputs, attributes)["y"], rtol=0, atol=2e-5)
