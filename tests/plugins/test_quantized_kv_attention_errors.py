"""QuantizedKVAttention: bad input gets a line that says what, where and what was found, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attention_node import CACHE_NAMES, Inputs, Node

from specexport.plugins.quantized_kv_attention.reference import Array, function, random_inputs
from specexport.plugins.quantized_kv_attention.spec import (
    INPUTS,
    SPEC,
    QuantizedKVAttentionAttributes,
    supports_head_dim,
)


def case(**kwargs: Any) -> tuple[Inputs, dict[str, int | float]]:
    fixed: dict[str, Any] = {"rows": 3, "capacity": 20, "past_length": [5, 9], "query_length": [3, 2]}
    return random_inputs(np.random.default_rng(0), **(fixed | kwargs))


def given(name: str, value: Any) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        inputs[name] = np.asarray(value)

    return change


def reshaped(name: str, *shape: int) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        array = inputs[name]
        assert array is not None
        inputs[name] = np.zeros(shape, array.dtype)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            given("past_length", [5, 19]),
            "past_length 19 and query_length 2 exceed the cache's capacity of 20 rows",
        ),
        (given("past_length", [2**62, 0]), f"sequence 0: past_length {2**62} and query_length 3 exceed"),
        (given("past_length", [-1, 0]), r"past_length\[0\] and query_length\[0\] must not be negative, are -1 and 3"),
        (given("query_length", [0, -2]), r"past_length\[1\] and query_length\[1\] must not be negative, are 9 and -2"),
        (given("query_length", [4, 0]), r"query_length\[0\] is 4, but qkv has 3 rows"),
        (given("past_length", [5]), r"input past_length: shape \[2\] expected, is \[1\]"),
        (given("query_length", [1, 1, 1]), r"input query_length: shape \[2\] expected, is \[3\]"),
        (reshaped("qkv", 2, 3, 120), r"input qkv: shape \[2, 3, 128\] expected, is \[2, 3, 120\]"),
        (reshaped("key_cache", 2, 3, 20, 16), r"input key_cache: shape \[2, 2, C, D\] expected, is \[2, 3, 20, 16\]"),
        (
            reshaped("value_cache", 2, 2, 21, 16),
            r"input value_scale: shape \[2, 2, 21, 1\] expected, is \[2, 2, 20, 1\]",
        ),
        (reshaped("key_scale", 2, 2, 20, 2), r"input key_scale: shape \[2, 2, 20, 1\] expected, is \[2, 2, 20, 2\]"),
        (reshaped("cos", 10, 8), r"input sin: shape \[10, 8\] expected, is \[20, 8\]"),
        (reshaped("cos", 20, 9), r"input cos: shape \[P, R / 2\] with R at most head_dim 16 expected, is \[20, 9\]"),
    ],
)
def test_bad_input_is_named_and_the_cache_untouched(change: Callable[[Inputs], None], message: str) -> None:
    inputs, attributes = case()
    node = Node(inputs, attributes)
    change(inputs)
    held = {name: array.copy() for name in CACHE_NAMES if (array := inputs[name]) is not None}
    with pytest.raises(Exception, match=message):
        node.run_in_place(inputs)
    for name, array in held.items():
        np.testing.assert_array_equal(inputs[name], array)


def test_position_behind_the_rope_tables_is_named() -> None:
    inputs, attributes = case()
    node = Node(inputs, attributes)
    for name in ("cos", "sin"):
        table: Array | None = inputs[name]
        assert table is not None
        inputs[name] = table[:10]
    with pytest.raises(Exception, match="sequence 1: position 10 is past the end of the RoPE tables cos and sin of 10"):
        node.run_in_place(inputs)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"key_group_size": 24}, "attribute key_group_size: 24 does not divide head_dim 16"),
        ({"value_group_size": 12}, "attribute value_group_size must be a multiple of 8, is 12"),
        ({"kv_num_heads": 3}, "attribute q_num_heads must be a multiple of kv_num_heads, is 4 of 3"),
        ({"softcap": -1.0}, "attribute softcap must not be negative, is -1"),
        ({"window": -1}, "attribute window must not be negative, is -1"),
        ({"key_bits": 4}, "attribute key_bits is 4, but the cache's element type holds 8 bits"),
    ],
)
def test_bad_attributes_are_named(
    attributes: dict[str, int | float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, good = case()
    proto = function(good, {name for name in INPUTS if inputs[name] is not None})
    monkeypatch.setattr("attention_node.function", lambda *_: proto)  # It would refuse them sooner.
    with pytest.raises(Exception, match=message):
        Node(inputs, good | attributes).run(inputs)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"key_bits": 4}, r"key_bits must be one of \(16, 8\), is 4"),
        ({"value_group_size": 12}, "value_group_size must be a positive multiple of 8, is 12"),
        ({"kv_num_heads": 3}, "q_num_heads must be a multiple of kv_num_heads, is 4 of 3"),
        ({"window": -1}, "window and softcap must not be negative, are -1 and 0.0"),
        ({"rotary_interleaved": 2}, "rotary_interleaved must be 0 or 1, is 2"),
    ],
)
def test_attributes_are_checked_where_they_are_written(attributes: dict[str, int | float], message: str) -> None:
    good: dict[str, int | float] = {"q_num_heads": 4, "kv_num_heads": 2, "scale": 0.25}
    with pytest.raises(ValueError, match=message):
        QuantizedKVAttentionAttributes.of(good | attributes)


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ({"key_scale", "value_scale", "cos"}, "takes cos and sin together"),
        ({"key_scale"}, "takes value_scale exactly at 8 value bits, which are 8"),
        ({"key_scale", "value_scale", "bias"}, r"has no inputs \['bias'\]"),
    ],
)
def test_the_body_refuses_inputs_that_do_not_go_together(present: set[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function({"q_num_heads": 4, "kv_num_heads": 2, "scale": 0.25}, present)


def test_bodies_differ_exactly_where_their_overloads_do() -> None:
    base: dict[str, int | float] = {"q_num_heads": 4, "kv_num_heads": 2, "scale": 0.25}
    present = {"key_scale", "value_scale"}
    variants = [
        function(base, present),
        function(base | {"scale": 0.2500001}, present),
        function(base | {"window": 5}, present),
        function(base, present | {"sinks"}),
        function(base, present | {"cos", "sin"}),
        function(base | {"value_bits": 16}, {"key_scale"}),
    ]
    assert len({proto.overload for proto in variants}) == len(variants)
    assert len({tuple(node.SerializeToString() for node in proto.node) for proto in variants}) == len(variants)
    assert function(base, present).SerializeToString() == variants[0].SerializeToString()


def test_spec_names_the_op() -> None:
    assert SPEC.qualified_name == "specexport::QuantizedKVAttention" and SPEC.version == 1
    assert SPEC.load_reference().function is function
    assert [dim for dim in range(0, 41) if supports_head_dim(dim)] == [8, 16, 24, 32, 40]
