"""What QuantizedEmbedding means: its ONNX function body, an independent oracle, and random valid inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specexport.plugins.quantized_embedding.spec import INPUTS, OUTPUTS, SPEC
from specexport.plugins.quantized_linear.body import BodyBuilder, dequantized_weight
from specexport.plugins.quantized_linear.format import QuantizationScheme, quantize
from specexport.plugins.quantized_linear.pack import pack

if TYPE_CHECKING:
    import onnx

Arrays = dict[str, npt.NDArray[Any] | None]


def function(attributes: Mapping[str, Any], present: Collection[str]) -> onnx.FunctionProto:
    """The body: gather the ids' rows of each input, then dequantize those."""
    bits, group_size = _checked(attributes)
    b = BodyBuilder()
    flat = b.op("Reshape", "input_ids", b.integers(-1))
    rows = {name: b.op("Gather", name, flat, axis=0) for name in INPUTS[1:] if name in present}
    values = dequantized_weight(b, bits, group_size, rows)
    shape = b.op("Concat", b.op("Shape", "input_ids"), b.op("Shape", values, start=1), axis=0)
    b.op("Reshape", values, shape, name=OUTPUTS[0], allowzero=1)
    return b.function(SPEC.name, SPEC.domain, INPUTS, OUTPUTS, sorted(attributes))


def oracle(inputs: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    """Compute the op: ``{"y": float32 [*ids, K]}``."""
    bits, group_size = _checked(attributes)
    ids = inputs["input_ids"]
    rows = inputs["weight"][ids]
    if bits == 32:
        return {"y": rows}
    scale = np.repeat(inputs["scale"][ids].astype(np.float32), group_size, axis=-1)
    if bits == 4:
        rows = np.stack([rows & 15, rows >> 4], axis=-1).reshape(scale.shape)
    q = rows.astype(np.float32)
    if inputs.get("minimum") is not None:
        return {"y": q * scale + np.repeat(inputs["minimum"][ids].astype(np.float32), group_size, axis=-1)}
    return {"y": (q - (8 if bits == 4 else 0)) * scale}


def random_inputs(
    rng: np.random.Generator,
    *,
    ids: tuple[int, ...] = (1, 3),
    vocab_size: int = 50,
    hidden_size: int = 64,
    has_minimum: bool = False,
    bits: int = 8,
    group_size: int = 32,
) -> tuple[Arrays, dict[str, int]]:
    """Valid inputs: ids of shape ``ids`` into a matrix ``[vocab_size, hidden_size]``; and the attributes."""
    weight = rng.standard_normal((vocab_size, hidden_size)).astype(np.float32)
    inputs: Arrays = {"input_ids": rng.integers(0, vocab_size, ids), "weight": weight, "scale": None, "minimum": None}
    if bits != 32:
        quantized = quantize(weight, QuantizationScheme(bits, group_size, has_minimum))
        inputs |= {"weight": quantized.weight, "scale": quantized.scale, "minimum": quantized.minimum}
    return inputs, {"bits": bits, "group_size": group_size}


def cpu_inputs(inputs: Arrays, attributes: Mapping[str, int]) -> tuple[Arrays, dict[str, int]]:
    """The same call in the CPU kernel's form."""
    bits, group_size = _checked(attributes)
    weight, scale, minimum = inputs["weight"], inputs["scale"], inputs["minimum"]
    if weight is None:
        raise ValueError("weight is required")
    packed = pack(weight, scale, minimum, bits, group_size)
    extra = {
        "in_features": weight.shape[1] * (2 if bits == 4 else 1),
        "out_features": weight.shape[0],
        "has_minimum": int(minimum is not None),
    }
    return {"input_ids": inputs["input_ids"], "packed": packed}, {**attributes, **extra}


def _checked(attributes: Mapping[str, Any]) -> tuple[int, int]:
    bits, group_size = attributes["bits"], attributes["group_size"]
    if bits not in (4, 8, 32):
        raise ValueError(f"bits must be 4, 8 or 32, is {bits}")
    if group_size not in ((0,) if bits == 32 else (32, 64, 128)):
        raise ValueError(f"group_size must be 32, 64 or 128 (0 for 32 bits), is {group_size} for {bits} bits")
    return bits, group_size
