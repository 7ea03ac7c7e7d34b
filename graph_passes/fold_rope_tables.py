"""RotaryEmbedding of gathered cosines becomes RotaryEmbedding of the whole tables and the position ids."""

from __future__ import annotations

import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.matching import attribute, insert_before, is_weight, producer, replace, shaped


class FoldRopeTablesPass(GraphPass):
    """Give every RotaryEmbedding the tables themselves, so that attention can take them over."""

    def rewrite(self, model: ir.Model) -> None:
        """Fold each rotary node whose cos and sin are rows of constant tables, by one set of position ids."""
        for node in list(model.graph):
            if node.op_type != "RotaryEmbedding" or node.domain or len(node.inputs) > 3:
                continue
            x, cos, sin = node.inputs[:3]
            gathers = [producer(cos, "Gather"), producer(sin, "Gather")]
            if gathers[0] is None or gathers[1] is None:
                self.refuse("its cosines and sines are computed, not gathered from tables", node)
                continue
            (cos_table, cos_ids), (sin_table, sin_ids) = (gather.inputs for gather in gathers if gather is not None)
            if not (is_weight(cos_table, 2) and is_weight(sin_table, 2)):
                self.refuse("its tables are not constants [positions, R/2]", node)
                continue
            if cos_ids is not sin_ids:
                self.refuse("cosines and sines are gathered by different positions", node)
                continue
            if any(gather is not None and attribute(gather, "axis", 0) != 0 for gather in gathers):
                self.refuse("its tables are not gathered by rows", node)
                continue
            new = ir.Node("", "RotaryEmbedding", [x, cos_table, sin_table, cos_ids], node.attributes.values())
            insert_before(node, new)
            shaped(new, node.outputs[0].shape)
            replace(node.outputs[0], new.outputs[0])
            self.match()
