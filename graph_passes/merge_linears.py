"""Linears of one input whose outputs are joined (q, k and v) become one linear of the stacked matrices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.linear import change_linear, is_linear, linear_attributes, linear_inputs
from specexport.graph_passes.matching import attribute, only_user, rank
from specexport.graph_passes.tensors import dims, lazy, stacked


class MergeLinearsPass(GraphPass):
    """Read the input once for all matrices that are applied to it side by side."""

    def rewrite(self, model: ir.Model) -> None:
        """Merge each concatenation along the channels whose parts are all linears of one tensor."""
        for node in list(model.graph):
            if node.op_type != "Concat" or node.domain:
                continue
            linears = [value.producer() for value in node.inputs if value is not None]
            if not any(is_linear(linear) for linear in linears) or len(linears) < 2:
                continue
            nodes = [linear for linear in linears if linear is not None and is_linear(linear)]
            if len(nodes) != len(linears):
                self.refuse("not every part is a linear", node)
                continue
            last = (rank(node.inputs[0]) if node.inputs[0] is not None else None) or 0
            if attribute(node, "axis") not in (-1, last - 1):
                self.refuse("the parts are not joined along the channels", node)
                continue
            reason = cannot_stack(nodes)
            if reason is None and any(only_user(linear.outputs[0]) is not node for linear in nodes):
                reason = "a part is used elsewhere"
            if reason is not None:
                self.refuse(reason, node)
                continue
            change_linear(nodes[0], node.outputs[0], stack_inputs(model.graph, nodes))
            self.match()


def cannot_stack(nodes: Sequence[ir.Node]) -> str | None:
    """Why linears cannot become one of the stacked matrices; None if they can."""
    first = nodes[0]
    if len(set(nodes)) != len(nodes):
        return "one linear stands twice"
    for node in nodes:
        inputs, attributes = linear_inputs(node), linear_attributes(node)
        if node.inputs[0] is not first.inputs[0]:
            return "they have different inputs"
        if attributes != linear_attributes(first) or (inputs["minimum"] is None) != (
            linear_inputs(first)["minimum"] is None
        ):
            return "their matrices have different schemes"
        if attributes.gated or attributes.activation != "none" or inputs["residual"] is not None:
            return "one has an activation or a residual"
        if inputs["norm_weight"] is not linear_inputs(first)["norm_weight"]:
            return "they have different norms"
    return None


def stack_inputs(graph: ir.Graph, nodes: Sequence[ir.Node]) -> dict[str, ir.Value | None]:
    """The inputs weight, scale, minimum and bias of the stacked linear; missing biases are zeros."""
    every = [linear_inputs(node) for node in nodes]
    result: dict[str, ir.Value | None] = {}
    for name in ("weight", "scale", "minimum"):
        values = [inputs[name] for inputs in every]
        present = [value for value in values if value is not None]
        result[name] = stacked(graph, present) if present else None
    biases = [inputs["bias"] for inputs in every]
    if any(bias is not None for bias in biases):
        result["bias"] = stacked(
            graph, [bias or _zeros(graph, inputs["weight"]) for bias, inputs in zip(biases, every)]
        )
    return result


def _zeros(graph: ir.Graph, weight: ir.Value | None) -> ir.Value:
    assert weight is not None
    n = dims(weight)[0]
    return lazy(graph, f"zeros_{n}", ir.DataType.FLOAT, (n,), lambda: np.zeros(n, np.float32))
