"""The header of a GGUF file, read with suspicion: every count and offset is checked against the file's size."""

from __future__ import annotations

import dataclasses
import math
import mmap
import pathlib
import struct
from typing import Any

import numpy as np

from specexport.plugins.errors import InputError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_SMALL_ARRAY = 4096  # Longer arrays are vocabularies; only their extent is kept.


@dataclasses.dataclass(frozen=True)
class TensorType:
    """How values are stored: blocks of ``block_values`` values in ``block_bytes`` bytes."""

    name: str
    block_values: int
    block_bytes: int


# Those with an exact repack. The numbers are GGML's type ids.
SUPPORTED_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34),
}


@dataclasses.dataclass(frozen=True)
class LongArray:
    """Stands for an array that was checked but not kept, such as a vocabulary."""

    count: int


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. ``shape`` is in row-major order, rows first; ``offset`` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return math.prod(self.shape) // self.type.block_values * self.type.block_bytes


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """A checked GGUF header.

    Attributes:
        metadata: Scalars, texts and small arrays by key; texts in arrays and long arrays are a ``LongArray``.
        extents: First byte and end of each key-value pair in the file, key included.
        tensors: By name, in file order.
        table: First byte and end of the tensor table.
        size: Of the file, in bytes.
    """

    path: pathlib.Path
    metadata: dict[str, Any]
    extents: dict[str, tuple[int, int]]
    tensors: dict[str, GGUFTensor]
    table: tuple[int, int]
    size: int

    @property
    def architecture(self) -> str:
        """GGUF's name of the architecture, such as ``llama``."""
        return str(self.metadata["general.architecture"])

    def raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A tensor's stored bytes, mapped: uint8 [rows, bytes of a row] (one row for a vector)."""
        tensor = self.tensors[name]
        data = np.memmap(self.path, np.uint8, "r", tensor.offset, (tensor.nbytes,))
        return data.reshape(-1, tensor.shape[-1] // tensor.type.block_values * tensor.type.block_bytes)


def read_gguf(path: pathlib.Path) -> GGUFFile:
    """Read and check a GGUF header; no tensor data is touched.

    Raises:
        InputError: Not a GGUF file, cut short, inconsistent, or a tensor of a type that has no exact repack.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data, size).read()
    except (OSError, ValueError) as error:  # An empty file cannot be mapped: ValueError.
        raise InputError(f"{path}: cannot be read as GGUF: {error}") from error


class _Reader:
    def __init__(self, path: pathlib.Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.position = path, data, size, 0

    def read(self) -> GGUFFile:
        if self.data[:4] != b"GGUF":
            raise InputError(f"{self.path}: not a GGUF file: it starts with {bytes(self.data[:4])!r}")
        self.position = 4
        (version,) = self.take("I")
        if version not in (2, 3):
            raise InputError(f"{self.path}: GGUF version {version}; versions 2 and 3 (little-endian) can be read")
        tensor_count, pair_count = self.take("QQ")
        metadata: dict[str, Any] = {}
        extents = {}
        for _ in range(self.count(pair_count, 13, "key-value pairs")):
            start = self.position
            key = self.text()
            if key in metadata:
                raise InputError(f"{self.path}: the key {key!r} occurs twice")
            (kind,) = self.take("I")
            metadata[key] = self.value(kind, key)
            extents[key] = (start, self.position)
        if not isinstance(metadata.get("general.architecture"), str):
            raise InputError(f"{self.path}: the metadata has no general.architecture")
        if metadata.get("split.count", 1) not in (0, 1):
            raise InputError(
                f"{self.path}: one part of {metadata['split.count']}; join them first with llama-gguf-split --merge"
            )
        start = self.position
        entries = [self.entry() for _ in range(self.count(tensor_count, 24, "tensors"))]
        end = self.position
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise InputError(f"{self.path}: general.alignment is {alignment!r}; it must be a power of two")
        first = (end + alignment - 1) // alignment * alignment
        tensors = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise InputError(f"{self.path}: the tensor {name!r} occurs twice")
            tensors[name] = self.check(GGUFTensor(name, shape, self.type(name, kind, len(entries)), first + offset))
        return GGUFFile(self.path, metadata, extents, tensors, (start, end), self.size)

    def take(self, layout: str) -> tuple[Any, ...]:
        length = struct.calcsize("<" + layout)
        if self.position + length > self.size:
            raise InputError(f"{self.path}: cut short: the header ends at byte {self.size}; download it again")
        values = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += length
        return values

    def count(self, count: int, least_bytes: int, what: str) -> int:
        if count * least_bytes > self.size - self.position:
            raise InputError(f"{self.path}: it claims {count} {what}, more than {self.size} bytes can hold")
        return count

    def text(self) -> str:
        (length,) = self.take("Q")
        start = self.position
        self.position += self.count(length, 1, "bytes of text")
        try:
            return self.data[start : self.position].decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path}: text at byte {start} is not UTF-8: {error.reason}") from None

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise InputError(f"{self.path}: {key!r} has the unknown value type {kind}")
        element, count = self.take("IQ")
        if element in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[element])
            self.count(count, width, f"values in {key!r}")
            if count <= _SMALL_ARRAY:
                return list(self.take(f"{count}{_SCALARS[element]}"))
            self.position += count * width
            return LongArray(count)
        if element != _STRING:
            raise InputError(f"{self.path}: {key!r} is an array of the unsupported value type {element}")
        for _ in range(self.count(count, 8, f"texts in {key!r}")):
            (length,) = self.take("Q")
            self.position += self.count(length, 1, "bytes of text")
        return LongArray(count)

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text()
        (dimensions,) = self.take("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise InputError(f"{self.path}: tensor {name!r} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} can be")
        # GGML lists the fastest-moving dimension first.
        shape = tuple(reversed(self.take(f"{dimensions}Q")))
        kind, offset = self.take("IQ")
        return name, shape, kind, offset

    def type(self, name: str, kind: int, total: int) -> TensorType:
        if kind in SUPPORTED_TYPES:
            return SUPPORTED_TYPES[kind]
        supported = ", ".join(known.name for known in SUPPORTED_TYPES.values())
        raise InputError(
            f"{self.path}: tensor {name!r} is stored as {_type_name(kind)}, which has no exact repack here; "
            f"take a file whose {total} tensors are all among {supported}"
        )

    def check(self, tensor: GGUFTensor) -> GGUFTensor:
        if min(tensor.shape) < 1 or tensor.shape[-1] % tensor.type.block_values:
            raise InputError(
                f"{self.path}: tensor {tensor.name!r} has the shape {tensor.shape}; its rows must be whole blocks of "
                f"{tensor.type.block_values} values ({tensor.type.name})"
            )
        if tensor.offset + tensor.nbytes > self.size:
            raise InputError(
                f"{self.path}: cut short: tensor {tensor.name!r} needs bytes up to {tensor.offset + tensor.nbytes}, "
                f"the file has {self.size}; download it again"
            )
        return tensor


def _type_name(kind: int) -> str:
    try:
        import gguf

        return str(gguf.GGMLQuantizationType(kind).name)
    except (ImportError, ValueError):
        return f"GGML type {kind}"
