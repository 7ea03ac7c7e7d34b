"""The meaning of QuantizedKVAttention: ONNX body, numpy oracle, and random valid inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specexport.plugins.quantized_kv_attention.body import body_text, function
from specexport.plugins.quantized_kv_attention.oracle import Array, oracle, quantize, rotate

__all__ = ["Array", "body_text", "function", "oracle", "quantize", "random_inputs", "rotate"]


def random_inputs(
    rng: np.random.Generator,
    *,
    batch: int = 2,
    rows: int = 3,
    q_num_heads: int = 4,
    kv_num_heads: int = 2,
    head_dim: int = 16,
    capacity: int = 40,
    past_length: Sequence[int] | None = None,
    query_length: Sequence[int] | None = None,
    key_bits: int = 8,
    value_bits: int = 8,
    key_group_size: int | None = None,
    value_group_size: int | None = None,
    rotary_dim: int | None = None,
    rotary_interleaved: int = 0,
    norm: bool = False,
    sinks: bool = False,
    softcap: float = 0.0,
    window: int = 0,
) -> tuple[dict[str, Array | None], dict[str, int | float]]:
    """Valid inputs (absent ones None) and attributes.

    Args:
        rng: Where the numbers come from.
        batch: B.
        rows: S.
        q_num_heads: Hq.
        kv_num_heads: Hkv.
        head_dim: D.
        capacity: C.
        past_length: One a sequence; drawn where None. Cache rows from there on hold NaN, as memory may.
        query_length: One a sequence; drawn where None.
        key_bits: 16 or 8.
        value_bits: 16 or 8.
        key_group_size: D where None.
        value_group_size: D where None.
        rotary_dim: R, D where None; 0 leaves cos and sin out.
        rotary_interleaved: As the attribute.
        norm: Whether q and k are normed.
        sinks: Whether there are sinks.
        softcap: As the attribute.
        window: As the attribute.
    """
    rotary = head_dim if rotary_dim is None else rotary_dim
    query = np.array(rng.integers(0, rows + 1, batch) if query_length is None else query_length, np.int64)
    past = np.array(rng.integers(0, capacity - rows + 1, batch) if past_length is None else past_length, np.int64)
    groups = {"key": key_group_size or head_dim, "value": value_group_size or head_dim}
    inputs: dict[str, Array | None] = {
        "qkv": rng.standard_normal((batch, rows, (q_num_heads + 2 * kv_num_heads) * head_dim), np.float32),
        "past_length": past,
        "query_length": query,
        "cos": None,
        "sin": None,
        "q_norm_weight": rng.uniform(0.5, 1.5, head_dim).astype(np.float32) if norm else None,
        "k_norm_weight": rng.uniform(0.5, 1.5, head_dim).astype(np.float32) if norm else None,
        "sinks": rng.standard_normal(q_num_heads, np.float32) if sinks else None,
    }
    if rotary:
        angles = np.arange(capacity)[:, None] * 100.0 ** -(np.arange(rotary // 2) / max(1, rotary // 2))
        inputs["cos"], inputs["sin"] = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    unused = (np.arange(capacity) >= past[:, None])[:, None, :, None]
    for side, bits in (("key", key_bits), ("value", value_bits)):
        shape = (batch, kv_num_heads, capacity, head_dim)
        if bits == 16:
            held = rng.standard_normal(shape, np.float32)
            inputs[f"{side}_cache"] = np.where(unused, np.nan, held).astype(np.float16)
            inputs[f"{side}_scale"] = None
        else:
            scale_shape = (*shape[:3], head_dim // groups[side])
            inputs[f"{side}_cache"] = rng.integers(-127, 128, shape).astype(np.int8)
            scales = rng.uniform(0.5, 3.0, scale_shape) / 127
            inputs[f"{side}_scale"] = np.where(unused, np.nan, scales).astype(np.float16)
    attributes: dict[str, int | float] = {
        "q_num_heads": q_num_heads,
        "kv_num_heads": kv_num_heads,
        "scale": float(np.float32(head_dim**-0.5)),
        "softcap": softcap,
        "window": window,
        "rotary_interleaved": rotary_interleaved,
        "norm_epsilon": 1e-6,
        "key_bits": key_bits,
        "value_bits": value_bits,
        "key_group_size": groups["key"] if key_bits == 8 else 0,
        "value_group_size": groups["value"] if value_bits == 8 else 0,
    }
    return inputs, attributes
