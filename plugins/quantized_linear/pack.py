"""The CPU kernel's order of a weight matrix: tiles of 16 outputs, each read once from front to back.

A matrix is a sequence of tiles; the last one is filled up with outputs whose weights are 0. With `gated`, tile 2 t
holds outputs 16 t... of the gate half and tile 2 t + 1 the same outputs of the up half, so that one thread makes
``act(gate) * up`` by itself.

- 32 bits: for each input feature, 16 float32.
- 8 and 4 bits: blocks of one scale group (with minimum) or two (without; the last may hold one), each

  - 64 bytes of float16: 16 scales and 16 minimums, or 16 scales of each of the two groups;
  - for each group its integers, in lines of 64 bytes, ``[16 outputs][4 inputs]``: at 8 bits a line holds ``q + 128``
    of 4 inputs; at 4 bits the low nibbles hold inputs 0-3 and the high nibbles inputs 4-7 of 8.

Every block is a whole number of cache lines, and its integers are unsigned, as VNNI wants one side to be.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.plugins.quantized_linear.format import unpack_int4

TILE = 16
_CHUNK_BYTES = 1 << 22


def packed_nbytes(n: int, k: int, bits: int, group_size: int, has_minimum: bool, gated: bool = False) -> int:
    """Bytes of the packed matrix of ``n`` outputs and ``k`` inputs."""
    _check(n, k, bits, group_size, gated)
    return _tile_count(n, gated) * _tile_nbytes(k, bits, group_size, has_minimum)


def pack(
    weight: npt.NDArray[Any],
    scale: npt.NDArray[np.float16] | None,
    minimum: npt.NDArray[np.float16] | None,
    bits: int,
    group_size: int,
    gated: bool = False,
) -> npt.NDArray[np.uint8]:
    """Put a matrix into the kernel's order.

    Args:
        weight: uint8 ``[N, K/2]`` (4 bits), int8 ``[N, K]`` (8 bits) or float32 ``[N, K]`` (32 bits).
        scale: float16 ``[N, K/group_size]``; None for 32 bits.
        minimum: As ``scale``, or None for a symmetric matrix.
        bits: 4, 8 or 32.
        group_size: 32, 64 or 128; 0 for 32 bits.
        gated: The first half of the rows gates the second.

    Returns:
        uint8 ``[packed_nbytes(...)]``.
    """
    n, k = weight.shape[0], weight.shape[1] * (2 if bits == 4 else 1)
    _check(n, k, bits, group_size, gated)
    if (scale is None) != (bits == 32):
        raise ValueError(f"scale is {'missing' if scale is None else 'given'} for {bits} bits")
    tile_nbytes = _tile_nbytes(k, bits, group_size, minimum is not None)
    packed = np.empty((_tile_count(n, gated), tile_nbytes), np.uint8)
    halves = ((0, n // 2), (n // 2, n)) if gated else ((0, n),)
    step = max(1, _CHUNK_BYTES // tile_nbytes) * TILE
    for half, (first, last) in enumerate(halves):
        tiles = packed[half :: len(halves)]
        for start in range(first, last, step):
            rows = slice(start, min(start + step, last))
            begin = (start - first) // TILE
            if scale is None:
                part = _tiled(weight[rows], 0).view(np.uint8).reshape(-1, tile_nbytes)
            else:
                part = _pack_rows(
                    weight[rows], scale[rows], None if minimum is None else minimum[rows], bits, group_size
                )[:, :tile_nbytes]
            tiles[begin : begin + part.shape[0]] = part
    return packed.reshape(-1)


def _check(n: int, k: int, bits: int, group_size: int, gated: bool) -> None:
    if bits not in (4, 8, 32):
        raise ValueError(f"bits must be 4, 8 or 32, is {bits}")
    if n < 1 or k < 1 or (gated and n % 2):
        raise ValueError(f"a matrix of {n} outputs and {k} inputs cannot be packed{' gated' if gated else ''}")
    if bits == 32:
        if group_size != 0:
            raise ValueError(f"group_size must be 0 for 32 bits, is {group_size}")
    elif group_size not in (32, 64, 128) or k % group_size:
        raise ValueError(f"group_size must be 32, 64 or 128 and divide {k} inputs, is {group_size}")


def _tile_count(n: int, gated: bool) -> int:
    return 2 * (-(-(n // 2) // TILE)) if gated else -(-n // TILE)


def _tile_nbytes(k: int, bits: int, group_size: int, has_minimum: bool) -> int:
    if bits == 32:
        return k * TILE * 4
    groups = k // group_size
    lines = groups if has_minimum else (groups + 1) // 2
    return lines * 64 + k * TILE * bits // 8


def _tiled(rows: npt.NDArray[Any], fill: int) -> npt.NDArray[Any]:
    """``[N, columns]`` to contiguous ``[tiles, columns, 16]``."""
    missing = -rows.shape[0] % TILE
    if missing:
        rows = np.concatenate([rows, np.full((missing, rows.shape[1]), fill, rows.dtype)])
    return np.ascontiguousarray(rows.reshape(-1, TILE, rows.shape[1]).transpose(0, 2, 1))


def _pack_rows(
    weight: npt.NDArray[Any],
    scale: npt.NDArray[np.float16],
    minimum: npt.NDArray[np.float16] | None,
    bits: int,
    group_size: int,
) -> npt.NDArray[np.uint8]:
    """Rows of one half to ``[tiles, bytes]``; a last block of one group still carries the room of two."""
    groups = scale.shape[1]
    q: npt.NDArray[Any]
    if bits == 4:
        q, zero = unpack_int4(weight), 8 if minimum is None else 0
    else:
        q, zero = weight.view(np.uint8) ^ 0x80, 128
    missing = -q.shape[0] % TILE
    if missing:
        q = np.concatenate([q, np.full((missing, q.shape[1]), zero, np.uint8)])
    tiles = q.shape[0] // TILE
    lines: npt.NDArray[Any]
    if bits == 4:
        octets = q.reshape(tiles, TILE, -1, 2, 4)
        lines = octets[:, :, :, 0] | (octets[:, :, :, 1] << 4)
    else:
        lines = q.reshape(tiles, TILE, -1, 4)
    integers = lines.transpose(0, 2, 1, 3).reshape(tiles, groups, -1)
    scales = _tiled(scale, 0)
    if minimum is not None:
        header = np.concatenate([scales, _tiled(minimum, 0)], axis=2)
        blocks = integers
    else:
        if groups % 2:
            scales = np.concatenate([scales, np.zeros((tiles, 1, TILE), np.float16)], axis=1)
            integers = np.concatenate([integers, np.zeros((tiles, 1, integers.shape[2]), np.uint8)], axis=1)
        header = scales.reshape(tiles, -1, 2 * TILE)
        blocks = integers.reshape(tiles, header.shape[1], -1)
    return np.concatenate([header.view(np.uint8), blocks], axis=2).reshape(tiles, -1)
