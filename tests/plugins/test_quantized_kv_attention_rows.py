"""QuantizedKVAttention: a row's bits do not depend on its company, and the cache can be rolled back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_node import CACHE_NAMES, Inputs, Node, Sequence, available_isas, bits, kernels, qkv_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.plugins.quantized_kv_attention.reference import random_inputs

Attributes = dict[str, int | float]
EVERY_CACHE = [(16, 16), (16, 8), (8, 16), (8, 8)]


def long_case(rows: int, past: list[int], **kwargs: Any) -> tuple[Inputs, Attributes]:
    """Three key heads of nine, head dimension 64, caches that span several chunks."""
    settings_of_case: dict[str, Any] = {"q_num_heads": 9, "kv_num_heads": 3, "head_dim": 64, "key_group_size": 32}
    return random_inputs(
        np.random.default_rng(rows),
        batch=len(past),
        rows=rows,
        past_length=past,
        query_length=[rows] * len(past),
        capacity=max(past) + rows,
        **(settings_of_case | kwargs),
    )


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(("key_bits", "value_bits"), EVERY_CACHE)
@pytest.mark.parametrize("rows", [2, 5, 16, 40])
def test_verify_is_bit_for_bit_as_many_single_steps(isa: str, key_bits: int, value_bits: int, rows: int) -> None:
    # 250 + 16 crosses a block and a chunk; 40 rows of three heads are more than one item.
    extras: dict[int, dict[str, Any]] = {2: {"window": 100}, 5: {"sinks": True}, 16: {"softcap": 20.0, "norm": True}}
    inputs, attributes = long_case(rows, [250], key_bits=key_bits, value_bits=value_bits, **extras.get(rows, {}))
    with kernels(isa, num_threads=2):
        together, single = Sequence.of(inputs, attributes), Sequence.of(inputs, attributes)
        y = together.append(qkv_rows(inputs))
        y_single = np.concatenate([single.append(qkv_rows(inputs)[s : s + 1]) for s in range(rows)])
    assert np.all(np.isfinite(y))
    assert bits(y) == bits(y_single)
    assert together.cache_bits() == single.cache_bits()


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("past", [[0, 63, 64, 700], [1200] * 4])
@pytest.mark.parametrize("rows", [1, 6, 30])
def test_batches_and_threads_do_not_change_a_bit(isa: str, past: list[int], rows: int) -> None:
    inputs, attributes = long_case(rows, past)
    results = []
    for num_threads in (1, 2, 5):
        with kernels(isa, num_threads):
            outputs = Node(inputs, attributes).run(inputs)
        results.append([bits(outputs[name]) for name in outputs])
    assert results[0] == results[1] == results[2]
    with kernels(isa, num_threads=2):
        for b in range(len(past)):
            alone = Sequence.of(inputs, attributes, b)
            assert bits(alone.append(qkv_rows(inputs, b))) == bits(outputs["y"][b])
            assert alone.cache_bits() == [
                bits(outputs[f"{name}_out"][b : b + 1, :, : alone.length]) for name in CACHE_NAMES
            ]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    kinds=st.sampled_from(EVERY_CACHE),
    head_dim=st.sampled_from([8, 40, 80, 128]),
    repeats=st.sampled_from([1, 2, 4, 8]),
    window=st.sampled_from([0, 3, 70]),
    steps=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=6),
)
def test_rolled_back_rows_leave_no_trace(
    seed: int, kinds: tuple[int, int], head_dim: int, repeats: int, window: int, steps: list[tuple[int, int]]
) -> None:
    """Append, keep the first few, go on: cache and outputs are those of the kept rows alone, bit for bit."""
    inputs, attributes = random_inputs(
        np.random.default_rng(seed),
        batch=1,
        rows=50,
        q_num_heads=2 * repeats,
        kv_num_heads=2,
        head_dim=head_dim,
        capacity=110,
        past_length=[50],
        query_length=[50],
        key_bits=kinds[0],
        value_bits=kinds[1],
        window=window,
    )
    rows = qkv_rows(inputs)
    drafting, plain = Sequence.of(inputs, attributes), Sequence.of(inputs, attributes)
    start, kept_y, kept_rows = 0, [], []
    for drafted, accepted in steps:
        accepted = min(accepted, drafted)
        base = drafting.length
        y = drafting.append(rows[start : start + drafted])
        drafting.length = base + accepted  # The whole rollback.
        kept_y.append(y[:accepted])
        kept_rows.append(rows[start : start + accepted])
        start += drafted
    for row in np.concatenate(kept_rows):
        assert bits(plain.append(row[None])[0]) == bits(np.concatenate(kept_y)[plain.length - 51])
    assert drafting.length == plain.length
    assert drafting.cache_bits() == plain.cache_bits()


@pytest.mark.parametrize(("key_bits", "value_bits"), EVERY_CACHE)
def test_in_place_equals_copy(key_bits: int, value_bits: int) -> None:
    inputs, attributes = long_case(7, [3, 300], key_bits=key_bits, value_bits=value_bits)
    before = {name: None if array is None else array.copy() for name, array in inputs.items()}
    node = Node(inputs, attributes)
    copied = node.run(inputs)
    for name in CACHE_NAMES:
        np.testing.assert_array_equal(inputs[name], before[name])  # A copy leaves the input as it was.
    y = node.run_in_place(inputs)
    assert bits(y) == bits(copied["y"])
    for name in CACHE_NAMES:
        array = inputs[name]
        assert array is None or bits(array) == bits(copied[f"{name}_out"])


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize(("key_bits", "value_bits"), [(16, 16), (8, 8)])
@pytest.mark.parametrize("side", ["key", "value"])
def test_what_attends_a_bad_row_is_nan_and_nothing_else(
    isa: str, bad: float, key_bits: int, value_bits: int, side: str
) -> None:
    inputs, attributes = random_inputs(
        np.random.default_rng(9),
        batch=1,
        rows=20,
        q_num_heads=4,
        kv_num_heads=2,
        head_dim=64,
        capacity=100,
        past_length=[60],
        query_length=[20],
        key_bits=key_bits,
        value_bits=value_bits,
        key_group_size=32,
        rotary_dim=0,
        window=6,
    )
    qkv = qkv_rows(inputs).reshape(20, 8, 64)
    qkv[9, 4 if side == "key" else 6, 33] = bad  # Row 9, head 0 of two, the second group.
    with kernels(isa):
        outputs = Node(inputs, attributes).run(inputs)
    body = Node(inputs, attributes, kernel=False).run(inputs)
    np.testing.assert_array_equal(np.isnan(body["y"]), np.isnan(outputs["y"]))
    known = ~np.isnan(outputs["y"].reshape(20, 4, 64))
    assert np.all(known[:9]) and np.all(known[15:])  # Before it, and once it has left the window.
    assert np.all(known[:, 2:])  # Heads of the other key head.
    attends = known[9:15, :2]
    assert not np.any(attends if side == "key" else attends[..., 33])
    if key_bits == 8:
        scale = outputs[f"{side}_scale_out"][0, 0, 69]
        assert not np.isfinite(scale[-1]) and np.all(outputs[f"{side}_cache_out"][0, 0, 69, 32:] == 0)


@pytest.mark.parametrize("isa", available_isas())
def test_numbers_beyond_float16_scales_are_not_silent(isa: str) -> None:
    inputs, attributes = random_inputs(np.random.default_rng(10), batch=1, rows=2, past_length=[3], query_length=[2])
    inputs["qkv"] = qkv_rows(inputs)[None] * np.float32(1e30)
    with kernels(isa):
        outputs = Node(inputs, attributes).run(inputs)
    assert np.all(np.isinf(outputs["key_scale_out"][0, :, 3:5]))
    assert not np.any(np.isfinite(outputs["y"]))


@pytest.mark.parametrize("isa", available_isas())
def test_large_scores_do_not_overflow(isa: str) -> None:
    inputs, attributes = random_inputs(np.random.default_rng(11), batch=1, rows=2, past_length=[30], query_length=[2])
    inputs["qkv"] = qkv_rows(inputs)[None] * np.float32(1e4)
    with kernels(isa):
        outputs = Node(inputs, attributes).run(inputs)
    assert np.all(np.isfinite(outputs["y"])) and np.all(np.abs(outputs["y"]) < 5e4)


@pytest.mark.parametrize("isa", available_isas())
def test_zero_rows_give_the_mean_of_the_values(isa: str) -> None:
    inputs, attributes = random_inputs(
        np.random.default_rng(12), batch=1, rows=3, head_dim=16, past_length=[0], query_length=[3], value_bits=16
    )
    qkv = np.zeros_like(qkv_rows(inputs)).reshape(3, 8, 16)
    qkv[:, 6:] = np.array([1.0, 2.0, 6.0])[:, None, None]
    inputs["qkv"] = qkv.reshape(1, 3, -1).astype(np.float32)
    with kernels(isa):
        outputs = Node(inputs, attributes).run(inputs)
    np.testing.assert_array_equal(outputs["key_cache_out"][0, :, :3], 0)
    np.testing.assert_array_equal(outputs["key_scale_out"][0, :, :3], 0)
    for s, mean in enumerate([1.0, 1.5, 3.0]):
        np.testing.assert_allclose(outputs["y"][0, s], mean, rtol=1e-6)
