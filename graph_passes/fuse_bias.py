"""A linear and the addition of a constant vector become one linear with a bias."""

from __future__ import annotations

import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.linear import change_linear, is_linear, linear_attributes, linear_inputs
from specexport.graph_passes.matching import is_weight, only_user, static
from specexport.graph_passes.tensors import dims


class FuseBiasPass(GraphPass):
    """Add biases inside the linear op."""

    def rewrite(self, model: ir.Model) -> None:
        """Fuse each addition of a vector over the linear's outputs."""
        for node in list(model.graph):
            if node.op_type != "Add" or node.domain:
                continue
            for product, bias in (node.inputs, tuple(node.inputs)[::-1]):
                linear = None if product is None else product.producer()
                if linear is None or not is_linear(linear) or not is_weight(bias, 1):
                    continue
                assert bias is not None and product is not None
                attributes, inputs = linear_attributes(linear), linear_inputs(linear)
                if dims(bias) != (static(product, -1),):
                    self.refuse("the vector is not one number for each output", node)
                elif inputs["bias"] is not None or inputs["residual"] is not None or attributes.activation != "none":
                    self.refuse("the linear has a bias, an activation or a residual already", node)
                elif only_user(product) is not node:
                    self.refuse("the product without its bias is used elsewhere", node)
                else:
                    change_linear(linear, node.outputs[0], {"bias": bias})
                    self.match()
                break
