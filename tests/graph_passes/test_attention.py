"""The captured attention becomes the cache op: what it takes over, what stays outside, and the caches."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
from graph_text import graph, ops

from specexport.graph_passes.cached_attention import CachedAttentionPass
from specexport.graph_passes.infrastructure import run_passes
from specexport.graph_passes.plan import NoWeights, PassPlan, cache_group_size
from specexport.plugins.quantized_kv_attention.spec import INPUTS

# One layer of 2 query heads and 1 key head of 16 channels, as a capture writes it after folding.
LAYER = """g (int64[batch] past_length, int64[batch,sequence] input_ids,
    float[batch,sequence,32] q0, float[batch,sequence,16] k0, float[batch,sequence,16] v0,
    float[64,4] cos, float[64,4] sin, float[16] qw, float[16] kw) => (float[batch,sequence,32] y) {
    one = Constant<value_ints: ints = [1]>()
    column = Unsqueeze(past_length, one)
    zero = Constant<value_int: int = 0>()
    step = Constant<value_int: int = 1>()
    size = Shape<start: int = 1, end: int = 2>(input_ids)
    length = Squeeze(size)
    steps = Range(zero, length, step)
    first = Constant<value_ints: ints = [0]>()
    row = Unsqueeze(steps, first)
    ids = Add(column, row)
    two_heads = Constant<value_ints: ints = [0, 0, 2, 16]>()
    one_head = Constant<value_ints: ints = [0, 0, 1, 16]>()
    q1 = Reshape(q0, two_heads)
    k1 = Reshape(k0, one_head)
    v1 = Reshape(v0, one_head)
    q2 = RMSNormalization<epsilon: float = 0.001>(q1, qw)
    k2 = RMSNormalization<epsilon: float = 0.001>(k1, kw)
    q3 = Transpose<perm = [0, 2, 1, 3]>(q2)
    k3 = Transpose<perm = [0, 2, 1, 3]>(k2)
    v = Transpose<perm = [0, 2, 1, 3]>(v1)
    q = RotaryEmbedding<rotary_embedding_dim: int = 8>(q3, cos, sin, ids)
    k = RotaryEmbedding<rotary_embedding_dim: int = 8>(k3, cos, sin, ids)
    heads = specexport.capture.Attention<layer: int = 0, scale: float = 0.3, window: int = 7,
        softcap: float = 2.0>(q, k, v)
    flat = Constant<value_ints: ints = [0, 0, 32]>()
    y = Reshape(heads, flat)
}"""
TABLES = {"cos": (64, 4), "sin": (64, 4), "qw": (16,), "kw": (16,)}


def layer(*changes: tuple[str, str]) -> ir.Model:
    text = LAYER
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    model = graph(text, **TABLES)
    shapes = {"heads": ["batch", "sequence", 2, 16]}
    for node in model.graph:
        for output in node.outputs:
            if output.name in shapes:
                output.shape, output.type = ir.Shape(shapes[output.name]), ir.TensorType(ir.DataType.FLOAT)
    return model


def rewritten(model: ir.Model, **plan: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The attention node's inputs by name, its attributes, and what was refused."""
    (record,) = run_passes(model, [CachedAttentionPass(PassPlan(weights=NoWeights(), **plan))])
    assert record.matched == 1
    (node,) = (node for node in model.graph if node.op_type == "QuantizedKVAttention")
    inputs = dict(zip(INPUTS, [value and value.name for value in node.inputs]))
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return inputs, attributes, [refusal.reason for refusal in record.refused]


def test_norm_rotation_and_cache_go_into_the_op() -> None:
    model = layer()
    inputs, attributes, refused = rewritten(model)
    assert refused == []
    assert ops(model) == ["Concat", "QuantizedKVAttention"]
    assert [value.name for value in model.graph[0].inputs] == ["q0", "k0", "v0"]
    names = {"cos": "cos", "sin": "sin", "q_norm_weight": "qw", "k_norm_weight": "kw", "past_length": "past_length"}
    assert {name: inputs[name] for name in names} == names
    assert attributes == {
        "q_num_heads": 2,
        "kv_num_heads": 1,
        "scale": pytest.approx(0.3),
        "softcap": 2.0,
        "window": 7,
        "rotary_interleaved": 0,
        "norm_epsilon": pytest.approx(0.001),
        "key_bits": 16,
        "value_bits": 16,
        "key_group_size": 0,
        "value_group_size": 0,
    }
    assert [value.name for value in model.graph.inputs[:3]] == ["past_length", "query_length", "input_ids"]
    assert [value.name for value in model.graph.outputs] == ["y", "key_cache_out.0", "value_cache_out.0"]
    assert not CachedAttentionPass(PassPlan(weights=NoWeights()))(model).modified


def test_int8_caches_have_scales_in_groups_that_the_head_allows() -> None:
    model = layer()
    inputs, attributes, _ = rewritten(model, key_bits=8, value_bits=8, key_group_size=64, value_group_size=8)
    shapes = {value.name: (value.dtype, list(map(str, value.shape))) for value in model.graph.inputs[-4:]}
    lead = ["batch", "1", "capacity"]
    assert shapes == {
        "key_cache.0": (ir.DataType.INT8, [*lead, "16"]),
        "key_scale.0": (ir.DataType.FLOAT16, [*lead, "1"]),
        "value_cache.0": (ir.DataType.INT8, [*lead, "16"]),
        "value_scale.0": (ir.DataType.FLOAT16, [*lead, "2"]),
    }
    assert (attributes["key_group_size"], attributes["value_group_size"]) == (16, 8)
    assert inputs["key_scale"] == "key_scale.0"
    assert [cache_group_size(64, width) for width in (64, 80, 96, 128, 40)] == [64, 40, 48, 64, 40]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            [("k = RotaryEmbedding<rotary_embedding_dim: int = 8>(k3, cos, sin, ids)", "k = Identity(k3)")],
            "k: Identity",
        ),
        ([("(k3, cos, sin, ids)", "(k3, sin, cos, ids)")], "q and k are rotated differently"),
        ([("ids = Add(column, row)", "ids = Sub(column, row)")], "q: RoPE's positions are not past_length onwards"),
        ([("zero = Constant<value_int: int = 0>", "zero = Constant<value_int: int = 1>")], "q: RoPE's positions"),
        ([("0.001>(k1, kw)", "0.002>(k1, kw)")], "the norms of q and k have different epsilons"),
        ([("RMSNormalization<epsilon: float = 0.001>(q1, qw)", "Mul(q1, qw)")], "q: Mul stands between"),
        ([("v1 = Reshape(v0, one_head)", "v5 = Reshape(v0, one_head) v1 = RMSNormalization(v5, kw)")], "v has a norm"),
        (
            [
                ("q2 = RMSNormalization<epsilon: float = 0.001>(q1, qw)", "q2 = Identity(q1)"),
                ("q = Rot", "q8 = Rot"),
                ("(q3, cos, sin, ids)", "(q3, cos, sin, ids) q = RMSNormalization(q8, qw)"),
            ],
            "q: RoPE comes twice or before the norm",
        ),
    ],
)
def test_what_the_op_cannot_take_over_stays_before_it(changes: list[tuple[str, str]], reason: str) -> None:
    model = layer(*changes)
    inputs, _, refused = rewritten(model)
    assert len(refused) == 1
    assert refused[0].startswith("norm and RoPE stay outside: ")
    assert reason in refused[0]
    assert not {"cos", "sin", "q_norm_weight", "k_norm_weight"} & set(inputs)
    assert {"RotaryEmbedding", "Concat"} <= set(ops(model))


def test_parts_of_one_tensor_are_taken_whole() -> None:
    split = """past_length, float[batch,sequence,64] all,"""
    model = graph(
        LAYER.replace("past_length,", split, 1)
        .replace("float[batch,sequence,32] q0, float[batch,sequence,16] k0, float[batch,sequence,16] v0,", "")
        .replace("    one = ", "    sizes = Constant<value_ints: ints = [32, 16, 16]>()\n"
                 "    q0, k0, v0 = Split<axis: int = -1>(all, sizes)\n    one = ", 1),
        **TABLES,
    )  # fmt: skip
    for node in model.graph:
        if node.op_type == "Attention":
            node.outputs[0].shape = ir.Shape(["batch", "sequence", 2, 16])
    inputs, _, refused = rewritten(model)
    assert refused == []
    assert ops(model) == ["QuantizedKVAttention"]
    assert inputs["qkv"] == "all"


def test_parts_in_another_order_are_joined_again() -> None:
    model = layer(
        ("float[batch,sequence,16] k0, float[batch,sequence,16] v0,", "float[batch,sequence,32] kv,"),
        ("    one = ", "    sizes = Constant<value_ints: ints = [16, 16]>()\n"
         "    v0, k0 = Split<axis: int = -1>(kv, sizes)\n    one = "),
    )  # fmt: skip
    rewritten(model)
    assert [op for op in ops(model) if op != "Constant"] == ["Split", "Concat", "QuantizedKVAttention"]
