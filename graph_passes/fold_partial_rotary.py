"""Concat(RotaryEmbedding(first R channels), the rest) becomes one partial RotaryEmbedding."""

from __future__ import annotations

import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.matching import (
    attribute,
    insert_before,
    integers,
    only_user,
    producer,
    rank,
    replace,
    shaped,
    static,
)


class FoldPartialRotaryPass(GraphPass):
    """Let the rotary op itself leave the channels beyond R alone."""

    def rewrite(self, model: ir.Model) -> None:
        """Fold every concatenation of a rotated and an untouched part of one tensor."""
        for node in list(model.graph):
            if node.op_type != "Concat" or node.domain or len(node.inputs) != 2:
                continue
            turned, rest = node.inputs
            rotary = producer(turned, "RotaryEmbedding")
            if rotary is None or turned is None or rest is None:
                continue
            width = static(turned, -1)
            if attribute(node, "axis") not in (-1, rank(turned)) and attribute(node, "axis") != (rank(turned) or 0) - 1:
                self.refuse("the parts are not joined along the channels", node)
                continue
            if only_user(turned) is not node:
                self.refuse("the rotated part is used elsewhere", node)
                continue
            source = _slice_of(rotary.inputs[0], 0, width)
            if source is None or width is None or source is not _slice_of(rest, width, static(node.outputs[0], -1)):
                self.refuse("the parts are not the first and the remaining channels of one tensor", node)
                continue
            new = ir.Node("", "RotaryEmbedding", [source, *rotary.inputs[1:]], rotary.attributes.values())
            new.attributes["rotary_embedding_dim"] = ir.AttrInt64("rotary_embedding_dim", width)
            insert_before(node, new)
            shaped(new, node.outputs[0].shape)
            replace(node.outputs[0], new.outputs[0])
            self.match()


def _slice_of(value: ir.Value | None, start: int, end: int | None) -> ir.Value | None:
    """The tensor whose last axis from ``start`` to ``end`` is ``value``."""
    node = None if value is None else value.producer()
    if node is None or node.domain or value is None:
        return None
    whole = node.inputs[0]
    assert whole is not None
    last = (rank(whole) or 0) - 1
    if node.op_type == "Slice":
        starts, ends, axes = (integers(v) for v in node.inputs[1:4])
        steps = integers(node.inputs[4]) if len(node.inputs) > 4 else [1]
        if starts is None or ends is None or axes is None or axes[0] not in (-1, last) or steps != [1]:
            return None
        length = static(whole, -1)
        if length is None or starts != [start]:
            return None
        return whole if min(ends[0], length) == end else None
    if node.op_type == "Split" and attribute(node, "axis", 0) in (-1, last):
        widths = [static(output, -1) for output in node.outputs]
        index = node.outputs.index(value)
        known = [width for width in widths[: index + 1] if width is not None]
        if len(known) == index + 1 and sum(known[:index]) == start and sum(known) == end:
            return whole
    return None
