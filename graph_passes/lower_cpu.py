"""Portable ops become those of the CPU engine: weights in the kernel's own tile order."""

from __future__ import annotations

import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.linear import is_linear, linear_attributes, linear_inputs
from specexport.graph_passes.matching import attribute, insert_before, replace, shaped
from specexport.graph_passes.tensors import data, dims, lazy
from specexport.plugins.quantized_embedding.spec import SPEC as EMBEDDING
from specexport.plugins.quantized_linear.pack import pack, packed_nbytes
from specexport.plugins.quantized_linear.spec import SPEC as LINEAR

CPU_DOMAIN = "specexport.cpu"
CPU_VERSION = 1


class PackLinearsPass(GraphPass):
    """Lay out every linear's weights as its CPU kernel reads them."""

    def rewrite(self, model: ir.Model) -> None:
        """Lower every QuantizedLinear."""
        for node in list(model.graph):
            if not is_linear(node):
                continue
            inputs, attributes = linear_inputs(node), linear_attributes(node)
            weight = inputs["weight"]
            assert weight is not None
            n, k = _extents(weight, attributes.bits)
            packed = packed_weight(
                model.graph, inputs, n, k, attributes.bits, attributes.group_size, bool(attributes.gated)
            )
            values = [
                inputs["x"], packed, inputs["bias"], inputs["norm_weight"], inputs["norm_bias"], inputs["residual"]
            ]  # fmt: skip
            while values[-1] is None:
                values.pop()
            new = ir.Node(
                CPU_DOMAIN,
                LINEAR.name,
                values,
                [
                    *node.attributes.values(),
                    ir.AttrInt64("in_features", k),
                    ir.AttrInt64("out_features", n),
                    ir.AttrInt64("has_minimum", int(inputs["minimum"] is not None)),
                ],
                version=CPU_VERSION,
            )
            _swap(node, new)
            self.match()
        _import(model, self.matched)


class PackEmbeddingsPass(GraphPass):
    """Read token rows from packed weights; with a tied head, from the very tensor that the head reads."""

    def rewrite(self, model: ir.Model) -> None:
        """Lower every QuantizedEmbedding."""
        for node in list(model.graph):
            if (node.domain, node.op_type) != (EMBEDDING.domain, EMBEDDING.name):
                continue
            given = list(node.inputs) + [None] * (4 - len(node.inputs))
            inputs = dict(zip(("input_ids", "weight", "scale", "minimum"), given))
            weight, bits = inputs["weight"], int(attribute(node, "bits"))
            assert weight is not None
            n, k = _extents(weight, bits)
            packed = packed_weight(model.graph, inputs, n, k, bits, int(attribute(node, "group_size")), False)
            new = ir.Node(
                CPU_DOMAIN,
                EMBEDDING.name,
                [inputs["input_ids"], packed],
                [
                    *node.attributes.values(),
                    ir.AttrInt64("in_features", k),
                    ir.AttrInt64("out_features", n),
                    ir.AttrInt64("has_minimum", int(inputs["minimum"] is not None)),
                ],
                version=CPU_VERSION,
            )
            _swap(node, new)
            self.match()
        _import(model, self.matched)


def packed_weight(
    graph: ir.Graph, inputs: dict[str, ir.Value | None], n: int, k: int, bits: int, group_size: int, gated: bool
) -> ir.Value:
    """The packed initializer of a matrix, laid out when it is written."""
    weight, scale, minimum = (inputs[name] for name in ("weight", "scale", "minimum"))
    assert weight is not None
    has_minimum = minimum is not None
    return lazy(
        graph,
        f"{weight.name}.packed{'.gated' if gated else ''}",
        ir.DataType.UINT8,
        (packed_nbytes(n, k, bits, group_size, has_minimum, gated),),
        lambda: pack(
            data(weight),
            None if scale is None else data(scale),
            None if minimum is None else data(minimum),
            bits,
            group_size,
            gated,
        ),
    )


def _extents(weight: ir.Value, bits: int) -> tuple[int, int]:
    n, columns = dims(weight)
    return n, columns * 2 if bits == 4 else columns


def _swap(node: ir.Node, new: ir.Node) -> None:
    old = node.outputs[0]
    insert_before(node, new)
    shaped(new, old.shape)
    replace(old, new.outputs[0])


def _import(model: ir.Model, matched: int) -> None:
    if matched:
        model.opset_imports[CPU_DOMAIN] = CPU_VERSION
