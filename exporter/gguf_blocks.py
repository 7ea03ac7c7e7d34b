"""Exact repacking of GGUF blocks into our own layout, and their values as float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from specexport.exporter.gguf_file import TensorType
from specexport.plugins.quantized_linear.format import QuantizationScheme, QuantizedWeight

_BLOCK = 32
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Floats = np.ndarray[Any, np.dtype[np.float32]]


def block_scheme(kind: TensorType) -> QuantizationScheme | None:
    """The scheme that holds this type's blocks exactly; None for types that are plain floats."""
    return {
        "Q4_0": QuantizationScheme(bits=4, group_size=_BLOCK, has_minimum=False),
        "Q4_1": QuantizationScheme(bits=4, group_size=_BLOCK, has_minimum=True),
        "Q8_0": QuantizationScheme(bits=8, group_size=_BLOCK, has_minimum=False),
    }.get(kind.name)


def repack(kind: TensorType, rows: _Bytes) -> QuantizedWeight:
    """Blocks as a QuantizedWeight with the same integers, scales and minimums: nothing is rounded.

    Args:
        kind: Q4_0, Q4_1 or Q8_0.
        rows: uint8 [N, bytes of a row].
    """
    scheme = block_scheme(kind)
    if scheme is None:
        raise ValueError(f"{kind.name} has no blocks to repack")
    count = rows.shape[0]
    blocks = rows.reshape(count, -1, kind.block_bytes)
    scale = _half(blocks[..., :2])
    if kind.name == "Q8_0":
        weight: np.ndarray[Any, Any] = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(count, -1)
        return QuantizedWeight(scheme, weight, scale, None)
    minimum = _half(blocks[..., 2:4]) if kind.name == "Q4_1" else None
    values = _nibbles(blocks[..., kind.block_bytes - _BLOCK // 2 :]).reshape(count, -1)
    # Theirs: byte j of a block holds columns j and j + 16. Ours: byte j of a row holds columns 2j and 2j + 1.
    return QuantizedWeight(scheme, values[:, 0::2] | (values[:, 1::2] << 4), scale, minimum)


def decode(kind: TensorType, rows: _Bytes) -> _Floats:
    """Stored rows as float32 [N, K], by GGML's own arithmetic (one float32 product, one sum).

    Args:
        kind: Any supported type.
        rows: uint8 [N, bytes of a row].
    """
    count = rows.shape[0]
    if kind.name == "F32":
        return np.ascontiguousarray(rows).view(np.float32).copy()
    if kind.name == "F16":
        return np.ascontiguousarray(rows).view(np.float16).astype(np.float32)
    if kind.name == "BF16":
        return (np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = rows.reshape(count, -1, kind.block_bytes)
    scale = _half(blocks[..., :2]).astype(np.float32)[..., None]
    if kind.name == "Q8_0":
        values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32) * scale
    else:
        nibbles = _nibbles(blocks[..., kind.block_bytes - _BLOCK // 2 :]).astype(np.float32)
        if kind.name == "Q4_1":
            values = nibbles * scale + _half(blocks[..., 2:4]).astype(np.float32)[..., None]
        else:
            values = (nibbles - np.float32(8)) * scale
    return values.reshape(count, -1)


def _half(pairs: _Bytes) -> np.ndarray[Any, np.dtype[np.float16]]:
    """uint8 [..., 2] as float16 [...]."""
    return np.ascontiguousarray(pairs).view(np.float16)[..., 0].copy()


def _nibbles(packed: _Bytes) -> _Bytes:
    """uint8 [..., 16] as the 32 values of each block: low nibbles are columns 0..15, high ones 16..31."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)
