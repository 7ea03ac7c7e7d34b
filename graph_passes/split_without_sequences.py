"""SplitToSequence and SequenceAt become one Split."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.matching import attribute, insert_before, integers, replace, scalar, static
from specexport.graph_passes.tensors import constant


class SplitWithoutSequencesPass(GraphPass):
    """Name the parts of a split tensor directly, so that later passes see which part is used where."""

    def rewrite(self, model: ir.Model) -> None:
        """Rewrite each split whose parts are all taken by constant index."""
        for node in list(model.graph):
            if node.op_type != "SplitToSequence" or node.domain:
                continue
            whole, split = node.inputs
            assert whole is not None
            axis = int(attribute(node, "axis", 0))
            extent, sizes = static(whole, axis), integers(split)
            if extent is None or sizes is None:
                self.refuse("the extent or the sizes of the parts are not constants", node)
                continue
            if len(sizes) == 1:
                sizes = [min(sizes[0], extent - start) for start in range(0, extent, sizes[0])]
            takers = [use.node for use in node.outputs[0].uses()]
            indices = [scalar(taker.inputs[1]) if taker.op_type == "SequenceAt" else None for taker in takers]
            if any(index is None for index in indices):
                self.refuse("its parts are not taken one by one with constant indices", node)
                continue
            name = "split_" + "_".join(map(str, sizes))
            sizes_value = constant(model.graph, name, np.array(sizes, np.int64))
            new = ir.Node("", "Split", [whole, sizes_value], [ir.AttrInt64("axis", axis)], num_outputs=len(sizes))
            insert_before(node, new)
            for number, output in enumerate(new.outputs):
                output.name = f"{whole.name}_part_{number}"
            for taker, index in zip(takers, indices):
                assert index is not None
                part = new.outputs[int(index) % len(sizes)]
                part.shape, part.type = taker.outputs[0].shape, ir.TensorType(ir.DataType.FLOAT)
                replace(taker.outputs[0], part)
            self.match()
