"""Initializers that are computed when they are written: weights by name, quantized, stacked, packed."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specexport.graph_passes.plan import WeightSource
from specexport.plugins.quantized_linear.format import QuantizationScheme, QuantizedWeight, quantize

Array = np.ndarray[Any, Any]
_DTYPES = {
    ir.DataType.FLOAT: np.float32,
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.INT8: np.int8,
    ir.DataType.UINT8: np.uint8,
}


class NamedWeight(ir.LazyTensor):
    """A weight of the model by its state-dict name, float32; it has no data until a pass binds it to a source."""

    def __init__(
        self, name: str, dtype: ir.DataType, shape: ir.Shape, read: Callable[[str], Array] | None = None
    ) -> None:
        def load() -> ir.TensorProtocol:
            if read is None:
                raise RuntimeError(f"the weight {name} is a reference; no pass has bound it to data yet")
            return ir.tensor(np.ascontiguousarray(read(name), _DTYPES.get(dtype)))

        super().__init__(load, dtype=dtype, shape=shape, name=name)
        self.bound = read is not None


class Matrices:
    """Quantized matrices by name, the last few kept: weight, scale and minimum are written one after the other."""

    def __init__(self, source: WeightSource, keep: int = 4) -> None:
        self._source, self._keep = source, keep
        self._recent: collections.OrderedDict[tuple[str, QuantizationScheme, bool], QuantizedWeight] = (
            collections.OrderedDict()
        )

    def quantized(self, name: str, scheme: QuantizationScheme, transposed: bool) -> QuantizedWeight:
        """The matrix ``name`` in ``scheme``; ``transposed`` if its file holds [K, N]."""
        key = (name, scheme, transposed)
        if key not in self._recent:
            while len(self._recent) >= self._keep:
                self._recent.popitem(last=False)
            self._recent[key] = (
                quantize(np.ascontiguousarray(self._source.get(name).T), scheme)
                if transposed
                else self._source.quantized(name, scheme)
            )
        self._recent.move_to_end(key)
        return self._recent[key]


def scheme_tag(scheme: QuantizationScheme) -> str:
    """What an initializer's name says of its scheme, e.g. ``int4g32m``."""
    return f"int{scheme.bits}g{scheme.group_size}{'m' if scheme.has_minimum else ''}"


def matrix_names(packed: str) -> tuple[str, ...]:
    """State-dict names of the matrices in a linear's weight, from the name of that initializer, packed or not."""
    parts = packed.removesuffix(".gated").removesuffix(".packed").split("+")
    return tuple(re.sub(r"\.int\d+g\d+m?\.weight$", "", part) for part in parts)


def lazy(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int], compute: Callable[[], Array]
) -> ir.Value:
    """The initializer ``name``, made if the graph has none; ``compute`` gives its data whenever it is read."""
    found = graph.initializers.get(name)
    if found is not None:
        return found
    tensor = ir.LazyTensor(
        lambda: ir.tensor(np.ascontiguousarray(compute(), _DTYPES.get(dtype))),
        dtype=dtype,
        shape=ir.Shape(shape),
        name=name,
    )
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def constant(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """The small initializer ``name`` with its data at hand, made if the graph has none."""
    found = graph.initializers.get(name)
    if found is not None:
        return found
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def data(value: ir.Value) -> Array:
    """An initializer's data, read now."""
    assert value.const_value is not None, value.name
    return value.const_value.numpy()


def dims(value: ir.Value) -> tuple[int, ...]:
    """An initializer's shape."""
    assert value.const_value is not None, value.name
    return tuple(int(str(d)) for d in value.const_value.shape)


def stacked(graph: ir.Graph, values: Sequence[ir.Value]) -> ir.Value:
    """Initializers of equal type, one below the other along the first axis, read when written."""
    if len(values) == 1:
        return values[0]
    shapes = [dims(value) for value in values]
    tensor = values[0].const_value
    assert tensor is not None
    return lazy(
        graph,
        "+".join(str(value.name) for value in values),
        tensor.dtype,
        (sum(shape[0] for shape in shapes), *shapes[0][1:]),
        lambda: np.concatenate([data(value) for value in values]),
    )
