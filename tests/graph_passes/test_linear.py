"""Constant matrices become linears, embeddings rows of quantized matrices, and both are packed for the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_text import changes_nothing_but_nodes, floats, graph, ops, refusals, run

from specexport.graph_passes.fuse_bias import FuseBiasPass
from specexport.graph_passes.heads_apart import SetHeadsApartPass
from specexport.graph_passes.infrastructure import run_passes
from specexport.graph_passes.linear import QuantizeLinearPass
from specexport.graph_passes.lower_cpu import PackEmbeddingsPass, PackLinearsPass
from specexport.graph_passes.merge_linears import MergeLinearsPass
from specexport.graph_passes.plan import PassPlan
from specexport.graph_passes.quantized_embedding import QuantizeEmbeddingPass
from specexport.graph_passes.tensors import Matrices, matrix_names
from specexport.plugins.quantized_linear.format import QuantizationScheme, quantize

INT4 = QuantizationScheme(4, 32, True)
INT8 = QuantizationScheme(8, 32, False)


def linear_pass(model: ir.Model, scheme: QuantizationScheme | None = None, **plan: Any) -> QuantizeLinearPass:
    weights = model.meta["weights"]
    return QuantizeLinearPass(PassPlan(weights=weights, scheme=lambda name, shape: scheme, **plan), Matrices(weights))


def embedding_pass(model: ir.Model, scheme: QuantizationScheme | None = None) -> QuantizeEmbeddingPass:
    weights = model.meta["weights"]
    return QuantizeEmbeddingPass(PassPlan(weights=weights, scheme=lambda name, shape: scheme), Matrices(weights))


TURNED = "g (float[b,s,64] x, float[32,64] w) => (float[b,s,32] y) { t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) }"
PLAIN = "g (float[b,s,64] x, float[64,32] w) => (float[b,s,32] y) { y = MatMul(x, w) }"
GEMM = "g (float[b,64] x, float[32,64] w, float[32] v) => (float[b,32] y) { y = Gemm<transB = 1>(x, w, v) }"


@pytest.mark.parametrize("text", [TURNED, PLAIN, GEMM])
def test_products_with_constant_matrices_become_linears(text: str) -> None:
    shape = (64, 32) if text is PLAIN else (32, 64)
    model = graph(text, w=shape, **({"v": (32,)} if text is GEMM else {}))
    x = floats(3, 64) if text is GEMM else floats(2, 3, 64)
    assert changes_nothing_but_nodes(linear_pass(model), model, x=x) == ["QuantizedLinear"]
    assert model.graph[0].attributes["bits"].as_int() == 32


@pytest.mark.parametrize("scheme", [INT4, INT8])
@pytest.mark.parametrize("text", [TURNED, PLAIN])
def test_the_matrix_is_quantized_in_its_scheme(text: str, scheme: QuantizationScheme) -> None:
    w = floats(32, 64)
    model = graph(text, w=w if text is TURNED else np.ascontiguousarray(w.T))
    run_passes(model, [linear_pass(model, scheme)])
    x = floats(2, 3, 64)
    np.testing.assert_allclose(run(model, x=x)[0], x @ quantize(w, scheme).dequantize().T, atol=1e-4)
    assert {f"w.int{scheme.bits}g32{'m' if scheme.has_minimum else ''}.weight"} <= set(model.graph.initializers)


def test_activations_are_quantized_where_weights_are() -> None:
    for scheme, bits in ((INT8, 8), (None, 32)):
        model = graph(TURNED, w=(32, 64))
        run_passes(model, [linear_pass(model, scheme, activation_bits=lambda name: 8)])
        assert model.graph[0].attributes["activation_bits"].as_int() == bits


def test_columns_that_do_not_split_into_groups_stay_float32_and_it_is_said() -> None:
    model = graph(TURNED.replace("64", "48"), w=(32, 48))
    (record,) = run_passes(model, [linear_pass(model, INT8, activation_bits=lambda name: 8)])
    assert record.matched == 1
    assert [refusal.reason for refusal in record.refused] == [
        "float32: 48 input channels are not a multiple of the group of 32"
    ]
    assert model.graph[0].attributes["bits"].as_int() == 32
    assert model.graph[0].attributes["activation_bits"].as_int() == 32


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("g (float[2,4] x, float[4,3] w) => (float[2,3] y) { y = MatMul(x, w) }", "not a constant matrix"),
        (GEMM.replace("transB = 1", "transB = 1, alpha: float = 2.0"), "a Gemm with alpha, beta or a transposed"),
        (GEMM.replace("transB = 1", "transB = 1, beta: float = 2.0"), "a Gemm with alpha, beta or a transposed"),
        (GEMM.replace("[b,64] x", "[64,b] x").replace("transB = 1", "transA = 1, transB = 1"), "a Gemm with alpha"),
    ],
)
def test_other_products_stay(text: str, reason: str) -> None:
    model = graph(text, **({"w": (32, 64), "v": (32,)} if "Gemm" in text else {}))
    model.meta.setdefault("weights", None)
    (found,) = refusals(linear_pass(model), model)
    assert reason in found


def test_flattening_around_a_product_goes() -> None:
    text = """g (float[batch,sequence,64] x, float[64,32] w, float[32] v) => (float[batch,sequence,32] y) {
        rows = Constant<value_ints: ints = [-1, 64]>()
        flat = Reshape(x, rows)
        product = Gemm(flat, w, v)
        lead = Shape<start: int = 0, end: int = 2>(x)
        last = Constant<value_ints: ints = [32]>()
        shape = Concat<axis: int = 0>(lead, last)
        y = Reshape(product, shape)
    }"""
    model = graph(text, w=(64, 32), v=(32,))
    assert changes_nothing_but_nodes(linear_pass(model), model, x=floats(2, 3, 64)) == ["QuantizedLinear"]


EMBEDDING = "g (int64[b,s] input_ids, float[64,32] w) => (float[b,s,32] y) { y = Gather(w, input_ids) }"


def test_token_rows_come_from_the_quantized_matrix() -> None:
    ids = np.array([[3, 63, 0]])
    model = graph(EMBEDDING, w=(64, 32))
    assert changes_nothing_but_nodes(embedding_pass(model), model, input_ids=ids) == ["QuantizedEmbedding"]
    w = floats(64, 32)
    model = graph(EMBEDDING, w=w)
    run_passes(model, [embedding_pass(model, INT4)])
    np.testing.assert_array_equal(run(model, input_ids=ids)[0][0], quantize(w, INT4).dequantize()[ids[0]])


def test_rows_that_do_not_split_into_groups_stay_float32() -> None:
    model = graph(EMBEDDING.replace("32", "48"), w=(64, 48))
    (record,) = run_passes(model, [embedding_pass(model, INT8)])
    assert "float32: 48 channels" in record.refused[0].reason
    assert model.graph[0].attributes["bits"].as_int() == 32


def test_rows_of_anything_else_stay() -> None:
    positions = EMBEDDING.replace("input_ids", "positions")
    assert refusals(embedding_pass(model := graph(positions, w=(64, 32))), model) == []
    columns = EMBEDDING.replace("Gather(w", "Gather<axis: int = 1>(w").replace("float[b,s,32]", "float[64,b,s]")
    (reason,) = refusals(embedding_pass(model := graph(columns, w=(64, 32))), model)
    assert "not looked up as rows" in reason


HEADS = """g (float[batch,sequence,32] x, float[24,32] w, float[24] v)
    => (float[batch,2,sequence,4] q, float[batch,2,sequence,4] k, float[batch,2,sequence,4] u) {
    t = Transpose<perm = [1, 0]>(w)
    p = MatMul(x, t)
    product = Add(p, v)
    shape = Constant<value_ints: ints = [0, 0, 2, 12]>()
    heads = Reshape(product, shape)
    first = Transpose<perm = [0, 2, 1, 3]>(heads)
    sizes = Constant<value_ints: ints = [4, 4, 4]>()
    q, k, u = Split<axis: int = -1>(first, sizes)
}"""


@pytest.mark.parametrize("scheme", [None, INT4])
def test_heads_one_after_the_other_are_set_apart(scheme: QuantizationScheme | None) -> None:
    model = graph(HEADS, w=(24, 32), v=(24,))
    run_passes(model, [linear_pass(model, scheme), FuseBiasPass()])
    after = changes_nothing_but_nodes(SetHeadsApartPass(), model, x=floats(2, 3, 32))
    assert after.count("Split") == 1
    (split,) = (node for node in model.graph if node.op_type == "Split")
    assert split.inputs[0].producer().op_type == "QuantizedLinear"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ("sizes = Constant<value_ints: ints = [4, 4, 4]>()", "sizes = Constant<value_ints: ints = [6, 3, 3]>()"),
            "wid",
        ),
        (("product = Add(p, v)", "product = Neg(p)"), "not those of a linear"),
        (("heads = Reshape(product, shape)", "heads = Reshape(product, shape)\n    z = Neg(product)"), "own order too"),
    ],
)
def test_other_heads_stay(change: tuple[str, str], reason: str) -> None:
    text = HEADS.replace(*change)
    if "[6, 3, 3]" in text:
        text = text.replace("sequence,4] q", "sequence,6] q").replace("4] k", "3] k").replace("4] u", "3] u")
    if "Neg(product)" in text:
        text = text.replace("4] u)", "4] u, float[batch,sequence,24] z)")
    model = graph(text, w=(24, 32), v=(24,))
    run_passes(model, [linear_pass(model), FuseBiasPass()])
    (found,) = refusals(SetHeadsApartPass(), model)
    assert reason in found


def test_packed_weights_have_the_announced_size_and_are_shared_with_a_tied_head() -> None:
    text = """g (int64[b,s] input_ids, float[64,32] w) => (float[b,s,64] y) {
        x = Gather(w, input_ids)
        t = Transpose<perm = [1, 0]>(w)
        y = MatMul(x, t)
    }"""
    for scheme in (INT4, INT8, None):
        model = graph(text, w=(64, 32))
        run_passes(model, [linear_pass(model, scheme), embedding_pass(model, scheme)])
        records = run_passes(model, [PackLinearsPass(), PackEmbeddingsPass()])
        assert [record.matched for record in records] == [1, 1]
        assert ops(model) == ["QuantizedEmbedding", "QuantizedLinear"]
        assert {node.domain for node in model.graph} == {"specexport.cpu"}
        (packed,) = model.graph.initializers.values()
        assert [node.inputs[1] for node in model.graph] == [packed, packed]
        assert packed.const_value.numpy().shape == tuple(packed.const_value.shape)
        assert not PackLinearsPass()(model).modified
        assert not PackEmbeddingsPass()(model).modified


def test_a_merged_matrix_is_read_part_by_part_and_only_when_written() -> None:
    text = """g (float[b,s,32] x, float[32,32] w, float[64,32] v) => (float[b,s,96] y) {
        t = Transpose<perm = [1, 0]>(w)
        u = Transpose<perm = [1, 0]>(v)
        p = MatMul(x, t)
        q = MatMul(x, u)
        y = Concat<axis: int = -1>(p, q)
    }"""
    model = graph(text, w=(32, 32), v=(64, 32))
    reads: list[str] = []
    source = model.meta["weights"]
    quantized = source.quantized
    source.quantized = lambda name, scheme: (reads.append(name), quantized(name, scheme))[1]
    run_passes(model, [linear_pass(model, INT4), MergeLinearsPass(), PackLinearsPass()])
    assert reads == []
    (packed,) = model.graph.initializers.values()
    packed.const_value.numpy()
    assert reads == ["w", "v"]  # once each, though weight, scale and minimum are three tensors


def test_activation_bits_are_asked_for_by_the_matrix_name() -> None:
    model = graph(TURNED, w=(32, 64))
    asked = []

    def bits(name: str) -> int:
        asked.append(name)
        return 16

    run_passes(model, [linear_pass(model, INT8, activation_bits=bits)])
    assert model.graph[0].attributes["activation_bits"].as_int() == 16
    assert set(asked) == {"w"}


@pytest.mark.parametrize("suffix", ["", ".packed", ".packed.gated"])
def test_a_weight_tells_its_matrices(suffix: str) -> None:
    names = ("layers.0.q.weight", "layers.0.k.weight")
    assert matrix_names("layers.0.q.weight.int4g32m.weight+layers.0.k.weight.int8g128.weight" + suffix) == names
