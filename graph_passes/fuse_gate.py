"""act(gate(x)) * up(x) becomes one gated linear of the two stacked matrices."""

from __future__ import annotations

import onnx_ir as ir

from specexport.graph_passes.activations import activation_of, is_private
from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.linear import change_linear, is_linear, linear_attributes, linear_inputs
from specexport.graph_passes.matching import integers, only_user, static
from specexport.graph_passes.merge_linears import cannot_stack, stack_inputs


class FuseGatePass(GraphPass):
    """Compute gate and up in one pass over their weights, and multiply before anything is written."""

    def rewrite(self, model: ir.Model) -> None:
        """Fuse each product of an activated linear and another of the same input, or of two halves of one."""
        for node in list(model.graph):
            if node.op_type != "Mul" or node.domain or activation_of(node.outputs[0]) is not None:
                continue
            for activated, up in (node.inputs, tuple(node.inputs)[::-1]):
                found = activation_of(activated)
                if found is None or up is None or activated is None:
                    continue
                activation, gate, between = found
                if self._fuse(model.graph, node, activation, gate, up, [*between, node]):
                    self.match()
                break

    def _fuse(
        self, graph: ir.Graph, node: ir.Node, activation: str, gate: ir.Value, up: ir.Value, users: list[ir.Node]
    ) -> bool:
        if not is_private(gate, users) or only_user(up) is not node:
            self.refuse("the gate or the other factor is used elsewhere", node)
            return False
        gate_node, up_node = gate.producer(), up.producer()
        whole = _halves_of(gate, up)
        if whole is not None:
            linear = whole.producer()
            if linear is None or not is_linear(linear) or not _is_plain(linear):
                self.refuse("the halves are not those of a linear without activation and residual", node)
                return False
            if not all(use.node in (gate_node, up_node) for use in whole.uses()):
                self.refuse("the product of both matrices is used elsewhere", node)
                return False
            change_linear(linear, node.outputs[0], activation=activation, gated=1)
            return True
        if gate_node is None or up_node is None or not (is_linear(gate_node) and is_linear(up_node)):
            self.refuse("its factors are not linears", node)
            return False
        reason = cannot_stack([gate_node, up_node])
        if reason is None and static(gate, -1) != static(up, -1):
            reason = "gate and up have different widths"
        if reason is not None:
            self.refuse(reason, node)
            return False
        stacked = stack_inputs(graph, [gate_node, up_node])
        change_linear(gate_node, node.outputs[0], stacked, activation=activation, gated=1)
        return True


def _is_plain(linear: ir.Node) -> bool:
    attributes = linear_attributes(linear)
    return not attributes.gated and attributes.activation == "none" and linear_inputs(linear)["residual"] is None


def _halves_of(first: ir.Value, second: ir.Value) -> ir.Value | None:
    """The tensor whose last axis ``first`` and ``second`` are the two halves of, in this order."""
    nodes = [first.producer(), second.producer()]
    one, other = nodes
    if one is None or other is None or one.inputs[0] is None or one.inputs[0] is not other.inputs[0]:
        return None
    whole = one.inputs[0]
    width, half = static(whole, -1), static(first, -1)
    if width is None or half is None or half * 2 != width or static(second, -1) != half:
        return None
    if one.op_type == "Split" and one is other and list(one.outputs) == [first, second]:
        return whole
    if one.op_type == "Slice" and other.op_type == "Slice":
        starts = [integers(node.inputs[1]) for node in (one, other)]
        steps = [integers(node.inputs[4]) if len(node.inputs) > 4 else [1] for node in (one, other)]
        return whole if starts == [[0], [half]] and steps == [[1], [1]] else None
    return None
