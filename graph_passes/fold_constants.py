"""What computes nothing at run time goes: identities, arithmetic of constants, a weight plus or times a constant."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.matching import attribute, is_weight, replace, same_shape, scalar, small_constant
from specexport.graph_passes.tensors import constant, data, dims, lazy

_OPERATORS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "Add": ("+", operator.add),
    "Sub": ("-", operator.sub),
    "Mul": ("*", operator.mul),
    "Div": ("/", operator.truediv),
}
# Exporters spell axes and shapes with these.
_SHAPE_OPS = ("Cast", "Reshape", "Concat", "Squeeze", "Unsqueeze")


class FoldConstantsPass(GraphPass):
    """Remove the nodes that a run need not execute.

    Identities and reshapes to the shape that is there already; casts and concatenations of small constants; and
    ``weight + 1`` (Gemma's norms) and its kind, which become one weight, computed when it is written.
    """

    def rewrite(self, model: ir.Model) -> None:
        """Fold in graph order, so that chains fold whole."""
        for node in list(model.graph):
            if node.domain:
                continue
            if node.op_type == "Constant":
                self._lift(model.graph, node)
            elif self._is_identity(node):
                source = node.inputs[0]
                assert source is not None
                replace(node.outputs[0], source)
                self.match()
            elif node.op_type in _SHAPE_OPS:
                self._fold_small(model.graph, node)
            elif node.op_type in _OPERATORS:
                self._fold_weight(model.graph, node)

    def _lift(self, graph: ir.Graph, node: ir.Node) -> None:
        """Constants become initializers, equal ones the same."""
        array = small_constant(node.outputs[0])
        if array is None or array.size > 64:
            return
        values = "_".join(str(v) for v in array.ravel().tolist())
        shape = "x".join(map(str, array.shape)) or "scalar"
        replace(node.outputs[0], constant(graph, f"{array.dtype}_{shape}_{values}", array))
        self.match()

    def _is_identity(self, node: ir.Node) -> bool:
        source, output = node.inputs[0] if node.inputs else None, node.outputs[0]
        if source is None or (output.is_graph_output() and (source.is_graph_input() or source.is_initializer())):
            return False
        if node.op_type == "Reshape":
            return same_shape(source, output)
        if node.op_type == "Cast":
            return source.dtype is not None and source.dtype == attribute(node, "to")
        return node.op_type == "Identity"

    def _fold_small(self, graph: ir.Graph, node: ir.Node) -> None:
        inputs = [small_constant(value) for value in node.inputs]
        arrays = [array for array in inputs if array is not None]
        if len(arrays) != len(inputs) or any(array.size > 64 for array in arrays) or not node.outputs[0].name:
            return
        replace(node.outputs[0], constant(graph, f"{node.outputs[0].name}_folded", _compute(node, arrays)))
        self.match()

    def _fold_weight(self, graph: ir.Graph, node: ir.Node) -> None:
        left, right = node.inputs
        number = scalar(right)
        if node.op_type in ("Add", "Mul") and number is None:
            left, right, number = right, left, scalar(left)
        if number is None or left is None or not is_weight(left) or not isinstance(left.const_value, ir.LazyTensor):
            return
        weight, value = left, np.float32(number)
        sign, function = _OPERATORS[node.op_type]
        folded = lazy(
            graph,
            f"{weight.name}{sign}{number:g}",
            ir.DataType.FLOAT,
            dims(weight),
            lambda: function(data(weight), value),
        )
        replace(node.outputs[0], folded)
        self.match()


def _compute(node: ir.Node, arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    first = arrays[0]
    if node.op_type == "Cast":
        return first.astype(ir.DataType(attribute(node, "to")).numpy())
    if node.op_type == "Concat":
        return np.concatenate(arrays, axis=attribute(node, "axis"))
    if node.op_type == "Reshape":
        return first.reshape([int(d) for d in arrays[1]])
    axes = tuple(int(a) for a in arrays[1]) if len(arrays) > 1 else None
    if node.op_type == "Unsqueeze":
        return np.expand_dims(first, axes or (0,))
    return np.squeeze(first, axes)
