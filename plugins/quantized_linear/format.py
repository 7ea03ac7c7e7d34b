"""Quantized weights: the scheme, the arrays, quantizing, and reading back.

``W[n, k] = q * scale + minimum``; without a minimum 4-bit weights are ``(q - 8) * scale`` and 8-bit weights
``q * scale``. The integers are chosen against the scale and minimum as float16 holds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

GROUP_SIZES = (32, 64, 128)
_CHUNK_ELEMENTS = 1 << 22
_LARGEST_FLOAT16 = 65504.0


@dataclasses.dataclass(frozen=True)
class QuantizationScheme:
    """How one matrix is quantized.

    Attributes:
        bits: 4 or 8.
        group_size: Consecutive input features that share a scale: 32, 64 or 128.
        has_minimum: Each group also has a minimum (asymmetric).
    """

    bits: int
    group_size: int
    has_minimum: bool

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, is {self.bits}")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size must be one of {GROUP_SIZES}, is {self.group_size}")

    def __str__(self) -> str:
        """As in the manifest's summary: ``int4+minimum``, ``int8``."""
        return f"int{self.bits}{'+minimum' if self.has_minimum else ''}"

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight costs, scale and minimum included."""
        return self.bits + 16 * (1 + self.has_minimum) / self.group_size

    def fits(self, in_features: int) -> bool:
        """Whether a row of ``in_features`` splits into whole groups."""
        return in_features > 0 and in_features % self.group_size == 0


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """One quantized matrix of N outputs and K inputs.

    Attributes:
        scheme: How it is quantized.
        weight: 4 bits: uint8 ``[N, K/2]``, low nibble = even column; 8 bits: int8 ``[N, K]``.
        scale: float16 ``[N, K/group_size]``.
        minimum: float16 ``[N, K/group_size]``, or None for a symmetric scheme.
    """

    scheme: QuantizationScheme
    weight: npt.NDArray[Any]
    scale: npt.NDArray[np.float16]
    minimum: npt.NDArray[np.float16] | None = None

    def __post_init__(self) -> None:
        dtype = np.dtype(np.uint8 if self.scheme.bits == 4 else np.int8)
        if self.weight.ndim != 2 or self.weight.dtype != dtype:
            raise ValueError(
                f"weight of a {self.scheme.bits}-bit matrix must be {dtype} [N, columns], "
                f"is {self.weight.dtype} {list(self.weight.shape)}"
            )
        rows, columns = self.shape
        if not self.scheme.fits(columns):
            raise ValueError(f"in_features {columns} is not a multiple of group_size {self.scheme.group_size}")
        if (self.minimum is not None) != self.scheme.has_minimum:
            raise ValueError(f"scheme {self.scheme} and minimum disagree")
        for name, array in (("scale", self.scale), ("minimum", self.minimum)):
            expected = (rows, columns // self.scheme.group_size)
            if array is not None and (array.dtype != np.float16 or array.shape != expected):
                raise ValueError(f"{name} must be float16 {list(expected)}, is {array.dtype} {list(array.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``: outputs and inputs."""
        rows, columns = self.weight.shape
        return rows, columns * 2 if self.scheme.bits == 4 else columns

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.weight.nbytes + self.scale.nbytes + (0 if self.minimum is None else self.minimum.nbytes)

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Outputs ``start`` to ``stop`` as views."""
        minimum = None if self.minimum is None else self.minimum[start:stop]
        return QuantizedWeight(self.scheme, self.weight[start:stop], self.scale[start:stop], minimum)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The matrix as float32 ``[N, K]``."""
        result = np.empty(self.shape, np.float32)
        for start, stop in _row_chunks(self.shape):
            part = self.rows(start, stop)
            q = unpack_int4(part.weight) if self.scheme.bits == 4 else part.weight
            values = _grouped(q.astype(np.float32), self.scheme.group_size)
            if self.scheme.bits == 4 and part.minimum is None:
                values -= 8
            values *= part.scale.astype(np.float32)[..., None]
            if part.minimum is not None:
                values += part.minimum.astype(np.float32)[..., None]
            result[start:stop] = values.reshape(stop - start, -1)
        return result


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Stack matrices of one scheme along N, e.g. q, k and v."""
    schemes = {weight.scheme for weight in weights}
    if len(schemes) != 1:
        raise ValueError(f"matrices of different schemes cannot be stacked: {sorted(map(str, schemes))}")
    minimums = [weight.minimum for weight in weights if weight.minimum is not None]
    return QuantizedWeight(
        schemes.pop(),
        np.concatenate([weight.weight for weight in weights]),
        np.concatenate([weight.scale for weight in weights]),
        np.concatenate(minimums) if minimums else None,
    )


def quantize(w: npt.NDArray[np.float32], scheme: QuantizationScheme) -> QuantizedWeight:
    """Quantize a float32 matrix ``[N, K]`` by round-to-nearest, group by group.

    Raises:
        ValueError: ``w`` is no matrix, its K does not split into groups, it holds NaN or infinity, or a value
            that a float16 scale cannot reach.
    """
    if w.ndim != 2 or not scheme.fits(w.shape[1]):
        raise ValueError(f"a matrix [N, K] with K a multiple of {scheme.group_size} is needed, is {list(w.shape)}")
    rows, columns = w.shape
    groups = (rows, columns // scheme.group_size)
    weight = np.empty((rows, columns // 2 if scheme.bits == 4 else columns), np.uint8 if scheme.bits == 4 else np.int8)
    scale = np.empty(groups, np.float16)
    minimum = np.empty(groups, np.float16) if scheme.has_minimum else None
    for start, stop in _row_chunks(w.shape):
        chunk = _grouped(np.asarray(w[start:stop], np.float32), scheme.group_size)
        if not np.isfinite(chunk).all():
            row = start + int(np.argwhere(~np.isfinite(chunk))[0, 0])
            raise ValueError(f"row {row} of the matrix holds NaN or infinity")
        ideal = _scale_and_minimum(chunk, scheme)
        for name, values in zip(("scale", "minimum"), ideal):
            if np.abs(values).max(initial=0) > _LARGEST_FLOAT16:
                raise ValueError(f"a {name} of {np.abs(values).max():.3g} does not fit in float16")
        scale[start:stop] = ideal[0]
        if minimum is not None:
            minimum[start:stop] = ideal[1]
        q = _integers(chunk, scale[start:stop], None if minimum is None else minimum[start:stop], scheme.bits)
        q = q.reshape(stop - start, columns)
        weight[start:stop] = pack_int4(q.astype(np.uint8)) if scheme.bits == 4 else q.astype(np.int8)
    return QuantizedWeight(scheme, weight, scale, minimum)


def pack_int4(q: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pack values 0..15 ``[N, K]`` two to a byte, ``[N, K/2]``; the even column is the low nibble."""
    packed: npt.NDArray[np.uint8] = np.asarray(q[:, 0::2] | (q[:, 1::2] << 4), np.uint8)
    return packed


def unpack_int4(packed: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Undo `pack_int4`: uint8 ``[N, K/2]`` to values 0..15, uint8 ``[N, K]``."""
    rows, half = packed.shape
    q = np.empty((rows, half * 2), np.uint8)
    np.bitwise_and(packed, 15, out=q[:, 0::2])
    np.right_shift(packed, 4, out=q[:, 1::2])
    return q


def _grouped(values: npt.NDArray[np.float32], group_size: int) -> npt.NDArray[np.float32]:
    return values.reshape(values.shape[0], -1, group_size)


def _row_chunks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Row ranges of about 4 M elements, so that temporaries stay small beside the matrix."""
    step = max(1, _CHUNK_ELEMENTS // max(1, shape[1]))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _scale_and_minimum(
    chunk: npt.NDArray[np.float32], scheme: QuantizationScheme
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Ideal scale and minimum of each group, float32 ``[N, G]``."""
    low, high = chunk.min(axis=-1), chunk.max(axis=-1)
    if scheme.has_minimum:
        # Halved before the difference, so that two huge ends do not overflow float32.
        steps = 15 if scheme.bits == 4 else 255
        scale = (high / steps) - (low / steps)
        return scale, low if scheme.bits == 4 else low + 128 * scale
    if scheme.bits == 8:
        return np.maximum(high, -low) / 127, np.zeros_like(low)
    # The end that lies farther out sits at -8, the wider side of a 4-bit integer; the scale may be negative.
    return np.where(high > -low, high, low) / -8, np.zeros_like(low)


def _integers(
    chunk: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float16],
    minimum: npt.NDArray[np.float16] | None,
    bits: int,
) -> npt.NDArray[np.float32]:
    """Integers nearest to the values, for the scale and minimum as stored; 0 stands for a scale of 0."""
    step = scale.astype(np.float32)[..., None]
    offset = 0.0 if minimum is None else minimum.astype(np.float32)[..., None]
    q: npt.NDArray[np.float32] = np.zeros_like(chunk)
    np.divide(chunk - offset, step, out=q, where=step != 0)
    np.rint(q, out=q)
    if bits == 8:
        np.clip(q, -127 if minimum is None else -128, 127, out=q)
        return q
    if minimum is None:
        q += 8
    np.clip(q, 0, 15, out=q)
    return q
