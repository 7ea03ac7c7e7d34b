"""MatMul and Gemm with a constant matrix become specexport::QuantizedLinear."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.matching import (
    attribute,
    insert_before,
    is_weight,
    only_user,
    producer,
    rank,
    replace,
    shaped,
    static,
)
from specexport.graph_passes.plan import PassPlan
from specexport.graph_passes.tensors import Matrices, NamedWeight, data, dims, lazy, scheme_tag
from specexport.plugins.quantized_linear.format import QuantizationScheme
from specexport.plugins.quantized_linear.spec import INPUTS, SPEC, LinearAttributes

WeightInputs = tuple[ir.Value, "ir.Value | None", "ir.Value | None"]


def is_linear(node: ir.Node | None) -> bool:
    """Whether ``node`` is a QuantizedLinear of the portable form."""
    return node is not None and (node.domain, node.op_type) == (SPEC.domain, SPEC.name)


def linear_inputs(node: ir.Node) -> dict[str, ir.Value | None]:
    """A linear's inputs by name; those it lacks are None."""
    given = list(node.inputs) + [None] * (len(INPUTS) - len(node.inputs))
    return dict(zip(INPUTS, given))


def linear_attributes(node: ir.Node) -> LinearAttributes:
    """A linear's attributes."""
    return LinearAttributes.of({name: attribute(node, name) for name in node.attributes})


def make_linear(inputs: dict[str, ir.Value | None], attributes: LinearAttributes, shape: Any) -> ir.Node:
    """A new linear whose output has ``shape``."""
    values = [inputs.get(name) for name in INPUTS]
    while values[-1] is None:
        values.pop()
    made = [
        ir.AttrString(name, value)
        if isinstance(value, str)
        else ir.AttrFloat32(name, value)
        if isinstance(value, float)
        else ir.AttrInt64(name, int(value))
        for name, value in dataclasses.asdict(attributes).items()
    ]
    node = ir.Node(SPEC.domain, SPEC.name, values, made, version=SPEC.version)
    shaped(node, shape)
    return node


def change_linear(
    node: ir.Node, replaced: ir.Value, inputs: dict[str, ir.Value | None] | None = None, **attributes: Any
) -> ir.Node:
    """Put a changed copy of ``node`` in the place of the node that makes ``replaced``, and let it give ``replaced``."""
    new = make_linear(
        {**linear_inputs(node), **(inputs or {})},
        dataclasses.replace(linear_attributes(node), **attributes),
        replaced.shape,
    )
    anchor = replaced.producer()
    assert anchor is not None
    insert_before(anchor, new)
    replace(replaced, new.outputs[0])
    return new


class QuantizeLinearPass(GraphPass):
    """Turn every product with a constant matrix into the linear op, in the matrix's scheme.

    Matrices that are not quantized turn too, at 32 bits: our kernel's rows do not depend on each other, those of a
    library's matrix product do.
    """

    def __init__(self, plan: PassPlan, matrices: Matrices) -> None:
        super().__init__()
        self._plan, self._matrices = plan, matrices

    def rewrite(self, model: ir.Model) -> None:
        """Rewrite every MatMul and Gemm whose second operand is a constant matrix."""
        for node in list(model.graph):
            if node.domain or node.op_type not in ("MatMul", "Gemm"):
                continue
            x, weight = node.inputs[:2]
            assert x is not None and weight is not None
            matrix, transposed = _matrix(node, weight)
            if matrix is None:
                self.refuse("its second operand is not a constant matrix", node)
                continue
            if node.op_type == "Gemm" and (
                attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1 or attribute(node, "transA", 0)
            ):
                self.refuse("a Gemm with alpha, beta or a transposed first operand", node)
                continue
            self._replace(model.graph, node, x, matrix, transposed)
            self.match()
        if self.matched:
            model.opset_imports[SPEC.domain] = SPEC.version

    def _replace(self, graph: ir.Graph, node: ir.Node, x: ir.Value, matrix: ir.Value, transposed: bool) -> None:
        shape = dims(matrix)
        n, k = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
        scheme = self._scheme(matrix, (n, k))
        weight, scale, minimum = quantized_inputs(graph, self._matrices, matrix, transposed, scheme)
        attributes = LinearAttributes(
            bits=32 if scheme is None else scheme.bits,
            group_size=0 if scheme is None else scheme.group_size,
            activation_bits=32 if scheme is None else self._plan.activation_bits(str(matrix.name)),
            activation_group_size=self._plan.activation_group_size,
        )
        output, bias = node.outputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        source, output = _without_flattening(x, output)
        leading = list(source.shape)[:-1] if source.shape is not None else None
        if bias is not None and not (is_weight(bias, 1) and dims(bias) == (n,)):
            linear = make_linear(
                {"x": source, "weight": weight, "scale": scale, "minimum": minimum},
                attributes,
                None if leading is None else [*leading, n],
            )
            add = ir.Node("", "Add", [linear.outputs[0], bias])
            insert_before(node, linear, add)
            shaped(add, output.shape)
            replace(output, add.outputs[0])
            return
        linear = make_linear(
            {"x": source, "weight": weight, "scale": scale, "minimum": minimum, "bias": bias},
            attributes,
            output.shape if leading is None else [*leading, n],
        )
        insert_before(node, linear)
        replace(output, linear.outputs[0])

    def _scheme(self, matrix: ir.Value, shape: tuple[int, int]) -> QuantizationScheme | None:
        if not isinstance(matrix.const_value, NamedWeight):
            self.refuse("float32: the matrix is computed from others, not stored under a name", matrix)
            return None
        scheme = self._plan.scheme(str(matrix.name), shape)
        if scheme is None:
            return None
        k = shape[1]
        whole_groups = self._plan.activation_bits(str(matrix.name)) == 32 or not k % self._plan.activation_group_size
        if not scheme.fits(k) or not whole_groups:
            self.refuse(f"float32: {k} input channels are not a multiple of the group of {scheme.group_size}", matrix)
            return None
        return scheme


def quantized_inputs(
    graph: ir.Graph, matrices: Matrices, matrix: ir.Value, transposed: bool, scheme: QuantizationScheme | None
) -> WeightInputs:
    """The initializers weight, scale and minimum of ``matrix`` in ``scheme``, quantized when they are written."""
    shape, name = dims(matrix), str(matrix.name)
    n, k = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    if scheme is None:
        if not transposed:
            return matrix, None, None
        turned = lazy(graph, f"{name}.transposed", ir.DataType.FLOAT, (n, k), lambda: data(matrix).T)
        return turned, None, None
    base = f"{name}.{scheme_tag(scheme)}"
    groups = (n, k // scheme.group_size)

    def part(field: str) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = getattr(matrices.quantized(name, scheme, transposed), field)
        return array

    weight = lazy(
        graph,
        f"{base}.weight",
        ir.DataType.UINT8 if scheme.bits == 4 else ir.DataType.INT8,
        (n, k // 2 if scheme.bits == 4 else k),
        lambda: part("weight"),
    )
    scale = lazy(graph, f"{base}.scale", ir.DataType.FLOAT16, groups, lambda: part("scale"))
    if not scheme.has_minimum:
        return weight, scale, None
    return weight, scale, lazy(graph, f"{base}.minimum", ir.DataType.FLOAT16, groups, lambda: part("minimum"))


def _matrix(node: ir.Node, weight: ir.Value) -> tuple[ir.Value | None, bool]:
    """The stored matrix behind the second operand, and whether it is stored as [K, N]."""
    stored_kn = True
    if node.op_type == "Gemm" and attribute(node, "transB", 0):
        stored_kn = False
    transpose = producer(weight, "Transpose")
    if transpose is not None and list(attribute(transpose, "perm", [1, 0])) == [1, 0]:
        inner = transpose.inputs[0]
        assert inner is not None
        weight, stored_kn = inner, not stored_kn
    return (weight if is_weight(weight, 2) else None), stored_kn


def _without_flattening(x: ir.Value, output: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Bypass [B, S, K] -> [B*S, K] before and [B*S, N] -> [B, S, N] after the product; the op takes any rank."""
    before, after = producer(x, "Reshape"), only_user(output)
    if before is None or after is None or after.op_type != "Reshape" or after.domain:
        return x, output
    source, target = before.inputs[0], after.outputs[0]
    if source is None or rank(source) != 3 or rank(target) != 3 or rank(x) != 2:
        return x, output
    if static(source, -1) != static(x, -1) or static(target, -1) != static(output, -1):
        return x, output
    assert source.shape is not None and target.shape is not None
    if [str(d) for d in source.shape][:2] != [str(d) for d in target.shape][:2]:
        return x, output
    return source, target
