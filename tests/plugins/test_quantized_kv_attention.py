"""QuantizedKVAttention: every kernel and both ways to run the body give what the oracle gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
from attention_node import CACHE_NAMES, Inputs, Node, available_isas, kernels, node_model
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.plugins.quantized_kv_attention.reference import Array, oracle, random_inputs

# Scores are float32 sums of up to 256 products of about unit size, scaled by 256^-1/2: off by some 1e-6, and an output
# is a mean of values of size at most 5 under weights off by as much.
ATOL = 2e-5
# Where RoPE or a norm stands before quantizing, float32 rounding may move an element to the neighbouring level, which
# moves a score by about level * |q| / sqrt(D).
ATOL_ONE_LEVEL = 0.05
HEAD_DIMS = (8, 16, 40, 64, 80, 96, 128, 256)


def group_sizes(head_dim: int) -> list[int]:
    return [g for g in (8, 16, 32, 40, 64, 80, 128) if head_dim % g == 0] + [head_dim]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Inputs, dict[str, int | float]]:
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    rotary_dim = draw(st.sampled_from([0, head_dim, head_dim // 2, 2]))
    rows = draw(st.sampled_from([1, 2, 3, 5, 9, 33]))
    kv_num_heads = draw(st.sampled_from([1, 2, 3]))
    window = draw(st.sampled_from([0, 1, 7, 100]))
    return random_inputs(
        np.random.default_rng(draw(st.integers(0, 2**16))),
        batch=draw(st.integers(1, 3)),
        rows=rows,
        q_num_heads=kv_num_heads * draw(st.sampled_from([1, 2, 3, 7])),
        kv_num_heads=kv_num_heads,
        head_dim=head_dim,
        capacity=draw(st.sampled_from([rows, rows + 1, 64 + rows, 300 + rows])),
        key_bits=draw(st.sampled_from([8, 16])),
        value_bits=draw(st.sampled_from([8, 16])),
        key_group_size=draw(st.sampled_from(group_sizes(head_dim))),
        value_group_size=draw(st.sampled_from(group_sizes(head_dim))),
        rotary_dim=rotary_dim,
        rotary_interleaved=draw(st.integers(0, 1)),
        norm=draw(st.booleans()),
        sinks=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 0.5, 30.0])),
        window=window,
    )


def float_cache(outputs: dict[str, Array], side: str) -> Array:
    cache = outputs[f"{side}_cache_out"].astype(np.float64)
    if f"{side}_scale_out" not in outputs:
        return cache
    scale = outputs[f"{side}_scale_out"].astype(np.float64)
    return cache * np.repeat(scale, cache.shape[-1] // scale.shape[-1], -1)


def one_level(outputs: dict[str, Array], side: str) -> Array:
    """The size of a quantization step, for every element: of int8, or of float16 (2^-10 of its size)."""
    cache = np.abs(float_cache(outputs, side))
    if f"{side}_scale_out" not in outputs:
        return cache * 2.0**-10 + 2.0**-24
    scale = outputs[f"{side}_scale_out"].astype(np.float64)
    # A scale rounded to the other float16 neighbour moves a level of up to 127 by 127 / 2048 of itself besides.
    return np.repeat(scale, cache.shape[-1] // scale.shape[-1], -1) * 1.07


def assert_equals_oracle(got: dict[str, Array], inputs: Inputs, attributes: dict[str, int | float]) -> None:
    expected = oracle(inputs, attributes)
    assert set(got) == set(expected)
    exact = inputs["cos"] is None and inputs["k_norm_weight"] is None
    same = True
    for side in ("key", "value"):
        for name in (f"{side}_cache_out", f"{side}_scale_out"):
            if name not in expected:
                continue
            assert got[name].dtype == expected[name].dtype
            equal = np.array_equal(got[name], expected[name], equal_nan=got[name].dtype != np.int8)
            assert equal or (side == "key" and not exact), f"{name} differs"
            same = same and equal
        left, right = float_cache(got, side), float_cache(expected, side)
        np.testing.assert_array_equal(np.isnan(left), np.isnan(right))
        assert not np.any(np.abs(left - right) > one_level(expected, side)), f"{side} is more than one level off"
    np.testing.assert_allclose(got["y"], expected["y"], rtol=0, atol=ATOL if same else ATOL_ONE_LEVEL)


@pytest.mark.parametrize("isa", available_isas())
@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_kernel_equals_oracle(isa: str, case: tuple[Inputs, dict[str, int | float]]) -> None:
    inputs, attributes = case
    with kernels(isa):
        assert_equals_oracle(Node(inputs, attributes).run(inputs), inputs, attributes)


@settings(max_examples=15, deadline=None)
@given(case=cases())
def test_body_in_onnx_runtime_without_our_library_equals_oracle(case: tuple[Inputs, dict[str, int | float]]) -> None:
    inputs, attributes = case
    assert_equals_oracle(Node(inputs, attributes, kernel=False).run(inputs), inputs, attributes)


@settings(max_examples=15, deadline=None)
@given(case=cases())
def test_body_in_the_reference_evaluator_equals_oracle(case: tuple[Inputs, dict[str, int | float]]) -> None:
    inputs, attributes = case
    evaluator = onnx.reference.ReferenceEvaluator(node_model(inputs, attributes, body=True))
    with np.errstate(all="ignore"):
        outputs: Any = evaluator.run(None, {name: array for name, array in inputs.items() if array is not None})
    assert_equals_oracle(dict(zip(evaluator.output_names, outputs)), inputs, attributes)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 32), (16, 8), (40, 8), (80, 40)])
@pytest.mark.parametrize(("bits", "rotary_interleaved"), [(16, 0), (8, 1)])
def test_long_prefill_over_a_long_past_equals_oracle(
    isa: str, head_dim: int, group_size: int, bits: int, rotary_interleaved: int
) -> None:
    inputs, attributes = random_inputs(
        np.random.default_rng(1),
        batch=2,
        rows=70,
        q_num_heads=3,
        kv_num_heads=1,
        head_dim=head_dim,
        capacity=500,
        past_length=[0, 400],
        query_length=[70, 61],
        key_bits=bits,
        value_bits=bits,
        key_group_size=group_size,
        value_group_size=group_size,
        rotary_dim=8,
        rotary_interleaved=rotary_interleaved,
    )
    with kernels(isa):
        assert_equals_oracle(Node(inputs, attributes).run(inputs), inputs, attributes)


def test_kernel_is_preferred_to_a_body_that_travels_along() -> None:
    inputs, attributes = random_inputs(np.random.default_rng(2), capacity=8, rows=4, past_length=[6, 0])
    inputs["query_length"] = np.array([4, 4])
    model = node_model(inputs, attributes, body=True)
    node = Node(inputs, attributes)
    import onnxruntime as ort

    from specexport.plugins.native.library import library_path

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library_path()))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match="capacity of 8 rows"):  # Only the kernel checks that.
        session.run(node.outputs, {name: array for name, array in inputs.items() if array is not None})


def test_shapes_are_inferred_through_the_body() -> None:
    inputs, attributes = random_inputs(np.random.default_rng(3), q_num_heads=6, kv_num_heads=2, head_dim=40)
    model = node_model(inputs, attributes, body=True)
    onnx.checker.check_model(model, full_check=True)
    for value in model.graph.input:
        array = inputs[value.name]
        assert array is not None
        for axis, size in enumerate(array.shape):
            value.type.tensor_type.shape.dim[axis].dim_value = size
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    expected = oracle(inputs, attributes)
    for value in inferred.graph.output:
        tensor = value.type.tensor_type
        assert onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type) == expected[value.name].dtype
        assert len(tensor.shape.dim) == expected[value.name].ndim


def rotate_half(x: Array, cos: Array, sin: Array) -> Array:
    """Transformers' apply_rotary_pos_emb on [H, D] rows, with its cos = cat(freqs, freqs).cos()."""
    half = x.shape[-1] // 2
    turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
    full_cos, full_sin = np.concatenate([cos, cos], -1), np.concatenate([sin, sin], -1)
    rotated: Array = x * full_cos + turned * full_sin
    return rotated


@pytest.mark.parametrize("rotary_dim", [32, 16])
def test_rope_of_halves_is_transformers_rotate_half(rotary_dim: int) -> None:
    inputs, attributes = random_inputs(
        np.random.default_rng(4),
        batch=1,
        rows=4,
        q_num_heads=2,
        kv_num_heads=2,
        head_dim=32,
        rotary_dim=rotary_dim,
        past_length=[7],
        query_length=[4],
        key_bits=16,
    )
    outputs = Node(inputs, attributes).run(inputs)
    qkv, cos, sin = inputs["qkv"], inputs["cos"], inputs["sin"]
    assert qkv is not None and cos is not None and sin is not None
    for s in range(4):
        k = qkv[0, s].reshape(6, 32)[2:4].copy()
        k[:, :rotary_dim] = rotate_half(k[:, :rotary_dim], cos[7 + s], sin[7 + s])
        np.testing.assert_allclose(outputs["key_cache_out"][0, :, 7 + s].astype(np.float32), k, rtol=1e-3, atol=1e-6)


def test_rows_of_padding_are_zero_and_write_nothing() -> None:
    inputs, attributes = random_inputs(
        np.random.default_rng(5), batch=3, rows=6, past_length=[0, 5, 34], query_length=[0, 2, 6]
    )
    outputs = Node(inputs, attributes).run(inputs)
    np.testing.assert_array_equal(outputs["y"][0], 0)
    np.testing.assert_array_equal(outputs["y"][1, 2:], 0)
    assert np.all(outputs["y"][2] != 0)
    for name in CACHE_NAMES:
        before, after = inputs[name], outputs[f"{name}_out"]
        assert before is not None
        np.testing.assert_array_equal(after[0], before[0])
        np.testing.assert_array_equal(after[1, :, :5], before[1, :, :5])
        np.testing.assert_array_equal(after[1, :, 7:], before[1, :, 7:])


@pytest.mark.parametrize("shape", [{"batch": 0}, {"rows": 0, "query_length": [0, 0]}])
def test_empty_calls_pass_the_cache_on(shape: dict[str, Any]) -> None:
    inputs, attributes = random_inputs(np.random.default_rng(6), **shape)
    outputs = Node(inputs, attributes).run(inputs)
    qkv = inputs["qkv"]
    assert qkv is not None
    assert outputs["y"].shape == (*qkv.shape[:2], 64)
    for name in CACHE_NAMES:
        np.testing.assert_array_equal(outputs[f"{name}_out"], inputs[name])
