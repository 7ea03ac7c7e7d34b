"""Passes that fold: constants, reshapes, splits, rotary tables and partial rotation, rows of the logits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_text import changes_nothing_but_nodes, floats, graph, refusals

from specexport.graph_passes.bind_weights import BindWeightsPass
from specexport.graph_passes.fold_constants import FoldConstantsPass
from specexport.graph_passes.fold_partial_rotary import FoldPartialRotaryPass
from specexport.graph_passes.fold_rope_tables import FoldRopeTablesPass
from specexport.graph_passes.logits_rows import GatherLogitsRowsPass
from specexport.graph_passes.split_without_sequences import SplitWithoutSequencesPass
from specexport.graph_passes.static_reshapes import StaticReshapesPass
from specexport.graph_passes.tensors import NamedWeight


def test_weights_are_bound_once_and_read_only_when_asked() -> None:
    model = graph("g (float[2,4] x, float[4] w) => (float[2,4] y) { y = Add(x, w) }", w=(4,))
    source = model.meta["weights"]
    model.graph.initializers["w"].const_value = NamedWeight("w", ir.DataType.FLOAT, ir.Shape([4]))
    bind = BindWeightsPass(source)
    assert bind(model).modified
    np.testing.assert_array_equal(model.graph.initializers["w"].const_value.numpy(), source.get("w"))
    assert not bind(model).modified


def test_one_plus_a_weight_becomes_a_weight() -> None:
    text = """g (float[b,s,4] x, float[4] w) => (float[b,s,4] y) {
        one = Constant<value_float: float = 1.0>()
        w1 = Add(w, one)
        same = Identity(x)
        y = RMSNormalization(same, w1)
    }"""
    model = graph(text, w=(4,))
    assert changes_nothing_but_nodes(FoldConstantsPass(), model, x=floats(1, 3, 4)) == ["RMSNormalization"]
    assert set(model.graph.initializers) == {"w+1"}


def test_constants_of_shapes_fold_and_equal_ones_are_shared() -> None:
    text = """g (float[b,6] x) => (float[b,2,3] y, float[b,2,3] z) {
        m = Constant<value_int: int = -1>()
        to = Constant<value_ints: ints = [1]>()
        first = Reshape(m, to)
        rest = Constant<value_ints: ints = [2, 3]>()
        shape = Concat<axis: int = 0>(first, rest)
        y = Reshape(x, shape)
        again = Constant<value_ints: ints = [-1, 2, 3]>()
        z = Reshape(x, again)
    }"""
    model = graph(text)
    assert changes_nothing_but_nodes(FoldConstantsPass(), model, x=floats(2, 6)) == ["Reshape", "Reshape"]


@pytest.mark.parametrize(
    "text",
    [
        "g (float[2,4] x, float[4] w) => (float[2,4] y) { y = Add(x, w) }",  # not a constant expression
        "g (float[4] x) => (float[4] y) { y = Identity(x) }",  # an input as an output needs its node
        "g (float[b,6] x, int64[2] s) => (float[b,6] y) { y = Reshape(x, s) }",  # a target that a caller gives
    ],
)
def test_what_is_computed_from_inputs_stays(text: str) -> None:
    model = graph(text, **({"w": (4,)} if " w)" in text else {}))
    if "Reshape" in text:
        model.graph.outputs[0].shape = ir.Shape(["n", 6])
    assert refusals(FoldConstantsPass(), model) == []


def test_reshapes_get_constant_targets() -> None:
    text = """g (float[batch,sequence,12] x) => (float[batch,sequence,3,4] y) {
        n = Shape<start: int = 0, end: int = 2>(x)
        rest = Constant<value_ints: ints = [3, 4]>()
        shape = Concat<axis: int = 0>(n, rest)
        y = Reshape(x, shape)
    }"""
    assert changes_nothing_but_nodes(StaticReshapesPass(), graph(text), x=floats(2, 5, 12)) == ["Reshape"]
    unknown = graph(text.replace("float[batch,sequence,3,4]", "float[p,q,3,4]"))
    unknown.graph.outputs[0].shape = ir.Shape(["p", "q", 3, 4])
    assert refusals(StaticReshapesPass(), unknown) == ["more than one axis is neither a number nor one that stays"]
    lost = graph(text)
    lost.graph.outputs[0].shape = None
    assert refusals(StaticReshapesPass(), lost) == ["a shape is not known"]


SPLIT = """g (float[2,6] x) => (float[2,4] y, float[2,2] z) {
    size = Constant<value_int: int = 4>()
    parts = SplitToSequence<axis: int = -1>(x, size)
    zero = Constant<value_int: int = 0>()
    one = Constant<value_int: int = 1>()
    y = SequenceAt(parts, zero)
    z = SequenceAt(parts, one)
}"""


def test_a_sequence_of_parts_becomes_a_split() -> None:
    after = changes_nothing_but_nodes(SplitWithoutSequencesPass(), graph(SPLIT), x=floats(2, 6))
    assert "Split" in after
    assert not {"SplitToSequence", "SequenceAt"} & set(after)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("[2,6] x)", "[2,n] x)"), "the extent or the sizes of the parts are not constants"),
        (
            ("SequenceAt(parts, one)", "ConcatFromSequence<axis: int = -1>(parts)"),
            "its parts are not taken one by one with constant indices",
        ),
    ],
)
def test_other_sequences_stay(change: tuple[str, str], reason: str) -> None:
    assert refusals(SplitWithoutSequencesPass(), graph(SPLIT.replace(*change).replace("float[2,2] z", "float z"))) == [
        reason
    ]


TABLES = """g (float[1,2,3,8] x, int64[1,3] ids, float[16,4] c, float[16,4] s) => (float[1,2,3,8] y) {
    cos = Gather<axis: int = 0>(c, ids)
    sin = Gather<axis: int = 0>(s, ids)
    y = RotaryEmbedding(x, cos, sin)
}"""


def test_gathered_cosines_become_tables() -> None:
    ids = np.array([[4, 5, 6]])
    model = graph(TABLES, c=(16, 4), s=(16, 4))
    assert changes_nothing_but_nodes(FoldRopeTablesPass(), model, x=floats(1, 2, 3, 8), ids=ids) == ["RotaryEmbedding"]
    assert [value.name for value in model.graph[0].inputs] == ["x", "c", "s", "ids"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([("cos = Gather<axis: int = 0>(c, ids)", "k = Gather<axis: int = 0>(c, ids)\n    cos = Cos(k)")], "computed"),
        ([("ids, float[16,4] c", "ids, int64[1,3] other, float[16,4] c"), ("(s, ids)", "(s, other)")], "different pos"),
    ],
)
def test_cosines_that_are_no_rows_of_tables_stay(changes: list[tuple[str, str]], reason: str) -> None:
    text = TABLES
    for change in changes:
        text = text.replace(*change)
    (found,) = refusals(FoldRopeTablesPass(), graph(text, c=(16, 4), s=(16, 4)))
    assert reason in found


def test_tables_that_an_input_gives_stay() -> None:
    assert refusals(FoldRopeTablesPass(), graph(TABLES)) == ["its tables are not constants [positions, R/2]"]


PARTIAL = """g (float[1,2,3,12] x, float[1,3,4] c, float[1,3,4] s) => (float[1,2,3,12] y) {
    zero = Constant<value_ints: ints = [0]>()
    cut = Constant<value_ints: ints = [8]>()
    end = Constant<value_ints: ints = [9223372036854775807]>()
    last = Constant<value_ints: ints = [3]>()
    head = Slice(x, zero, cut, last)
    rest = Slice(x, cut, end, last)
    turned = RotaryEmbedding(head, c, s)
    y = Concat<axis: int = -1>(turned, rest)
}"""


def test_a_rotated_part_and_the_rest_become_one_rotation() -> None:
    model = graph(PARTIAL)
    after = changes_nothing_but_nodes(
        FoldPartialRotaryPass(), model, x=floats(1, 2, 3, 12), c=floats(1, 3, 4), s=floats(1, 3, 4)
    )
    assert "Concat" not in after
    assert "Slice" not in after
    (rotary,) = (node for node in model.graph if node.op_type == "RotaryEmbedding")
    assert rotary.attributes["rotary_embedding_dim"].as_int() == 8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("rest = Slice(x, cut", "rest = Slice(x, zero"), "the parts are not the first and the remaining channels"),
        (("rest = Slice(x, cut, end", "rest = Slice(c2, cut, end"), "the parts are not the first and the remaining"),
        (
            ("turned = RotaryEmbedding(head, c, s)", "turned = RotaryEmbedding(head, c, s)\n    z = Neg(turned)"),
            "the rotated part is used elsewhere",
        ),
        (("axis: int = -1>(turned", "axis: int = 2>(turned"), "the parts are not joined along the channels"),
    ],
)
def test_other_concatenations_stay(change: tuple[str, str], reason: str) -> None:
    text = PARTIAL.replace(*change)
    if "c2" in text:
        text = text.replace("float[1,3,4] c,", "float[1,3,4] c, float[1,2,3,12] c2,")
    if "Neg" in text:
        text = text.replace("[1,2,3,12] y)", "[1,2,3,12] y, float[1,2,3,8] z)")
    if "axis: int = 2" in text:
        text = text.replace("rest = Slice(x, cut, end, last)", "rest = Slice(x, zero, cut, last)")
        text = text.replace("float[1,2,3,12] y", "float[1,2,6,8] y")
    if "rest = Slice(x, zero, end" in text:
        text = text.replace("float[1,2,3,12] y", "float[1,2,3,20] y")
    (found,) = refusals(FoldPartialRotaryPass(), graph(text))
    assert reason in found


ROWS = """g (float[batch,sequence,4] x, int64[rows] logits_rows, float[4] w) => (float[rows,4] y) {
    normed = RMSNormalization(x, w)
    shape = Constant<value_ints: ints = [-1, 4]>()
    flat = Reshape(normed, shape)
    y = Gather<axis: int = 0>(flat, logits_rows)
}"""


@pytest.mark.parametrize("norm", ["RMSNormalization(x, w)", "LayerNormalization<epsilon: float = 0.1>(x, w)"])
def test_rows_are_taken_before_the_norm(norm: str) -> None:
    model = graph(ROWS.replace("RMSNormalization(x, w)", norm), w=(4,))
    rows = np.array([5, 0, 0])
    after = changes_nothing_but_nodes(GatherLogitsRowsPass(), model, x=floats(2, 3, 4), logits_rows=rows)
    assert after[-3:] == ["Reshape", "Gather", norm.split("(")[0].split("<")[0]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("RMSNormalization(x, w)", "Mul(x, w)"), "no norm stands before the gathered rows"),
        (("flat, logits_rows)", "flat, logits_rows)\n    z = Neg(normed)"), "the norm of all rows is used elsewhere"),
        (("flat = Reshape(normed, shape)", "flat = Flatten<axis: int = 2>(normed)"), "not a flattened tensor"),
    ],
)
def test_rows_of_something_else_stay(change: tuple[str, str], reason: str) -> None:
    text = ROWS.replace(*change)
    if "Neg" in text:
        text = text.replace("[rows,4] y)", "[rows,4] y, float[batch,sequence,4] z)")
    (found,) = refusals(GatherLogitsRowsPass(), graph(text, w=(4,)))
    assert reason in found


def test_other_gathers_are_not_looked_at() -> None:
    assert refusals(GatherLogitsRowsPass(), graph(ROWS.replace("logits_rows", "other_rows"), w=(4,))) == []
