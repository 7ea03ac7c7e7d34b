"""The weight files of a Hugging Face directory, checked before anything heavy reads them."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import struct
from typing import Any

from specexport.plugins.errors import InputError

# Element types that become float32 here, and their bytes. Others (8-bit floats, packed integers) are quantized
# checkpoints, which need their own repack.
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_INTEGERS = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
_OTHERS = {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_HEADER_LIMIT = 100_000_000  # The format's own limit.


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file: ``offset`` is from the file's start."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The weight files of a directory.

    Attributes:
        format: ``safetensors`` or ``bin``.
        files: All of them, each once.
        tensors: What the safetensors headers list; empty for ``bin``.
    """

    format: str
    files: tuple[pathlib.Path, ...]
    tensors: dict[str, StoredTensor]


def read_checkpoint(directory: pathlib.Path) -> Checkpoint:
    """Find and check the weight files.

    Raises:
        InputError: None there, a shard missing, a file cut short, or a pickle that cannot be loaded safely.
    """
    for suffix, stem in (("safetensors", "model"), ("bin", "pytorch_model")):
        index = directory / f"{stem}.{suffix}.index.json"
        single = directory / f"{stem}.{suffix}"
        files: tuple[pathlib.Path, ...]
        weight_map: dict[str, str] | None = None
        if single.is_file():
            files = (single,)
        elif index.is_file():
            files, weight_map = _indexed(index)
        else:
            continue
        if suffix == "bin":
            for file in files:
                _check_pickle(file)
            return Checkpoint("bin", files, {})
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            tensors.update(read_safetensors_header(file))
        for name, shard in (weight_map or {}).items():
            if name not in tensors or tensors[name].file.name != shard:
                raise InputError(f"{index}: lists {name} in {shard}, which does not hold it")
        return Checkpoint("safetensors", files, tensors)
    raise InputError(
        f"{directory}: no weights: neither model.safetensors nor pytorch_model.bin nor their index.json is there"
    )


def read_safetensors_header(file: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of one file, every offset checked against its size.

    Raises:
        InputError: Not safetensors, inconsistent, or cut short.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _HEADER_LIMIT + 1
        if length > _HEADER_LIMIT or 8 + length > size:
            raise InputError(f"{file}: not a safetensors file, or cut short at {size} bytes; download it again")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise InputError(f"{file}: its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise InputError(f"{file}: its header is not a table of tensors")
    header.pop("__metadata__", None)
    return {name: _stored(file, name, entry, 8 + length, size) for name, entry in header.items()}


def _stored(file: pathlib.Path, name: str, entry: Any, base: int, size: int) -> StoredTensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)) and start <= stop
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise InputError(f"{file}: the entry of {name!r} is malformed")
    width = {**FLOATS, **_INTEGERS, **_OTHERS}.get(dtype)
    if width is not None and stop - start != math.prod(shape) * width:
        raise InputError(f"{file}: {name!r} ({dtype!r} {list(shape)}) cannot be {stop - start} bytes")
    if base + stop > size:
        raise InputError(
            f"{file}: cut short: {name!r} needs bytes up to {base + stop}, the file has {size}; download it again"
        )
    return StoredTensor(file, dtype, shape, base + start, stop - start)


def _indexed(index: pathlib.Path) -> tuple[tuple[pathlib.Path, ...], dict[str, str]]:
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: not an index with a weight_map: {error}") from error
    for shard in shards:
        if not isinstance(shard, str) or pathlib.PurePath(shard).name != shard:
            raise InputError(f"{index}: {shard!r} is not a file name beside it")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise InputError(
            f"{index.parent}: {missing[0]} is missing ({len(missing)} of {len(shards)} weight files); download it again"
        )
    return tuple(index.parent / shard for shard in shards), weight_map


def _check_pickle(file: pathlib.Path) -> None:
    import torch

    try:
        # On the meta device nothing but the pickle itself is read.
        torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:  # Whatever a hostile pickle makes torch raise.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"{file}: cannot be loaded with weights_only, the only way pickled weights are read here: {reason[:200]}; "
            "save the model as safetensors"
        ) from error
