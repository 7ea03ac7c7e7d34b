"""A linear and the activation of its output become one linear."""

from __future__ import annotations

import onnx_ir as ir

from specexport.graph_passes.activations import activation_of, is_private
from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.linear import change_linear, is_linear, linear_attributes, linear_inputs


class FuseActivationPass(GraphPass):
    """Apply activations before the linear's output is written."""

    def rewrite(self, model: ir.Model) -> None:
        """Fuse each activation whose input is a linear that nothing else uses."""
        for node in list(model.graph):
            if node.graph is None or not node.outputs:
                continue
            found = activation_of(node.outputs[0])
            if found is None:
                continue
            activation, x, between = found
            linear = x.producer()
            if linear is None or not is_linear(linear):
                self.refuse("its input is not a linear", node)
            elif linear_attributes(linear).activation != "none" or linear_inputs(linear)["residual"] is not None:
                self.refuse("the linear has an activation or a residual already", node)
            elif not is_private(x, between):
                self.refuse("the linear's output is used without the activation too", node)
            else:
                change_linear(linear, node.outputs[0], activation=activation)
                self.match()
