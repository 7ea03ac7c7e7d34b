"""A linear and the addition of the residual stream become one linear."""

from __future__ import annotations

import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.linear import change_linear, is_linear, linear_inputs
from specexport.graph_passes.matching import is_weight, only_user, same_shape


class FuseResidualPass(GraphPass):
    """Add the residual stream in the linear's epilogue."""

    def rewrite(self, model: ir.Model) -> None:
        """Fuse each addition of a linear's output and another tensor of the same shape."""
        for node in list(model.graph):
            if node.op_type != "Add" or node.domain:
                continue
            left, right = node.inputs
            if left is None or right is None or is_weight(left) or is_weight(right):
                continue
            # The second operand first: when both are linears, the later one can take the earlier one's output.
            order = {value: number for number, value in enumerate(_in_graph_order(model.graph, (left, right)))}
            candidates = sorted((left, right), key=lambda value: -order[value])
            linears = [value for value in candidates if is_linear(value.producer())]
            if not linears:
                continue
            reasons = [self._reason(node, value, right if value is left else left) for value in linears]
            if all(reason is not None for reason in reasons):
                self.refuse(str(reasons[0]), node)
                continue
            product = linears[reasons.index(None)]
            linear = product.producer()
            assert linear is not None
            change_linear(linear, node.outputs[0], {"residual": right if product is left else left})
            self.match()

    def _reason(self, node: ir.Node, product: ir.Value, residual: ir.Value) -> str | None:
        linear = product.producer()
        assert linear is not None
        if linear_inputs(linear)["residual"] is not None:
            return "the linear has a residual already"
        if only_user(product) is not node:
            return "the linear's output is used elsewhere"
        return None if same_shape(product, residual) else "the other operand has another shape"


def _in_graph_order(graph: ir.Graph, values: tuple[ir.Value, ...]) -> list[ir.Value]:
    """Values by where they are made: graph inputs first, then by node."""
    position = {node: number for number, node in enumerate(graph)}

    def key(value: ir.Value) -> int:
        node = value.producer()
        return -1 if node is None else position[node]

    return sorted(values, key=key)
