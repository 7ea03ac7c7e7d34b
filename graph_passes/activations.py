"""Which activation a value is, whatever nodes spell it."""

from __future__ import annotations

import math

import onnx_ir as ir

from specexport.graph_passes.matching import attribute, producer, scalar


def activation_of(value: ir.Value | None) -> tuple[str, ir.Value, list[ir.Node]] | None:
    """The linear op's name of the activation that makes ``value``, its input, and the nodes between.

    Knows x * sigmoid(x), Relu, Gelu, and the tanh approximation of Gelu written out.
    """
    node = None if value is None else value.producer()
    if node is None or node.domain or not node.inputs:
        return None
    x = node.inputs[0]
    if node.op_type == "Relu" and x is not None:
        return "relu", x, [node]
    if node.op_type == "Gelu" and x is not None:
        return ("gelu_tanh" if attribute(node, "approximate", "none") == "tanh" else "gelu"), x, [node]
    if node.op_type != "Mul":
        return None
    for left, right in (node.inputs, tuple(node.inputs)[::-1]):
        sigmoid = producer(right, "Sigmoid")
        if sigmoid is not None and left is not None and sigmoid.inputs[0] is left:
            return "silu", left, [node, sigmoid]
    return _written_out_tanh(node)


def _written_out_tanh(node: ir.Node) -> tuple[str, ir.Value, list[ir.Node]] | None:
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))."""
    for half, one_plus in (node.inputs, tuple(node.inputs)[::-1]):
        halving, adding = producer(half, "Mul"), producer(one_plus, "Add")
        if halving is None or adding is None:
            continue
        x, factor = _by_constant(halving)
        inner, one = _by_constant(adding)
        tanh = producer(inner, "Tanh")
        if x is None or factor != 0.5 or one != 1.0 or tanh is None:
            continue
        scaling = producer(tanh.inputs[0], "Mul")
        if scaling is None:
            continue
        total, root = _by_constant(scaling)
        adding_cube = producer(total, "Add")
        if root is None or not math.isclose(root, math.sqrt(2 / math.pi), rel_tol=1e-5) or adding_cube is None:
            continue
        cubes = [value for value in adding_cube.inputs if value is not x]
        weighting = producer(cubes[0], "Mul") if len(cubes) == 1 else None
        if weighting is None:
            continue
        cubed, small = _by_constant(weighting)
        power = producer(cubed, "Pow")
        if power is None or power.inputs[0] is not x or scalar(power.inputs[1]) != 3.0:
            continue
        if small is not None and math.isclose(small, 0.044715, rel_tol=1e-5):
            return "gelu_tanh", x, [node, halving, adding, tanh, scaling, adding_cube, weighting, power]
    return None


def _by_constant(node: ir.Node) -> tuple[ir.Value | None, float | None]:
    """The variable and the constant operand of a commutative node."""
    left, right = node.inputs
    number = scalar(right)
    return (left, number) if number is not None else (right, scalar(left))


def is_private(value: ir.Value, nodes: list[ir.Node]) -> bool:
    """Whether ``value`` is used by ``nodes`` only."""
    return not value.is_graph_output() and all(use.node in nodes for use in value.uses())
