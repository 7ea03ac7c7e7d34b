"""QuantizedLinear's ONNX function body: the specification that travels in the portable model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from specexport.plugins.quantized_linear.spec import ACTIVATION_LIMITS, INPUTS, OUTPUTS, SPEC, LinearAttributes

if TYPE_CHECKING:
    import onnx

OPSET = 23
_FLOAT, _INT32 = 1, 6


class BodyBuilder:
    """Collects the nodes of a function body; every call returns the name of its result."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []

    def op(self, op_type: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Add a node with one output, called ``name`` if given."""
        from onnx import helper

        output = name or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [output], **attributes))
        return output

    def number(self, value: float) -> str:
        """A float32 scalar."""
        return self.op("Constant", value_float=float(value))

    def integers(self, *values: int) -> str:
        """An int64 vector."""
        return self.op("Constant", value_ints=list(values))

    def function(self, name: str, domain: str, inputs: Collection[str], outputs: Collection[str],
                 attributes: Collection[str]) -> onnx.FunctionProto:  # fmt: skip
        """The collected nodes as a function."""
        from onnx import helper

        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_function(domain, name, list(inputs), list(outputs), self.nodes, opsets, list(attributes))


def function(attributes: Mapping[str, Any], present: Collection[str]) -> onnx.FunctionProto:
    """The body for these attributes when the inputs ``present`` (names of `spec.INPUTS`) are there."""
    a = LinearAttributes.of(attributes)
    b = BodyBuilder()
    x = _norm(b, a, present)
    if a.activation_bits != 32:
        x = _quantized_activations(b, a, x)
    weight = dequantized_weight(b, a.bits, a.group_size, {name: name for name in present})
    y = b.op("MatMul", x, b.op("Transpose", weight, perm=[1, 0]))
    if "bias" in present:
        y = b.op("Add", y, "bias")
    if a.gated:
        gate, up = f"{y}_gate", f"{y}_up"
        from onnx import helper

        b.nodes.append(helper.make_node("Split", [y], [gate, up], axis=-1, num_outputs=2))
        y = b.op("Mul", _activate(b, a.activation, gate), up)
    else:
        y = _activate(b, a.activation, y)
    if "residual" in present:
        y = b.op("Add", y, "residual")
    b.op("Identity", y, name=OUTPUTS[0])
    return b.function(SPEC.name, SPEC.domain, INPUTS, OUTPUTS, sorted(attributes))


def dequantized_weight(b: BodyBuilder, bits: int, group_size: int, values: Mapping[str, str]) -> str:
    """Float32 ``[N, K]``; ``values`` says what weight, scale and minimum (where there is one) are called."""
    if bits == 32:
        return values["weight"]
    q = b.op("Cast", values["weight"], to=_INT32)
    scale = b.op("Cast", values["scale"], to=_FLOAT)
    last = b.integers(-1)
    # Sizes are spelled out, for 0 rows leave nothing to infer them from.
    rows, groups, size = b.op("Shape", q, start=0, end=1), b.op("Shape", scale, start=1), b.integers(group_size)
    if bits == 4:
        # Columns 2 c and 2 c + 1 are the nibbles of byte c.
        sixteen = b.op("Cast", b.integers(16), to=_INT32)
        low, high = b.op("Mod", q, sixteen), b.op("Div", q, sixteen)
        q = b.op("Concat", b.op("Unsqueeze", low, last), b.op("Unsqueeze", high, last), axis=-1)
    grouped = b.op("Concat", rows, groups, size, axis=0)
    w = b.op("Cast", b.op("Reshape", q, grouped, allowzero=1), to=_FLOAT)
    if bits == 4 and "minimum" not in values:
        w = b.op("Sub", w, b.number(8))
    w = b.op("Mul", w, b.op("Unsqueeze", scale, last))
    if "minimum" in values:
        w = b.op("Add", w, b.op("Unsqueeze", b.op("Cast", values["minimum"], to=_FLOAT), last))
    return b.op("Reshape", w, b.op("Concat", rows, b.op("Mul", groups, size), axis=0), allowzero=1)


def _norm(b: BodyBuilder, a: LinearAttributes, present: Collection[str]) -> str:
    if a.norm == "none":
        return "x"
    axis = b.integers(-1)
    x = "x"
    if a.norm == "layer":
        x = b.op("Sub", x, b.op("ReduceMean", x, axis, keepdims=1))
    variance = b.op("ReduceMean", b.op("Mul", x, x), axis, keepdims=1)
    x = b.op("Div", x, b.op("Sqrt", b.op("Add", variance, b.number(a.epsilon))))
    if "norm_weight" in present:
        x = b.op("Mul", x, "norm_weight")
    if "norm_bias" in present:
        x = b.op("Add", x, "norm_bias")
    return x


def _quantized_activations(b: BodyBuilder, a: LinearAttributes, x: str) -> str:
    """X after quantizing groups of it and back."""
    limit = b.number(ACTIVATION_LIMITS[a.activation_bits])
    shape = b.op("Shape", x)
    lead = b.op("Shape", x, start=0, end=-1)
    size = b.integers(a.activation_group_size)
    count = b.op("Div", b.op("Shape", x, start=-1), size)
    # allowzero: no row at all is no error.
    groups = b.op("Reshape", x, b.op("Concat", lead, count, size, axis=0), allowzero=1)
    amax = b.op("ReduceMax", b.op("Abs", groups), b.integers(-1), keepdims=1)
    scale = b.op("Div", amax, limit)
    zero = b.number(0)
    inverse = b.op("Where", b.op("Greater", scale, zero), b.op("Div", b.number(1), scale), zero)
    q = b.op("Round", b.op("Mul", groups, inverse))
    # A comparison with NaN is false: an integer is 0 where it is undefined, and the scale carries the NaN on. Runtimes
    # may drop a NaN in ReduceMax; adding 0 x brings it back.
    q = b.op("Where", b.op("LessOrEqual", b.op("Abs", q), limit), q, zero)
    invalid = b.op("ReduceSum", b.op("Mul", groups, zero), b.integers(-1), keepdims=1)
    return b.op("Reshape", b.op("Mul", q, b.op("Add", scale, invalid)), shape, allowzero=1)


def _activate(b: BodyBuilder, activation: str, v: str) -> str:
    if activation == "silu":
        return b.op("Mul", v, b.op("Sigmoid", v))
    if activation == "relu":
        return b.op("Relu", v)
    if activation in ("gelu", "gelu_tanh"):
        # Spelled out: not every runtime has Gelu, and onnx's reference evaluator cannot expand it inside a function.
        half = b.op("Mul", v, b.number(0.5))
        if activation == "gelu":
            inner = b.op("Erf", b.op("Mul", v, b.number(math.sqrt(0.5))))
        else:
            cubic = b.op("Mul", b.op("Mul", b.op("Mul", v, v), v), b.number(0.044715))
            inner = b.op("Tanh", b.op("Mul", b.op("Add", v, cubic), b.number(math.sqrt(2 / math.pi))))
        return b.op("Mul", half, b.op("Add", inner, b.number(1)))
    return v
