"""QuantizedKVAttention in plain numpy, written apart from the ONNX body so that the two can disagree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.plugins.quantized_kv_attention.spec import QuantizedKVAttentionAttributes

Array = npt.NDArray[Any]


def _rms_norm(x: Array, weight: Array | None, epsilon: float) -> Array:
    if weight is None:
        return x
    wide = x.astype(np.float64)
    normed: Array = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + epsilon) * weight
    return normed.astype(np.float32)


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """RoPE of one row, [H, D], by its table rows, [R / 2] each; channels from R on stay."""
    half = cos.shape[-1]
    out = x.astype(np.float64)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        first, second = x[:, a].astype(np.float64), x[:, b].astype(np.float64)
        out[:, a] = first * cos[i] - second * sin[i]
        out[:, b] = second * cos[i] + first * sin[i]
    return out.astype(np.float32)


def quantize(x: Array, group_size: int) -> tuple[Array, Array]:
    """One row of a head in groups, float32 [D] -> (int8 [D], float16 [D / group_size])."""
    q, scales = np.zeros(x.shape, np.int8), np.zeros(x.shape[0] // group_size, np.float16)
    for g in range(scales.shape[0]):
        group = x[g * group_size : (g + 1) * group_size]
        with np.errstate(over="ignore"):
            scale = (np.max(np.abs(group)) / np.float32(127)).astype(np.float16)
        scales[g] = scale if np.all(np.isfinite(group)) else np.nan
        if scales[g] > 0:
            levels = np.clip(np.rint(group / np.float32(scales[g])), -127, 127)
            q[g * group_size : (g + 1) * group_size] = levels.astype(np.int8)
    return q, scales


def _values(cache: Array, scale: Array | None) -> Array:
    """Cache rows [n, D] as float64."""
    if scale is None:
        return cache.astype(np.float64)
    return cache.astype(np.float64) * np.repeat(scale.astype(np.float64), cache.shape[-1] // scale.shape[-1], -1)


def _attend(q: Array, keys: Array, values: Array, sink: float | None, a: QuantizedKVAttentionAttributes) -> Array:
    """One query head row [D] over the rows that it may see, [n, D]."""
    scores = keys @ q.astype(np.float64) * a.scale
    if a.softcap:
        scores = np.tanh(scores / a.softcap) * a.softcap
    logits = scores if sink is None else np.append(scores, sink)
    powers = np.exp(logits - logits.max())
    weights: Array = (powers / powers.sum())[: len(scores)]
    y: Array = weights @ values
    return y


def oracle(inputs: Mapping[str, Array | None], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """The op on numpy arrays by input name; absent optional inputs are None or left out.

    Sums are float64; quantization is float32 as specified. Returns the outputs by name, without absent ones.
    """
    a = QuantizedKVAttentionAttributes.of(attributes)
    qkv, past, count = inputs["qkv"], inputs["past_length"], inputs["query_length"]
    cos, sin, sinks = inputs.get("cos"), inputs.get("sin"), inputs.get("sinks")
    assert qkv is not None and past is not None and count is not None
    names = ("key_cache", "key_scale", "value_cache", "value_scale")
    cache = {n: array.copy() for n in names if (array := inputs.get(n)) is not None}
    batch, rows, _ = qkv.shape
    head_dim, repeats = cache["key_cache"].shape[3], a.q_num_heads // a.kv_num_heads
    y = np.zeros((batch, rows, a.q_num_heads, head_dim), np.float32)
    heads = qkv.reshape(batch, rows, a.q_num_heads + 2 * a.kv_num_heads, head_dim)
    with np.errstate(invalid="ignore", over="ignore"):
        for b in range(batch):
            for s in range(int(count[b])):
                p = int(past[b]) + s
                q, k, v = np.split(heads[b, s], [a.q_num_heads, a.q_num_heads + a.kv_num_heads])
                q = _rms_norm(q, inputs.get("q_norm_weight"), a.norm_epsilon)
                k = _rms_norm(k, inputs.get("k_norm_weight"), a.norm_epsilon)
                if cos is not None and sin is not None:
                    q = rotate(q, cos[p], sin[p], bool(a.rotary_interleaved))
                    k = rotate(k, cos[p], sin[p], bool(a.rotary_interleaved))
                for side, row in (("key", k), ("value", v)):
                    for h in range(a.kv_num_heads):
                        if f"{side}_scale" in cache:
                            stored = quantize(row[h], getattr(a, f"{side}_group_size"))
                            cache[f"{side}_cache"][b, h, p], cache[f"{side}_scale"][b, h, p] = stored
                        else:
                            half = row[h].astype(np.float16)
                            cache[f"{side}_cache"][b, h, p] = np.where(np.isinf(half), np.nan, half)
                seen = slice(max(0, p - a.window + 1) if a.window else 0, p + 1)
                for h in range(a.q_num_heads):
                    at = (b, h // repeats, seen)
                    keys = _values(cache["key_cache"][at], cache["key_scale"][at] if "key_scale" in cache else None)
                    values = _values(
                        cache["value_cache"][at], cache["value_scale"][at] if "value_scale" in cache else None
                    )
                    y[b, s, h] = _attend(q[h], keys, values, None if sinks is None else float(sinks[h]), a)
    outputs: dict[str, Array] = {"y": y.reshape(batch, rows, a.q_num_heads * head_dim)}
    return outputs | {f"{name}_out": array for name, array in cache.items()}
