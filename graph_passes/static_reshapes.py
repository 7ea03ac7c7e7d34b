"""Reshapes to a shape computed from other shapes become reshapes to a constant."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.matching import insert_before, replace, shaped, small_constant
from specexport.graph_passes.tensors import constant


class StaticReshapesPass(GraphPass):
    """Write 0 for an axis that stays and -1 for the one that is unknown, so that no shape is computed at run time."""

    def rewrite(self, model: ir.Model) -> None:
        """Rewrite each reshape whose target is computed, if the shapes known before and after say what it is."""
        for node in list(model.graph):
            if node.op_type != "Reshape" or node.domain or small_constant(node.inputs[1]) is not None:
                continue
            source, output = node.inputs[0], node.outputs[0]
            if source is None or source.shape is None or output.shape is None:
                self.refuse("a shape is not known", node)
                continue
            target = _target(source.shape, output.shape)
            if target is None:
                self.refuse("more than one axis is neither a number nor one that stays", node)
                continue
            name = "shape_" + "_".join(map(str, target))
            shape = constant(model.graph, name, np.array(target, np.int64))
            new = ir.Node("", "Reshape", [source, shape])
            insert_before(node, new)
            shaped(new, output.shape, output.dtype or ir.DataType.FLOAT)
            replace(output, new.outputs[0])
            self.match()


def _target(before: ir.Shape, after: ir.Shape) -> list[int] | None:
    target = [
        dim if isinstance(dim, int) else 0 if axis < len(before) and str(before[axis]) == str(dim) else -1
        for axis, dim in enumerate(after)
    ]
    return target if target.count(-1) <= 1 else None
