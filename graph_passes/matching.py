"""Small questions about a graph that every pass asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

OPS = "specexport"


def producer(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that makes ``value``, if it is of that op."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and node.domain == domain else None


def only_user(value: ir.Value) -> ir.Node | None:
    """The one node that uses ``value``; None if there are more, none, or it is an output of the graph."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """A node's attribute as a Python value."""
    found = node.attributes.get(name)
    if found is None:
        return default
    value = found.value
    return value.decode() if isinstance(value, bytes) else value


def integers(value: ir.Value | None) -> list[int] | None:
    """The integers of a small constant; None if ``value`` is none or is a weight."""
    array = small_constant(value)
    return None if array is None or array.dtype.kind not in "iu" else [int(v) for v in array.ravel()]


def scalar(value: ir.Value | None) -> float | None:
    """The number of a constant with one element."""
    array = small_constant(value)
    return None if array is None or array.size != 1 else float(array.ravel()[0])


def small_constant(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """A constant's data, if it is at hand (weights are not)."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None or isinstance(tensor, ir.LazyTensor) else tensor.numpy()


def is_weight(value: ir.Value | None, rank: int | None = None) -> bool:
    """Whether ``value`` is an initializer, of that rank."""
    if value is None or not value.is_initializer() or value.const_value is None:
        return False
    return rank is None or len(value.const_value.shape) == rank


def static(value: ir.Value, axis: int) -> int | None:
    """The extent of an axis, if it is a number."""
    if value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else None


def rank(value: ir.Value) -> int | None:
    """The number of axes, if known."""
    return None if value.shape is None else len(value.shape)


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether both shapes are known and equal, symbols by name."""
    return a.shape is not None and b.shape is not None and list(map(str, a.shape)) == list(map(str, b.shape))


def shaped(node: ir.Node, shape: Sequence[Any] | ir.Shape | None, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    """The first output of a new node, with its shape and type set."""
    value = node.outputs[0]
    value.shape = None if shape is None else ir.Shape(list(shape))
    value.type = ir.TensorType(dtype)
    return value


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let every user of ``old``, the graph's outputs included, use ``new``, which takes over the name and shape."""
    name, graph_output = old.name, old.is_graph_output()
    if new.shape is None:
        new.shape = old.shape
    if new.type is None:
        new.type = old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if graph_output or not new.name:
        old.name = f"{name}_replaced"
        new.name = name


def insert_before(anchor: ir.Node, *nodes: ir.Node) -> None:
    """Put new nodes where ``anchor`` stands."""
    assert anchor.graph is not None
    anchor.graph.insert_before(anchor, list(nodes))


def counts_from(value: ir.Value | None, past: ir.Value) -> bool:
    """Whether ``value`` [B, S] is ``past[:, None] + arange(S)``."""
    add = producer(value, "Add")
    if add is None:
        return False
    sides = [unwrapped(side) for side in add.inputs]
    for first, second in (sides, sides[::-1]):
        steps = producer(second, "Range")
        if first is past and steps is not None:
            start, _, delta = (unwrapped(v) for v in steps.inputs)
            return scalar(start) == 0 and scalar(delta) == 1
    return False


def unwrapped(value: ir.Value | None) -> ir.Value | None:
    """``value`` before Unsqueeze, Squeeze, Cast and Identity."""
    while value is not None:
        node = value.producer()
        if node is None or node.domain or node.op_type not in ("Unsqueeze", "Squeeze", "Cast", "Identity"):
            return value
        value = node.inputs[0]
    return value
