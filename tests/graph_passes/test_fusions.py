"""Fusions into the linear op: bias, side by side, gate, activation, norm, residual."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
from graph_text import changes_nothing_but_nodes, floats, graph, refusals

from specexport.graph_passes.fuse_activation import FuseActivationPass
from specexport.graph_passes.fuse_bias import FuseBiasPass
from specexport.graph_passes.fuse_gate import FuseGatePass
from specexport.graph_passes.fuse_norm import FuseNormPass
from specexport.graph_passes.fuse_residual import FuseResidualPass
from specexport.graph_passes.infrastructure import run_passes
from specexport.graph_passes.linear import QuantizeLinearPass
from specexport.graph_passes.merge_linears import MergeLinearsPass
from specexport.graph_passes.plan import PassPlan
from specexport.graph_passes.tensors import Matrices
from specexport.plugins.quantized_linear.format import QuantizationScheme

X = floats(2, 3, 32)


def linears(text: str, quantize: str = "", **weights: Any) -> ir.Model:
    """The graph with its products turned into linears; the matrices named in ``quantize`` at 8 bits."""
    model = graph(text, **weights)
    source = model.meta["weights"]
    plan = PassPlan(
        weights=source,
        scheme=lambda name, shape: QuantizationScheme(8, 32, False) if name in quantize.split(",") else None,
    )
    (record,) = run_passes(model, [QuantizeLinearPass(plan, Matrices(source))])
    assert record.matched > 0
    return model


BIAS = "g (float[2,3,32] x, float[32,64] w, float[64] v) => (float[2,3,64] y) { p = MatMul(x, w) y = Add(p, v) }"


@pytest.mark.parametrize("order", ["Add(p, v)", "Add(v, p)"])
def test_a_bias_joins_its_linear(order: str) -> None:
    model = linears(BIAS.replace("Add(p, v)", order), w=(32, 64), v=(64,))
    assert changes_nothing_but_nodes(FuseBiasPass(), model, x=X) == ["QuantizedLinear"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([("[64] v", "[1] v")], "not one number for each output"),
        ([("y = Add(p, v) }", "y = Add(p, v) z = Neg(p) }"), ("64] y)", "64] y, float[2,3,64] z)")], "used elsewhere"),
        ([("p = MatMul(x, w)", "f = MatMul(x, w) p = Add(f, v)")], None),
    ],
)
def test_other_additions_of_vectors_stay(changes: list[tuple[str, str]], reason: str | None) -> None:
    text = BIAS
    for change in changes:
        text = text.replace(*change)
    model = linears(text, w=(32, 64), v=(1,) if "[1] v" in text else (64,))
    if reason is None:  # two biases: the first joins, the second is refused
        (record,) = run_passes(model, [FuseBiasPass()])
        assert record.matched == 1
        assert "bias, an activation or a residual already" in record.refused[0].reason
    else:
        (found,) = refusals(FuseBiasPass(), model)
        assert reason in found


QKV = """g (float[2,3,32] x, float[2,3,32] other, float[32,32] a, float[32,64] b, float[64] v) => (float[2,3,96] y) {
    p = MatMul(x, a)
    f = MatMul(x, b)
    q = Add(f, v)
    y = Concat<axis: int = -1>(p, q)
}"""
QKV_WEIGHTS = {"a": (32, 32), "b": (32, 64), "v": (64,)}


@pytest.mark.parametrize("quantize", ["", "a,b"])
def test_linears_side_by_side_become_one(quantize: str) -> None:
    model = linears(QKV, quantize, **QKV_WEIGHTS)
    run_passes(model, [FuseBiasPass()])
    assert changes_nothing_but_nodes(MergeLinearsPass(), model, x=X, other=X) == ["QuantizedLinear"]


@pytest.mark.parametrize(
    ("changes", "quantize", "reason"),
    [
        ([("f = MatMul(x, b)", "f = MatMul(other, b)")], "", "they have different inputs"),
        ([], "a", "their matrices have different schemes"),
        ([("y = Concat<axis: int = -1>(p, q)", "y = Concat<axis: int = -1>(p, q) z = Neg(p)")], "", "used elsewhere"),
        ([("(p, q)", "(p, q, x)"), ("[2,3,96]", "[2,3,128]")], "", "not every part is a linear"),
        ([("(p, q)", "(p, p)"), ("[2,3,96]", "[2,3,64]")], "", "one linear stands twice"),
        (
            [("[32,64] b", "[32,32] b"), ("[64] v", "[32] v"), ("axis: int = -1", "axis: int = 1"), ("3,96]", "6,32]")],
            "",
            "not joined along the channels",
        ),
    ],
)
def test_other_linears_side_by_side_stay(changes: list[tuple[str, str]], quantize: str, reason: str) -> None:
    text = QKV
    for change in changes:
        text = text.replace(*change)
    if "Neg" in text:
        text = text.replace("96] y)", "96] y, float[2,3,32] z)")
    weights = QKV_WEIGHTS if "[32,64] b" in text else {"a": (32, 32), "b": (32, 32), "v": (32,)}
    model = linears(text, quantize, **weights)
    run_passes(model, [FuseBiasPass()])
    (found,) = refusals(MergeLinearsPass(), model)
    assert reason in found


GATE = """g (float[2,3,32] x, float[2,3,32] other, float[32,64] a, float[32,64] b) => (float[2,3,64] y) {
    g = MatMul(x, a)
    u = MatMul(x, b)
    s = Sigmoid(g)
    act = Mul(g, s)
    y = Mul(act, u)
}"""
GATE_WEIGHTS = {"a": (32, 64), "b": (32, 64)}
HALVES = """g (float[2,3,32] x, float[32,128] a) => (float[2,3,64] y) {
    both = MatMul(x, a)
    sizes = Constant<value_ints: ints = [64, 64]>()
    g, u = Split<axis: int = -1>(both, sizes)
    s = Sigmoid(g)
    act = Mul(g, s)
    y = Mul(u, act)
}"""


@pytest.mark.parametrize("act", ["Mul(g, s)", "Mul(s, g)", "Relu(g)", "Gelu(g)", 'Gelu<approximate = "tanh">(g)'])
def test_gate_and_up_become_one_gated_linear(act: str) -> None:
    model = linears(GATE.replace("Mul(g, s)", act), **GATE_WEIGHTS)
    after = changes_nothing_but_nodes(FuseGatePass(), model, x=X, other=X)
    assert [op for op in after if op != "Sigmoid"] == ["QuantizedLinear"]


def test_two_halves_of_one_linear_become_a_gated_linear() -> None:
    model = linears(HALVES, a=(32, 128))
    assert "QuantizedLinear" in (after := changes_nothing_but_nodes(FuseGatePass(), model, x=X))
    assert not {"Split", "Mul", "Sigmoid"} & set(after)


@pytest.mark.parametrize(
    ("text", "changes", "quantize", "reason"),
    [
        (GATE, [("u = MatMul(x, b)", "u = MatMul(other, b)")], "", "they have different inputs"),
        (GATE, [], "b", "their matrices have different schemes"),
        (GATE, [("y = Mul(act, u)", "y = Mul(act, u) z = Neg(g)")], "", "used elsewhere"),
        (GATE, [("y = Mul(act, u)", "y = Mul(act, u) z = Neg(u)")], "", "used elsewhere"),
        (GATE, [("u = MatMul(x, b)", "f = MatMul(x, b) u = Neg(f)")], "", "its factors are not linears"),
        (HALVES, [("both = MatMul(x, a)", "f = MatMul(x, a) both = Neg(f)")], "", "the halves are not those"),
        (HALVES, [("y = Mul(u, act)", "y = Mul(u, act) z = Neg(both)")], "", "both matrices is used elsewhere"),
    ],
)
def test_other_products_of_activations_stay(
    text: str, changes: list[tuple[str, str]], quantize: str, reason: str
) -> None:
    for change in changes:
        text = text.replace(*change)
    if " z = Neg" in text:
        width = 128 if "both)" in text.split("z = Neg(")[1][:6] else 64
        text = text.replace("64] y)", f"64] y, float[2,3,{width}] z)")
    weights = GATE_WEIGHTS if "float[32,64] b" in text else {"a": (32, 128)}
    (found,) = refusals(FuseGatePass(), linears(text, quantize, **weights))
    assert reason in found


def test_the_second_half_as_gate_stays() -> None:
    text = HALVES.replace("g, u = Split", "u, g = Split")
    assert refusals(FuseGatePass(), linears(text, a=(32, 128))) == ["its factors are not linears"]


ACTIVATION = "g (float[2,3,32] x, float[32,64] a) => (float[2,3,64] y) { p = MatMul(x, a) y = Relu(p) }"
TANH = """p = MatMul(x, a)
    three = Constant<value_float: float = 3.0>()
    cube = Pow(p, three)
    c1 = Constant<value_float: float = 0.044715>()
    small = Mul(cube, c1)
    sum = Add(p, small)
    c2 = Constant<value_float: float = 0.7978845608>()
    scaled = Mul(sum, c2)
    t = Tanh(scaled)
    one = Constant<value_float: float = 1.0>()
    plus = Add(t, one)
    half = Constant<value_float: float = 0.5>()
    halved = Mul(p, half)
    y = Mul(halved, plus)"""


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("p = MatMul(x, a) y = Relu(p)", "relu"),
        ("p = MatMul(x, a) y = Gelu(p)", "gelu"),
        ("p = MatMul(x, a) s = Sigmoid(p) y = Mul(s, p)", "silu"),
        (TANH, "gelu_tanh"),
    ],
)
def test_activations_join_their_linear(spelling: str, name: str) -> None:
    model = linears(ACTIVATION.replace("p = MatMul(x, a) y = Relu(p)", spelling), a=(32, 64))
    after = changes_nothing_but_nodes(FuseActivationPass(), model, x=X)
    assert [op for op in after if op != "Constant"] == ["QuantizedLinear"]
    (linear,) = (node for node in model.graph if node.op_type == "QuantizedLinear")
    assert linear.attributes["activation"].as_string() == name


@pytest.mark.parametrize(
    ("spelling", "reasons"),
    [
        ("p = MatMul(x, a) y = Relu(p) z = Neg(p)", ["the linear's output is used without the activation too"]),
        ("f = MatMul(x, a) p = Neg(f) y = Relu(p)", ["its input is not a linear"]),
        (TANH.replace("0.044715", "0.05"), []),
        (TANH.replace("float = 3.0", "float = 2.0"), []),
        (TANH.replace("float = 0.5", "float = 0.6"), []),
        (TANH.replace("float = 0.7978845608", "float = 0.8"), []),
        (TANH.replace("Add(p, small)", "Add(cube, small)"), []),
    ],
)
def test_other_activations_stay(spelling: str, reasons: list[str]) -> None:
    text = ACTIVATION.replace("p = MatMul(x, a) y = Relu(p)", spelling)
    if "z = Neg" in text:
        text = text.replace("64] y)", "64] y, float[2,3,64] z)")
    assert refusals(FuseActivationPass(), linears(text, a=(32, 64))) == reasons


def test_a_second_activation_stays() -> None:
    model = linears(ACTIVATION.replace("y = Relu(p)", "r = Relu(p) y = Gelu(r)"), a=(32, 64))
    (record,) = run_passes(model, [FuseActivationPass()])
    assert record.matched == 1
    assert "has an activation or a residual already" in record.refused[0].reason


NORM = """g (float[2,3,32] x, float[32] w, float[32] v, float[32,64] a, float[32,32] b)
    => (float[2,3,64] y, float[2,3,32] z) {
    n = RMSNormalization<epsilon: float = 0.01>(x, w)
    y = MatMul(n, a)
    z = MatMul(n, b)
}"""
NORM_WEIGHTS = {"w": (32,), "v": (32,), "a": (32, 64), "b": (32, 32)}


@pytest.mark.parametrize(
    "norm", ["RMSNormalization<epsilon: float = 0.01>(x, w)", "LayerNormalization(x, w, v)", "LayerNormalization(x, w)"]
)
def test_a_norm_before_linears_becomes_their_prologue(norm: str) -> None:
    text = NORM.replace("RMSNormalization<epsilon: float = 0.01>(x, w)", norm)
    model = linears(text, **NORM_WEIGHTS)
    assert changes_nothing_but_nodes(FuseNormPass(), model, x=X) == ["QuantizedLinear", "QuantizedLinear"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([("z = MatMul(n, b)", "z = Neg(n)")], "Neg uses its output too"),
        ([("z = MatMul(n, b)", "z = Identity(n)")], "Identity uses its output too"),
        ([("n = RMSNormalization<epsilon: float = 0.01>", "n = RMSNormalization<axis: int = 1>")], "not over the last"),
        ([("(x, w)", "(x, x)")], "its weight is not a constant vector"),
        ([("RMSNormalization<epsilon: float = 0.01>(x, w)", "LayerNormalization(x, w, x)")], "its bias is not"),
    ],
)
def test_other_norms_stay(changes: list[tuple[str, str]], reason: str) -> None:
    text = NORM
    for change in changes:
        text = text.replace(*change)
    model = linears(text, **NORM_WEIGHTS)
    (found,) = refusals(FuseNormPass(), model)
    assert reason in found


def test_a_norm_that_is_also_the_residual_stays() -> None:
    text = NORM.replace("z = MatMul(n, b)", "f = MatMul(n, b) z = Add(f, n)")
    model = linears(text, **NORM_WEIGHTS)
    run_passes(model, [FuseResidualPass()])
    assert refusals(FuseNormPass(), model) == ["a linear uses its output as its residual"]


def test_a_second_norm_stays() -> None:
    model = linears(
        NORM.replace("n = RMS", "m = RMSNormalization(x, v) n = RMS").replace("(x, w)", "(m, w)"), **NORM_WEIGHTS
    )
    run_passes(model, [FuseNormPass()])
    assert refusals(FuseNormPass(), model) == ["a linear has a norm already"]


RESIDUAL = "g (float[2,3,32] x, float[32,32] a, float[32,32] b) => (float[2,3,32] y) { p = MatMul(x, a) y = Add(x, p) }"
SQUARE = {"a": (32, 32), "b": (32, 32)}


@pytest.mark.parametrize("order", ["Add(x, p)", "Add(p, x)"])
def test_the_residual_stream_joins_the_linear(order: str) -> None:
    model = linears(RESIDUAL.replace("Add(x, p)", order), **SQUARE)
    assert changes_nothing_but_nodes(FuseResidualPass(), model, x=X) == ["QuantizedLinear"]


def test_of_two_linears_the_later_takes_the_earlier() -> None:
    model = linears(RESIDUAL.replace("y = Add(x, p)", "q = MatMul(x, b) y = Add(q, p)"), **SQUARE)
    assert changes_nothing_but_nodes(FuseResidualPass(), model, x=X) == ["QuantizedLinear", "QuantizedLinear"]
    assert model.graph[1].inputs[7] is model.graph[0].outputs[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([("y = Add(x, p)", "y = Add(x, p) z = Neg(p)"), ("32] y)", "32] y, float[2,3,32] z)")], "used elsewhere"),
        ([("float[2,3,32] x", "float[2,3,32] x, float[3,32] r"), ("Add(x, p)", "Add(r, p)")], "has another shape"),
    ],
)
def test_other_additions_stay(changes: list[tuple[str, str]], reason: str) -> None:
    text = RESIDUAL
    for change in changes:
        text = text.replace(*change)
    (found,) = refusals(FuseResidualPass(), linears(text, **SQUARE))
    assert reason in found


def test_a_second_residual_stays() -> None:
    model = linears(RESIDUAL.replace("y = Add(x, p)", "q = Add(x, p) y = Add(q, x)"), **SQUARE)
    (record,) = run_passes(model, [FuseResidualPass()])
    assert (record.matched, [refusal.reason for refusal in record.refused]) == (
        1,
        ["the linear has a residual already"],
    )
