"""Quantizing, reading back, and the kernel's packed order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.plugins.quantized_linear.format import (
    QuantizationScheme,
    QuantizedWeight,
    concatenate,
    pack_int4,
    quantize,
    unpack_int4,
)
from specexport.plugins.quantized_linear.pack import pack, packed_nbytes
from specexport.plugins.quantized_linear.reference import random_inputs
from specexport.plugins.quantized_linear.spec import LinearAttributes

SCHEMES = [
    QuantizationScheme(bits, group, minimum) for bits in (4, 8) for group in (32, 64, 128) for minimum in (False, True)
]


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_value_comes_back_within_half_a_step(scheme: QuantizationScheme) -> None:
    w = matrix(37, 256)
    quantized = quantize(w, scheme)
    steps = np.repeat(np.abs(quantized.scale.astype(np.float32)), scheme.group_size, axis=1)
    error = np.abs(quantized.dequantize() - w)
    # A symmetric 4-bit group reaches 7 steps on its narrower side, and rounding scale and minimum to float16 moves the
    # outermost values by up to 2^-11 of themselves.
    reach = np.abs(w) * 2**-10 + steps * (0.5 if scheme.bits == 8 or scheme.has_minimum else 1.0)
    assert (error <= reach).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantizing_what_was_dequantized_changes_nothing_much(scheme: QuantizationScheme) -> None:
    once = quantize(matrix(5, 128), scheme).dequantize()
    np.testing.assert_allclose(quantize(once, scheme).dequantize(), once, atol=2e-2 if scheme.bits == 4 else 2e-3)


def test_integers_are_chosen_for_the_scale_as_float16_holds_it() -> None:
    w = matrix(64, 32)
    quantized = quantize(w, QuantizationScheme(8, 32, False))
    scale = quantized.scale.astype(np.float32)
    np.testing.assert_array_equal(quantized.weight, np.clip(np.rint(w / scale), -127, 127).astype(np.int8))


def test_known_values() -> None:
    w = np.linspace(-8, 7, 16, dtype=np.float32).repeat(2)[None]
    symmetric = quantize(w, QuantizationScheme(4, 32, False))
    assert symmetric.scale[0, 0] == 1
    np.testing.assert_array_equal(unpack_int4(symmetric.weight)[0], np.arange(16).repeat(2))
    np.testing.assert_array_equal(symmetric.dequantize(), w)
    shifted = quantize(w + 20, QuantizationScheme(4, 32, True))
    assert (shifted.scale[0, 0], shifted.minimum[0, 0]) == (1, 12)
    np.testing.assert_array_equal(shifted.dequantize(), w + 20)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zeros_and_constants_are_exact(scheme: QuantizationScheme) -> None:
    w = np.zeros((3, 128), np.float32)
    np.testing.assert_array_equal(quantize(w, scheme).dequantize(), w)
    if scheme.has_minimum:
        np.testing.assert_array_equal(quantize(w + 0.5, scheme).dequantize(), w + 0.5)


@pytest.mark.parametrize(
    ("w", "message"),
    [
        (np.full((2, 32), np.nan, np.float32), "row 0 .* NaN"),
        (np.concatenate([np.zeros((4, 32)), np.full((1, 32), np.inf)]).astype(np.float32), "row 4 .* infinity"),
        (np.full((2, 32), 1e9, np.float32), "does not fit in float16"),
        (np.zeros((2, 33), np.float32), r"multiple of 32 is needed, is \[2, 33\]"),
        (np.zeros(32, np.float32), r"is \[32\]"),
    ],
)
def test_what_cannot_be_quantized_is_refused(w: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(w, QuantizationScheme(8, 32, False))


def test_arrays_that_do_not_fit_the_scheme_are_refused() -> None:
    good = quantize(matrix(4, 64), QuantizationScheme(4, 32, True))
    with pytest.raises(ValueError, match="minimum disagree"):
        QuantizedWeight(good.scheme, good.weight, good.scale)
    with pytest.raises(ValueError, match=r"scale must be float16 \[4, 2\], is float16 \[4, 1\]"):
        QuantizedWeight(good.scheme, good.weight, good.scale[:, :1], good.minimum)
    with pytest.raises(ValueError, match="must be uint8"):
        QuantizedWeight(good.scheme, good.weight.view(np.int8), good.scale, good.minimum)
    with pytest.raises(ValueError, match="bits must be 4 or 8, is 3"):
        QuantizationScheme(3, 32, False)


def test_concatenate_stacks_outputs() -> None:
    scheme = QuantizationScheme(4, 32, True)
    parts = [quantize(matrix(n, 64, n), scheme) for n in (3, 5)]
    whole = concatenate(parts)
    assert whole.shape == (8, 64)
    np.testing.assert_array_equal(whole.dequantize(), np.concatenate([part.dequantize() for part in parts]))
    with pytest.raises(ValueError, match="different schemes"):
        concatenate([parts[0], quantize(matrix(3, 64), QuantizationScheme(8, 32, False))])


@given(rows=st.integers(1, 5), half=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_nibbles_come_back(rows: int, half: int, seed: int) -> None:
    q = np.random.default_rng(seed).integers(0, 16, (rows, 2 * half), dtype=np.uint8)
    packed = pack_int4(q)
    np.testing.assert_array_equal(packed & 15, q[:, 0::2])
    np.testing.assert_array_equal(unpack_int4(packed), q)


@given(
    n=st.integers(1, 70),
    groups=st.integers(1, 5),
    scheme=st.sampled_from(SCHEMES),
    gated=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_packed_size_is_known_without_data(n: int, groups: int, scheme: QuantizationScheme, gated: bool) -> None:
    n, k = (2 * n if gated else n), groups * scheme.group_size
    q = quantize(matrix(n, k), scheme)
    packed = pack(q.weight, q.scale, q.minimum, scheme.bits, scheme.group_size, gated)
    assert packed.dtype == np.uint8
    assert packed.nbytes == packed_nbytes(n, k, scheme.bits, scheme.group_size, scheme.has_minimum, gated)
    assert packed.nbytes % 64 == 0


def test_packed_bytes_are_the_format() -> None:
    """Golden positions of one matrix in each order: what a bundle holds may not move."""
    n, k = 16, 64
    q = QuantizedWeight(
        QuantizationScheme(4, 32, True),
        pack_int4(((np.arange(n)[:, None] + np.arange(k)) % 16).astype(np.uint8)),
        np.arange(n * 2, dtype=np.float16).reshape(n, 2),
        -np.arange(n * 2, dtype=np.float16).reshape(n, 2),
    )
    packed = pack(q.weight, q.scale, q.minimum, 4, 32)
    block = packed.reshape(2, 64 + 256)[1]
    np.testing.assert_array_equal(block[:32].view(np.float16), q.scale[:, 1])
    np.testing.assert_array_equal(block[32:64].view(np.float16), q.minimum[:, 1])
    lines = block[64:].reshape(4, 16, 4)
    output, line, i = 5, 3, 2
    low, high = 32 + 8 * line + i, 32 + 8 * line + 4 + i
    assert lines[line, output, i] == ((output + low) % 16) | ((output + high) % 16) << 4

    eight = quantize(matrix(n, 96), QuantizationScheme(8, 32, False))
    packed = pack(eight.weight, eight.scale, None, 8, 32)
    first, last = packed[: 64 + 1024], packed[64 + 1024 :]
    assert last.nbytes == 64 + 512  # the third group stands alone
    np.testing.assert_array_equal(first[:64].view(np.float16), eight.scale[:, :2].T.reshape(-1))
    np.testing.assert_array_equal(last[64:].reshape(8, 16, 4)[1, :, 3], eight.weight[:, 64 + 7].view(np.uint8) ^ 0x80)

    wide = matrix(20, 3)
    packed = pack(wide, None, None, 32, 0).view(np.float32).reshape(2, 3, 16)
    np.testing.assert_array_equal(packed[1, :, 3], wide[19])
    assert (packed[1, :, 4:] == 0).all()


def test_gate_and_up_tiles_alternate() -> None:
    w = matrix(2 * 20, 32)
    packed = pack(w, None, None, 32, 0, gated=True).view(np.float32).reshape(4, 32, 16)
    np.testing.assert_array_equal(packed[2, :, 3], w[19])
    np.testing.assert_array_equal(packed[3, :, 3], w[20 + 19])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((16, 64, 5, 32, False, False), "bits must be 4, 8 or 32, is 5"),
        ((16, 65, 4, 32, False, False), "divide 65 inputs"),
        ((15, 64, 4, 32, False, True), "15 outputs and 64 inputs cannot be packed gated"),
        ((16, 64, 32, 32, False, False), "group_size must be 0 for 32 bits"),
    ],
)
def test_what_cannot_be_packed_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_nbytes(*arguments)


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 3},
        {"group_size": 48},
        {"activation_bits": 4},
        {"activation_group_size": 16},
        {"norm": "batch"},
        {"activation": "swish"},
        {"gated": 2},
        {"bits": 32, "group_size": 0},
        {"bits": 32, "group_size": 0, "activation_bits": 16},
    ],
)
def test_attributes_are_checked(change: dict) -> None:
    name = next(iter(change))
    with pytest.raises(ValueError, match=name if name != "bits" or change["bits"] == 3 else "activation_bits (8|16)"):
        LinearAttributes(**change)


def test_random_inputs_are_reproducible() -> None:
    first, second = (random_inputs(np.random.default_rng(3), norm="rms", bias=True)[0] for _ in range(2))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
