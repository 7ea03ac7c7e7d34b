"""Norm, flatten, gather rows, output head becomes flatten, gather rows, norm, output head."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.matching import (
    insert_before,
    only_user,
    producer,
    rank,
    replace,
    shaped,
    static,
    unwrapped,
)
from specexport.graph_passes.tensors import constant

_ROWWISE = ("RMSNormalization", "LayerNormalization")


class GatherLogitsRowsPass(GraphPass):
    """Take the wanted rows before the final norm, so that the norm runs for them only and can join the head."""

    def rewrite(self, model: ir.Model) -> None:
        """Rewrite the one gather whose indices are the graph's logits_rows."""
        rows = next((value for value in model.graph.inputs if value.name == "logits_rows"), None)
        for node in list(model.graph):
            if rows is None or node.op_type != "Gather" or node.domain or unwrapped_rows(node.inputs[1]) is not rows:
                continue
            flat = producer(node.inputs[0], "Reshape")
            if flat is None:
                self.refuse("what is gathered is not a flattened tensor", node)
                continue
            source = flat.inputs[0]
            assert source is not None
            norm = source.producer()
            if norm is None or norm.domain or norm.op_type not in _ROWWISE:
                self.refuse("no norm stands before the gathered rows", node)
                continue
            if only_user(source) is not flat or only_user(flat.outputs[0]) is not node:
                self.refuse("the norm of all rows is used elsewhere", node)
                continue
            hidden, width = norm.inputs[0], static(source, -1)
            if hidden is None or width is None or rank(source) != 3:
                self.refuse("the hidden states are not [batch, sequence, hidden]", node)
                continue
            shape = constant(model.graph, f"rows_of_{width}", np.array([-1, width], np.int64))
            flatten = ir.Node("", "Reshape", [hidden, shape])
            flattened = shaped(flatten, ["batch*sequence", width])
            gather = ir.Node("", "Gather", [flattened, rows], [ir.AttrInt64("axis", 0)])
            gathered = shaped(gather, ["rows", width])
            normed = ir.Node("", norm.op_type, [gathered, *norm.inputs[1:]], norm.attributes.values())
            insert_before(node, flatten, gather, normed)
            shaped(normed, ["rows", width])
            replace(node.outputs[0], normed.outputs[0])
            self.match()


def unwrapped_rows(value: ir.Value | None) -> ir.Value | None:
    """``value`` before casts and a Reshape to one axis."""
    value = unwrapped(value)
    reshape = producer(value, "Reshape")
    return unwrapped(reshape.inputs[0]) if reshape is not None else value
