"""QuantizedLinear: every kernel and the ONNX body against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_node import available_isas, machine, one_node, run, session

from specexport.plugins import functions
from specexport.plugins.quantized_linear import reference
from specexport.plugins.quantized_linear.oracle import dequantized, normed, quantize_activations
from specexport.plugins.quantized_linear.spec import ACTIVATIONS, INPUTS, SPEC, LinearAttributes

Arrays = dict[str, Any]
quick = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def calls(draw: st.DrawFn) -> tuple[Arrays, Arrays]:
    """Random attributes and inputs of small, odd sizes."""
    bits = draw(st.sampled_from((4, 8, 32)))
    group_size = 0 if bits == 32 else draw(st.sampled_from((32, 64, 128)))
    norm = draw(st.sampled_from(("none", "rms", "layer")))
    gated = draw(st.booleans())
    half = draw(st.integers(1, 50))
    rows = draw(st.sampled_from(((1,), (2, 1), (3,), (4,), (5,), (6,), (7,), (1, 8), (9,), (3, 6), (31,))))
    return reference.random_inputs(
        np.random.default_rng(draw(st.integers(0, 2**32))),
        rows=rows,
        in_features=draw(st.integers(1, 70)) if bits == 32 else group_size * draw(st.integers(1, 5)),
        out_features=2 * half if gated else half,
        has_minimum=bits != 32 and draw(st.booleans()),
        bias=draw(st.booleans()),
        norm_weight=draw(st.integers(0, 3)) > 0,
        norm_bias=draw(st.booleans()),
        residual=draw(st.booleans()),
        bits=bits,
        group_size=group_size,
        activation_bits=32 if bits == 32 else draw(st.sampled_from((8, 16, 32))),
        norm=norm,
        epsilon=draw(st.sampled_from((1e-5, 1e-6))),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        gated=int(gated),
    )


def tolerance(inputs: Arrays, attributes: Arrays) -> np.ndarray[Any, Any]:
    """What float32 sums in another order, and activations that sit on a rounding border, may move a row's outputs.

    A kernel's norm differs from the oracle's in the last bits, so a value on a border may round to the neighbouring
    integer: one step of the group's scale times a weight. One such flip is allowed for every 64 inputs (they are rare:
    about one value in 10,000 lies so near a border, with two planes one in 100), on top of 2e-6 of the sum of the
    products' magnitudes.
    """
    a = LinearAttributes.of(attributes)
    x = normed(inputs["x"], inputs["norm_weight"], inputs["norm_bias"], a)
    w = np.abs(dequantized(inputs["weight"], inputs["scale"], inputs["minimum"], a))
    allowed = 2e-6 * (np.abs(x).astype(np.float64) @ w.T) + 1e-6
    if a.activation_bits != 32 and a.norm != "none":
        _, scale = quantize_activations(x, a.activation_bits)
        flips = 1 + x.shape[-1] // 64
        allowed = allowed + flips * scale.max(axis=-1, keepdims=True) * w.max()
    if a.gated:
        # The product of two uncertain halves: each one's allowance times the other's largest value.
        plain = reference.oracle(inputs | {"residual": None}, attributes | {"activation": "none", "gated": 0})["y"]
        gate, up = np.split(np.abs(plain), 2, axis=-1)
        first, second = np.split(allowed, 2, axis=-1)
        # silu and gelu are at most 1.13 steep, and stay under |x|.
        allowed = 1.13 * first * (up + second) + second * (gate + 1) + 2e-6 * gate * up
    else:
        allowed = 1.13 * allowed
    residual = 0 if inputs["residual"] is None else np.abs(inputs["residual"])
    return allowed + 1e-6 * (1 + residual)


def check(y: np.ndarray[Any, Any], inputs: Arrays, attributes: Arrays) -> None:
    expected = reference.oracle(inputs, attributes)["y"]
    assert y.shape == expected.shape
    worst = (np.abs(y - expected) / tolerance(inputs, attributes)).max(initial=0)
    assert worst <= 1, f"{worst} times the allowance for {attributes}"


def kernel(inputs: Arrays, attributes: Arrays) -> np.ndarray[Any, Any]:
    lowered, full = reference.cpu_inputs(inputs, attributes)
    return run(session(one_node("specexport.cpu", SPEC.name, lowered, full), kernels=True), lowered)


def by_body(inputs: Arrays, attributes: Arrays) -> onnx.ModelProto:
    present = {name for name in INPUTS if inputs[name] is not None}
    body = functions.function(SPEC, attributes, present)
    ordered = {name: inputs[name] for name in INPUTS}
    return one_node(SPEC.domain, SPEC.name, ordered, attributes, [body], output_rank=inputs["x"].ndim)


@pytest.mark.parametrize("isa", available_isas())
@quick
@given(call=calls())
def test_kernel_agrees_with_oracle(isa: str, call: tuple[Arrays, Arrays]) -> None:
    with machine(isa):
        check(kernel(*call), *call)


@quick
@given(call=calls())
def test_body_agrees_with_oracle_in_onnxruntime(call: tuple[Arrays, Arrays]) -> None:
    model = by_body(*call)
    onnx.checker.check_model(model, full_check=True)
    check(run(session(model, kernels=False), call[0]), *call)


@settings(quick, max_examples=10)
@given(call=calls())
def test_body_agrees_with_oracle_in_the_reference_evaluator(call: tuple[Arrays, Arrays]) -> None:
    feeds = {name: value for name, value in call[0].items() if value is not None}
    check(onnx.reference.ReferenceEvaluator(by_body(*call)).run(None, feeds)[0], *call)


def test_shape_inference_goes_through_the_body() -> None:
    inputs, attributes = reference.random_inputs(
        np.random.default_rng(0), rows=(2, 3), out_features=48, gated=1, activation="silu", norm="rms"
    )
    model = by_body(inputs, attributes)
    for value in model.graph.input:
        leading = ["batch", "sequence"] if value.name == "x" else []
        dims = leading + list(inputs[value.name].shape[len(leading) :])
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, dims))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    inferred = (
        onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph.output[0].type.tensor_type
    )
    assert inferred.elem_type == onnx.TensorProto.FLOAT
    assert [dim.dim_param or dim.dim_value for dim in inferred.shape.dim] == ["batch", "sequence", 24]


@settings(quick, max_examples=15)
@given(call=calls())
def test_avx2_gives_the_bits_of_avx512(call: tuple[Arrays, Arrays]) -> None:
    if "avx512_vnni" not in available_isas():
        pytest.skip("needs AVX-512 VNNI")
    with machine("avx512_vnni"):
        wide = kernel(*call)
    with machine("avx2"):
        narrow = kernel(*call)
    np.testing.assert_array_equal(wide, narrow)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(("bits", "activation_bits"), [(4, 8), (8, 8), (4, 16), (8, 16), (4, 32), (32, 32)])
def test_a_row_does_not_depend_on_its_company(isa: str, bits: int, activation_bits: int) -> None:
    inputs, attributes = reference.random_inputs(
        np.random.default_rng(5), rows=(300,), in_features=192, out_features=2 * 41, bits=bits,
        group_size=32 if bits != 32 else 0, activation_bits=activation_bits, norm="rms", activation="silu", gated=1,
        bias=True, residual=True, has_minimum=bits == 4,
    )  # fmt: skip
    lowered, full = reference.cpu_inputs(inputs, attributes)
    running = session(one_node("specexport.cpu", SPEC.name, lowered, full), kernels=True)

    def rows(start: int, stop: int) -> np.ndarray[Any, Any]:
        part = {"x": lowered["x"][start:stop], "residual": lowered["residual"][start:stop]}
        return run(running, lowered | part)

    with machine(isa, threads=1):
        alone = np.concatenate([rows(i, i + 1) for i in range(20)])
    for threads in (1, 2, 3):
        with machine(isa, threads=threads):
            for count in range(1, 18):
                np.testing.assert_array_equal(rows(2, 2 + count), alone[2 : 2 + count])
            np.testing.assert_array_equal(rows(0, 300)[:20], alone)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("activation_bits", [8, 16, 32])
def test_a_bad_value_makes_its_row_nan_and_no_other(isa: str, bad: float, activation_bits: int) -> None:
    inputs, attributes = reference.random_inputs(
        np.random.default_rng(0), rows=(4,), in_features=96, bits=4, activation_bits=activation_bits
    )
    clean = inputs["x"].copy()
    inputs["x"][2, 40] = bad
    with machine(isa):
        y = kernel(inputs, attributes)
        expected = kernel(inputs | {"x": clean}, attributes)
    finite = np.isfinite(y)
    assert not finite[2].any() if activation_bits != 32 else not finite[2].all()
    if activation_bits != 32:
        assert np.isnan(y[2]).all()
        assert np.isnan(run(session(by_body(inputs, attributes), kernels=False), inputs)[2]).all()
    np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(expected, 2, 0))


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("magnitude", [0.0, 1e-44, 1e-37, 1e30, 1e37])
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_extreme_magnitudes(isa: str, magnitude: float, activation_bits: int) -> None:
    inputs, attributes = reference.random_inputs(
        np.random.default_rng(0), rows=(2,), in_features=64, bits=8, activation_bits=activation_bits
    )
    inputs["x"] = np.clip(inputs["x"], -1, 1) * np.float32(magnitude)
    expected = reference.oracle(inputs, attributes)["y"]
    with machine(isa):
        y = kernel(inputs, attributes)
    body = run(session(by_body(inputs, attributes), kernels=False), inputs)
    for found in (y, body):
        # Under 3.8e-37 (8 bits) or 4.8e-35 (16) the scale's inverse is infinite and the group counts as 0.
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=max(magnitude * 1e-5, 1e-35))


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(("bits", "has_minimum"), [(4, False), (4, True), (8, False), (8, True)])
def test_the_largest_sums_do_not_overflow(isa: str, bits: int, has_minimum: bool) -> None:
    """Every integer at its end, and of both signs, so that a saturating or wrapping sum shows."""
    inputs, attributes = reference.random_inputs(
        np.random.default_rng(0), rows=(4,), in_features=64, out_features=32, bits=bits, activation_bits=16,
        has_minimum=has_minimum,
    )  # fmt: skip
    inputs["weight"] = np.full_like(inputs["weight"], 255 if bits == 4 else 127)
    inputs["weight"][::2] = 0 if bits == 4 else -127
    # 63.5 / 127 rounds to 8128 of 16256: the second plane at its lower end, -64.
    inputs["x"][:] = np.array([127, -127, 63.5, -63.5], np.float32)[:, None]
    inputs["x"][2:, ::32] = 127
    with machine(isa):
        check(kernel(inputs, attributes), inputs, attributes)


def test_sixteen_bits_hold_fifteen_of_a_value() -> None:
    x = np.random.default_rng(0).standard_normal((50, 96)).astype(np.float32)
    groups = x.reshape(50, 3, 32)
    for bits, limit in ((8, 127), (16, 16256)):
        q, scale = quantize_activations(x, bits)
        assert np.abs(q).max() == limit
        error = np.abs(q * scale[..., None].astype(np.float64) - groups)
        assert (error <= 0.5001 * np.abs(groups).max(axis=-1, keepdims=True) / limit).all()


@pytest.mark.parametrize("activation_bits", [8, 16, 32])
def test_no_rows(activation_bits: int) -> None:
    inputs, attributes = reference.random_inputs(
        np.random.default_rng(0), rows=(2, 0), norm="rms", activation_bits=activation_bits
    )
    assert kernel(inputs, attributes).shape == (2, 0, 32)
    assert run(session(by_body(inputs, attributes), kernels=False), inputs).shape == (2, 0, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 65), np.float32)}, r"input x: the last dimension must be 64, shape is \[2, 65\]"),
        (
            {"packed": np.zeros(100, np.uint8)},
            "input packed: 1152 bytes expected for 32 outputs and 64 inputs.*has 100",
        ),
        ({"bias": np.zeros(31, np.float32)}, r"input bias: shape \[32\] expected, is \[31\]"),
        ({"norm_weight": np.zeros(3, np.float32)}, r"input norm_weight: shape \[64\] expected, is \[3\]"),
        ({"residual": np.zeros((2, 64), np.float32)}, r"input residual: shape \[2, 32\] expected, is \[2, 64\]"),
    ],
)
def test_bad_tensors_are_named(change: Arrays, message: str) -> None:
    inputs, attributes = reference.random_inputs(
        np.random.default_rng(0), rows=(2,), bias=True, residual=True, norm="rms"
    )
    lowered, full = reference.cpu_inputs(inputs, attributes)
    running = session(one_node("specexport.cpu", SPEC.name, lowered, full), kernels=True)
    with pytest.raises(Exception, match=message):
        run(running, lowered | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits must be 4, 8 or 32, is 5"),
        ({"group_size": 48}, "group_size must be 32, 64 or 128, is 48"),
        ({"group_size": 128}, "in_features must be a multiple of group_size 128, is 64"),
        ({"activation_bits": 15}, "activation_bits must be 8, 16 or 32, is 15"),
        ({"activation_group_size": 16}, "activation_group_size must be 32, is 16"),
        ({"norm": "batch"}, "norm must be one of none, rms, layer, is 'batch'"),
        ({"activation": "swish"}, "activation must be one of none, silu.*is 'swish'"),
        ({"out_features": 31, "gated": 1}, "out_features must be even when gated, is 31"),
        ({"in_features": 0}, "in_features must be 1 to"),
        ({"bits": 32, "group_size": 0}, "activation_bits must be 32 for weights of 32 bits"),
    ],
)
def test_bad_attributes_are_named_when_the_session_is_made(change: Arrays, message: str) -> None:
    inputs, attributes = reference.random_inputs(np.random.default_rng(0))
    lowered, full = reference.cpu_inputs(inputs, attributes)
    with pytest.raises(Exception, match=message):
        session(one_node("specexport.cpu", SPEC.name, lowered, full | change), kernels=True)
