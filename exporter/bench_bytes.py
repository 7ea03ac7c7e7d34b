"""Bytes that decoding one token reads: counted from the engine's own graph, and from its cache layout."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator

from specexport.plugins.errors import InputError
from specexport.runtime.manifest import CacheLayer, CacheLayout

#: Operators that read single rows of a table, not the whole of it: operator to the table's input.
ROW_READERS = {"QuantizedEmbedding": 1, "Gather": 0, "QuantizedKVAttention": None}
PRODUCTS = ("QuantizedLinear", "MatMul", "Gemm")
_ELEMENT_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 16: 2}

Field = tuple[int, int | bytes]


@dataclasses.dataclass(frozen=True)
class WeightBytes:
    """What one step reads of an engine's weights.

    Attributes:
        head: The output head's matrix, read once a step whatever the number of rows.
        layers: Every other matrix and vector that is read whole.
        stored: All weights, tables of rows included.
    """

    head: int
    layers: int
    stored: int

    @property
    def step(self) -> int:
        """Bytes that a step reads, but for the few rows of the embedding and of the rotation's tables."""
        return self.head + self.layers


def weight_bytes(model: pathlib.Path) -> WeightBytes:
    """Count the initializers of an ONNX file by who reads them; needs no onnx.

    A tensor counts once, whole, if any node reads it whole; those that only `QuantizedEmbedding` or a rotation reads
    are tables, of which a step reads single rows, and count as nothing. The head is what the last product before
    ``logits`` reads.

    Raises:
        InputError: The file is no ONNX model.
    """
    sizes: dict[str, int] = {}
    nodes: list[_Node] = []
    graph = next((value for number, value in _fields(model.read_bytes(), model) if number == 7), None)
    if not isinstance(graph, bytes):
        raise InputError(f"{model}: holds no graph")
    for number, value in _fields(graph, model):
        if number == 5 and isinstance(value, bytes):
            name, nbytes = _tensor(value, model)
            sizes[name] = nbytes
        elif number == 1 and isinstance(value, bytes):
            nodes.append(_node(value, model))
    read = {name for node in nodes for name in node.read_whole()}
    head = set(_head(nodes).read_whole())
    whole = {name: nbytes for name, nbytes in sizes.items() if name in read}
    of_head = sum(nbytes for name, nbytes in whole.items() if name in head)
    return WeightBytes(head=of_head, layers=sum(whole.values()) - of_head, stored=sum(sizes.values()))


@dataclasses.dataclass(frozen=True)
class _Node:
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def read_whole(self) -> list[str]:
        """Inputs that are not tables of rows."""
        table = ROW_READERS.get(self.operator, -1)
        return [] if table is None else [name for at, name in enumerate(self.inputs) if at != table]


def _node(data: bytes, where: pathlib.Path) -> _Node:
    fields = list(_fields(data, where))
    texts = {number: tuple(_text(value) for found, value in fields if found == number) for number in (1, 2, 4)}
    return _Node(operator="".join(texts[4]), inputs=texts[1], outputs=texts[2])


def _head(nodes: list[_Node]) -> _Node:
    """The last product before ``logits``; softcaps and reshapes may stand behind it."""
    makers = {name: node for node in nodes for name in node.outputs if name}
    node = makers.get("logits", _Node("", (), ()))
    while node.operator not in PRODUCTS:
        before = [makers[name] for name in node.inputs if name in makers]
        if not before:
            break
        node = before[0]
    return node


def cache_bytes(layout: CacheLayout, context: int) -> int:
    """Bytes of keys, values and scales that one row attends to behind ``context`` positions."""
    return sum(
        position_bytes(layer) * (min(context, layer.window) if layer.window else context) for layer in layout.layers
    )


def position_bytes(layer: CacheLayer) -> int:
    """Bytes of one position of one layer: keys, values, and their scales."""
    sides = ((layer.key_bits, layer.key_group_size), (layer.value_bits, layer.value_group_size))
    rows = (layer.head_dim * bits // 8 + (2 * layer.head_dim // group if group else 0) for bits, group in sides)
    return layer.kv_num_heads * sum(rows)


def _tensor(data: bytes, where: pathlib.Path) -> tuple[str, int]:
    """Name and bytes of a TensorProto."""
    name, kind, shape = "", 1, []
    for number, value in _fields(data, where):
        if number == 8:
            name = _text(value)
        elif number == 2 and isinstance(value, int):
            kind = value
        elif number == 1:
            shape += [value] if isinstance(value, int) else list(_packed(value, where))
    return name, math.prod(shape) * _ELEMENT_BYTES.get(kind, 4)


def _text(value: int | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _fields(data: bytes, where: pathlib.Path) -> Iterator[Field]:
    """Number and value of every field of one protobuf message; fixed-width ones as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, where)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at, where)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind, 0)
        if kind == 2:
            length, at = _varint(data, at, where)
        elif not length:
            raise InputError(f"{where}: no ONNX model, or damaged: field of kind {kind} at byte {at}")
        if at + length > len(data):
            raise InputError(f"{where}: no ONNX model, or cut short at byte {at}")
        yield key >> 3, data[at : at + length]
        at += length


def _packed(data: bytes, where: pathlib.Path) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at, where)
        yield value


def _varint(data: bytes, at: int, where: pathlib.Path) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    raise InputError(f"{where}: no ONNX model, or cut short at byte {at}")
