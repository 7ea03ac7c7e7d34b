"""The KV cache of one engine: buffers, lengths, rewinding and growth; no device and no session."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.plugins.errors import InputError, SpecexportError
from specexport.runtime.manifest import CacheLayer, CacheLayout

Ints = npt.NDArray[np.int64]


class CapacityError(InputError):
    """More positions are wanted than the model has."""


@dataclasses.dataclass(frozen=True)
class CacheTensor:
    """One cache tensor of one layer: the engine's input ``name``, output ``output``, [B, heads, capacity, width]."""

    name: str
    output: str
    dtype: str
    heads: int
    width: int


def cache_tensors(layout: CacheLayout) -> tuple[CacheTensor, ...]:
    """The engine's cache inputs in order: key_cache.i, key_scale.i, value_cache.i, value_scale.i (scales at 8 bits)."""
    return tuple(tensor for i, layer in enumerate(layout.layers) for tensor in _layer_tensors(i, layer))


def _layer_tensors(index: int, layer: CacheLayer) -> list[CacheTensor]:
    tensors = []
    sides = (("key", layer.key_bits, layer.key_group_size), ("value", layer.value_bits, layer.value_group_size))
    for side, bits, group in sides:
        if bits not in (16, 8) or (bits == 8 and (group < 1 or layer.head_dim % group)):
            raise InputError(
                f"layer {index}: a {side} cache of {bits} bits in groups of {group} for head_dim {layer.head_dim}; "
                "expected 16 bits, or 8 bits in groups that divide head_dim"
            )
        parts = [("cache", "float16" if bits == 16 else "int8", layer.head_dim)]
        if bits == 8:
            parts.append(("scale", "float16", layer.head_dim // group))
        for part, dtype, width in parts:
            name = f"{side}_{part}"
            tensors.append(CacheTensor(f"{name}.{index}", f"{name}_out.{index}", dtype, layer.kv_num_heads, width))
    return tensors


class KVCache:
    """Buffers [B, heads, capacity, width] that an engine reads and writes in place.

    Attributes:
        length: Valid positions of each sequence, int64 [B]. Change it through `advance` and `rewind` only.
        capacity: Positions that the buffers hold now; grows by doubling up to ``context_length``.
        buffers: Engine input name to its buffer.
        bindings: What an engine keeps per shape; emptied whenever the buffers move.
    """

    def __init__(self, layout: CacheLayout, *, context_length: int, batch: int = 1, capacity: int = 256) -> None:
        if batch < 1 or capacity < 1:
            raise InputError(f"a cache needs batch and capacity of at least 1, got {batch} and {capacity}")
        self.context_length = context_length
        self.batch = batch
        self.tensors = cache_tensors(layout)
        self.capacity = min(capacity, context_length)
        self.length: Ints = np.zeros(batch, np.int64)
        # Zeros, not garbage: a body that masks by multiplying must not meet a NaN beyond the length.
        self.buffers = {t.name: self._zeros(t, self.capacity) for t in self.tensors}
        self.bindings: dict[tuple[int, ...], Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def _zeros(self, tensor: CacheTensor, capacity: int) -> npt.NDArray[Any]:
        return np.zeros((self.batch, tensor.heads, capacity, tensor.width), tensor.dtype)

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` positions of every sequence; growing copies the valid ones, once.

        Raises:
            CapacityError: That is more than ``context_length``.
        """
        if positions <= self.capacity:
            return
        if positions > self.context_length:
            raise CapacityError(
                f"{positions} positions are needed, the model has {self.context_length}; shorten the prompt"
            )
        capacity = self.capacity
        while capacity < positions:
            capacity *= 2
        capacity = min(capacity, self.context_length)
        keep = int(self.length.max())
        for tensor in self.tensors:
            grown = self._zeros(tensor, capacity)
            grown[:, :, :keep] = self.buffers[tensor.name][:, :, :keep]
            self.buffers[tensor.name] = grown
        self.capacity = capacity
        self.bindings.clear()

    def advance(self, count: npt.ArrayLike) -> None:
        """Count ``count`` (scalar or [B]) newly written positions as valid."""
        length = self.length + np.asarray(count, np.int64)
        if (length > self.capacity).any() or (length < self.length).any():
            raise SpecexportError(f"cannot advance from {self.length.tolist()} within capacity {self.capacity}")
        self.length = length

    def rewind(self, length: npt.ArrayLike) -> None:
        """Forget every position from ``length`` (scalar or [B]) on. Sets lengths; copies nothing.

        Raises:
            InputError: Negative, or beyond what is valid now.
        """
        wanted = np.broadcast_to(np.asarray(length, np.int64), self.length.shape)
        if (wanted < 0).any() or (wanted > self.length).any():
            raise InputError(f"cannot rewind to {wanted.tolist()}: the cache holds {self.length.tolist()} positions")
        self.length = wanted.copy()
