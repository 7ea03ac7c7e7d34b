"""QuantizedLinear in plain numpy, written apart from the ONNX body: the two must agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.plugins.quantized_linear.spec import ACTIVATION_LIMITS, LinearAttributes

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def oracle(inputs: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Float32]:
    """Compute the op. Float32 decides the activations' integers; everything after them is float64.

    Args:
        inputs: By the names of `spec.INPUTS`; absent optional ones missing or None.
        attributes: As on the node.

    Returns:
        ``{"y": float32 [..., M]}``.
    """
    a = LinearAttributes.of(attributes)
    x = normed(inputs["x"], inputs.get("norm_weight"), inputs.get("norm_bias"), a)
    if a.activation_bits != 32:
        q, scale = quantize_activations(x, a.activation_bits)
        values = (q.astype(np.float64) * scale.astype(np.float64)[..., None]).reshape(x.shape)
    else:
        values = x.astype(np.float64)
    y = values @ dequantized(inputs["weight"], inputs.get("scale"), inputs.get("minimum"), a).T
    if inputs.get("bias") is not None:
        y = y + inputs["bias"]
    if a.gated:
        gate, up = np.split(y, 2, axis=-1)
        y = _activate(gate, a.activation) * up
    else:
        y = _activate(y, a.activation)
    if inputs.get("residual") is not None:
        y = y + inputs["residual"]
    with np.errstate(over="ignore"):
        return {"y": y.astype(np.float32)}


def dequantized(
    weight: npt.NDArray[Any],
    scale: npt.NDArray[np.float16] | None,
    minimum: npt.NDArray[np.float16] | None,
    a: LinearAttributes,
) -> Float64:
    """The weights as they are meant, float64 ``[N, K]``."""
    if a.bits == 32 or scale is None:
        return weight.astype(np.float64)
    if a.bits == 4:
        q = np.stack([weight & 15, weight >> 4], axis=-1).reshape(weight.shape[0], -1).astype(np.float64)
        if minimum is None:
            q -= 8
    else:
        q = weight.astype(np.float64)
    w = q * np.repeat(scale.astype(np.float64), a.group_size, axis=1)
    if minimum is not None:
        w += np.repeat(minimum.astype(np.float64), a.group_size, axis=1)
    return w


def normed(x: Float32, weight: Float32 | None, bias: Float32 | None, a: LinearAttributes) -> Float32:
    """The norm before the product, float32 ``[..., K]``."""
    if a.norm == "none":
        return x
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        if a.norm == "layer":
            wide = wide - wide.mean(axis=-1, keepdims=True)
        wide = wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + a.epsilon)
        if weight is not None:
            wide = wide * weight
        if bias is not None:
            wide = wide + bias
    return np.asarray(wide, np.float32)


def quantize_activations(x: Float32, bits: int = 8) -> tuple[npt.NDArray[np.int16], Float32]:
    """Quantize groups of 32 of the last axis to ``bits``, 8 or 16.

    Returns:
        int16 ``[..., K/32, 32]`` and float32 ``[..., K/32]``; 0 where an integer is undefined, and a NaN or infinite
        scale there.
    """
    groups, limit = x.reshape(*x.shape[:-1], -1, 32), ACTIVATION_LIMITS[bits]
    with np.errstate(all="ignore"):
        scale = np.abs(groups).max(axis=-1) / np.float32(limit)
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
        q = np.rint(groups * inverse[..., None])
    return np.where(np.abs(q) <= limit, q, 0).astype(np.int16), scale


def _activate(v: Float64, activation: str) -> Float64:
    with np.errstate(over="ignore"):
        if activation == "silu":
            return np.asarray(v / (1 + np.exp(-v)), np.float64)
        if activation == "relu":
            return np.where(v < 0, 0.0, v)
        if activation == "gelu":
            half_erfc = np.vectorize(lambda z: 0.5 * math.erfc(z), otypes=[np.float64])
            return np.asarray(v * half_erfc(-v / math.sqrt(2)), np.float64)
        if activation == "gelu_tanh":
            tanh = np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))
            return np.asarray(0.5 * v * (1 + tanh), np.float64)
    return v
