"""A linear that gives q, k and v head by head becomes one that gives all of q, then all of k, then all of v."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.linear import is_linear, linear_attributes, linear_inputs, make_linear
from specexport.graph_passes.matching import (
    attribute,
    insert_before,
    only_user,
    producer,
    rank,
    replace,
    shaped,
    static,
)
from specexport.graph_passes.tensors import constant, data, dims, lazy


class SetHeadsApartPass(GraphPass):
    """Reorder the matrix's outputs (GPT-NeoX's order to the cache op's), exactly: whole rows move."""

    def rewrite(self, model: ir.Model) -> None:
        """Rewrite each linear -> [B, S, H, 3D] -> [B, H, S, 3D] -> three equal parts."""
        for node in list(model.graph):
            if node.op_type != "Split" or node.domain or len(node.outputs) != 3 or rank(node.outputs[0]) != 4:
                continue
            transpose = producer(node.inputs[0], "Transpose")
            reshape = None if transpose is None else producer(transpose.inputs[0], "Reshape")
            if transpose is None or reshape is None or attribute(node, "axis", 0) not in (-1, 3):
                continue
            product = reshape.inputs[0]
            linear = None if product is None else product.producer()
            if product is None or linear is None or not is_linear(linear):
                self.refuse("the heads are not those of a linear", node)
                continue
            heads = static(node.outputs[0], 1)
            widths = {static(output, 3) for output in node.outputs}
            width = widths.pop()
            inputs, attributes = linear_inputs(linear), linear_attributes(linear)
            if widths or width is None or heads is None or static(product, -1) != heads * 3 * width:
                self.refuse("q, k and v have different widths", node)
            elif list(attribute(transpose, "perm")) != [0, 2, 1, 3] or rank(product) != 3:
                self.refuse("the heads are not split off the last axis", node)
            elif only_user(product) is not reshape or only_user(reshape.outputs[0]) is not transpose:
                self.refuse("the product is used in its own order too", node)
            elif attributes.gated or inputs["residual"] is not None:
                self.refuse("the linear has a gate or a residual", node)
            else:
                self._rewrite(model.graph, node, linear, heads, width)
                self.match()

    def _rewrite(self, graph: ir.Graph, node: ir.Node, linear: ir.Node, heads: int, width: int) -> None:
        inputs = linear_inputs(linear)
        order = np.arange(heads * 3 * width).reshape(heads, 3, width).transpose(1, 0, 2).ravel()
        for name in ("weight", "scale", "minimum", "bias"):
            value = inputs[name]
            if value is not None:
                inputs[name] = _rows(graph, value, order, f"{heads}x3x{width}")
        flat = heads * width
        new = make_linear(inputs, linear_attributes(linear), linear.outputs[0].shape)
        sizes = constant(graph, f"split_{flat}_{flat}_{flat}", np.array([flat] * 3, np.int64))
        split = ir.Node("", "Split", [new.outputs[0], sizes], [ir.AttrInt64("axis", -1)], num_outputs=3)
        insert_before(node, new, split)
        shape = constant(graph, f"shape_0_0_{heads}_{width}", np.array([0, 0, heads, width], np.int64))
        for part, old in zip(split.outputs, node.outputs):
            part.shape, part.type = ir.Shape(["batch", "sequence", flat]), ir.TensorType(ir.DataType.FLOAT)
            apart = ir.Node("", "Reshape", [part, shape])
            transpose = ir.Node(
                "",
                "Transpose",
                [shaped(apart, ["batch", "sequence", heads, width])],
                [ir.AttrInt64s("perm", [0, 2, 1, 3])],
            )
            insert_before(node, apart, transpose)
            shaped(transpose, old.shape)
            replace(old, transpose.outputs[0])


def _rows(graph: ir.Graph, value: ir.Value, order: np.ndarray[tuple[int], np.dtype[np.int64]], tag: str) -> ir.Value:
    tensor = value.const_value
    assert tensor is not None
    return lazy(graph, f"{value.name}.heads_{tag}", tensor.dtype, dims(value), lambda: data(value)[order])
