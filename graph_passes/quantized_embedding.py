"""Gather of a token's row from a constant matrix becomes specexport::QuantizedEmbedding."""

from __future__ import annotations

import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.linear import quantized_inputs
from specexport.graph_passes.matching import attribute, insert_before, is_weight, replace, shaped
from specexport.graph_passes.plan import PassPlan
from specexport.graph_passes.tensors import Matrices, NamedWeight, dims
from specexport.plugins.quantized_embedding.spec import SPEC


class QuantizeEmbeddingPass(GraphPass):
    """Read token embeddings from quantized rows; a tied output head uses the very same tensors."""

    def __init__(self, plan: PassPlan, matrices: Matrices) -> None:
        super().__init__()
        self._plan, self._matrices = plan, matrices

    def rewrite(self, model: ir.Model) -> None:
        """Rewrite the gathers whose indices are the graph's input_ids."""
        ids = next((value for value in model.graph.inputs if value.name == "input_ids"), None)
        for node in list(model.graph):
            if node.op_type != "Gather" or node.domain or ids is None or node.inputs[1] is not ids:
                continue
            table = node.inputs[0]
            if table is None or not is_weight(table, 2) or attribute(node, "axis", 0) != 0:
                self.refuse("tokens are not looked up as rows of a constant matrix", node)
                continue
            n, k = dims(table)
            named = isinstance(table.const_value, NamedWeight)
            scheme = self._plan.scheme(str(table.name), (n, k)) if named else None
            if scheme is not None and not scheme.fits(k):
                self.refuse(f"float32: {k} channels are not a multiple of the group of {scheme.group_size}", table)
                scheme = None
            weights = quantized_inputs(model.graph, self._matrices, table, False, scheme)
            inputs: list[ir.Value | None] = [ids, *weights]
            while inputs[-1] is None:
                inputs.pop()
            new = ir.Node(
                SPEC.domain,
                SPEC.name,
                inputs,
                [
                    ir.AttrInt64("bits", 32 if scheme is None else scheme.bits),
                    ir.AttrInt64("group_size", 0 if scheme is None else scheme.group_size),
                ],
                version=SPEC.version,
            )
            insert_before(node, new)
            shaped(new, node.outputs[0].shape)
            replace(node.outputs[0], new.outputs[0])
            model.opset_imports[SPEC.domain] = SPEC.version
            self.match()
