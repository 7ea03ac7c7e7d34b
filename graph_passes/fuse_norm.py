"""A norm that feeds only linears becomes their prologue."""

from __future__ import annotations

import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.linear import change_linear, is_linear, linear_attributes
from specexport.graph_passes.matching import attribute, is_weight, rank
from specexport.graph_passes.tensors import dims

_NORMS = {"RMSNormalization": "rms", "LayerNormalization": "layer"}


class FuseNormPass(GraphPass):
    """Normalize inside the linears, so that the normed rows are never written."""

    def rewrite(self, model: ir.Model) -> None:
        """Fuse each norm whose users are all linears that take it as their input."""
        for node in list(model.graph):
            if node.op_type not in _NORMS or node.domain:
                continue
            output = node.outputs[0]
            users = [use.node for use in output.uses()]
            reason = _reason(node, users)
            if reason is not None:
                self.refuse(reason, node)
                continue
            norm_bias = node.inputs[2] if len(node.inputs) > 2 else None
            for user in users:
                change_linear(
                    user,
                    user.outputs[0],
                    {"x": node.inputs[0], "norm_weight": node.inputs[1], "norm_bias": norm_bias},
                    norm=_NORMS[node.op_type],
                    epsilon=float(attribute(node, "epsilon", 1e-5)),
                )
            self.match()


def _reason(node: ir.Node, users: list[ir.Node]) -> str | None:
    """Why the norm must stay a node of its own; None if it need not."""
    output, weight = node.outputs[0], node.inputs[1]
    if output.is_graph_output() or not users:
        return "its output is an output of the graph"
    for user in users:
        if not is_linear(user):
            return f"{user.op_type} uses its output too"
        if user.inputs[0] is not output or any(value is output for value in list(user.inputs)[1:]):
            return "a linear uses its output as its residual"
        if linear_attributes(user).norm != "none":
            return "a linear has a norm already"
    last = (rank(output) or 0) - 1
    if attribute(node, "axis", -1) not in (-1, last):
        return "it is not over the last axis"
    if weight is None or not is_weight(weight, 1):
        return "its weight is not a constant vector"
    if len(node.inputs) > 2 and node.inputs[2] is not None and not is_weight(node.inputs[2], 1):
        return "its bias is not a constant vector"
    if len(node.outputs) > 1 and any(extra.uses() for extra in node.outputs[1:]):
        return "its mean or deviation is used"
    return None if output.shape is None or dims(weight) == (output.shape[-1],) else "its weight has another width"
