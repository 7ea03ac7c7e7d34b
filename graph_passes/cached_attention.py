"""The captured attention becomes specexport::QuantizedKVAttention, with RoPE, per-head norms and the cache inside."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from specexport.graph_passes.attention_heads import HeadNorm, Heads, Rotary, walk
from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.matching import (
    attribute,
    insert_before,
    integers,
    only_user,
    rank,
    replace,
    shaped,
    static,
)
from specexport.graph_passes.plan import PassPlan, cache_group_size
from specexport.graph_passes.tensors import constant
from specexport.plugins.quantized_kv_attention.spec import SPEC, QuantizedKVAttentionAttributes

CAPTURE_DOMAIN = "specexport.capture"


@dataclasses.dataclass(frozen=True)
class Projections:
    """What one attention node takes: the three flat tensors and what the op does to them."""

    flat: tuple[ir.Value, ir.Value, ir.Value]
    rotary: Rotary | None = None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None


class CachedAttentionPass(GraphPass):
    """Give every layer its cache: graph inputs and outputs, and the one op that reads and extends it."""

    def __init__(self, plan: PassPlan) -> None:
        super().__init__()
        self._plan = plan

    def rewrite(self, model: ir.Model) -> None:
        """Rewrite every captured attention; layers get their cache tensors in order of their index."""
        graph = model.graph
        nodes = [node for node in graph if node.domain == CAPTURE_DOMAIN and node.op_type == "Attention"]
        if not nodes:
            return
        past_length = next(value for value in graph.inputs if value.name == "past_length")
        query_length = ir.Value(name="query_length", shape=ir.Shape(["batch"]), type=ir.TensorType(ir.DataType.INT64))
        graph.inputs.insert(graph.inputs.index(past_length) + 1, query_length)
        for node in sorted(nodes, key=lambda node: int(attribute(node, "layer"))):
            self._rewrite_layer(graph, node, past_length, query_length)
            self.match()
        model.opset_imports[SPEC.domain] = SPEC.version
        model.opset_imports.pop(CAPTURE_DOMAIN, None)

    def _rewrite_layer(self, graph: ir.Graph, node: ir.Node, past: ir.Value, query_length: ir.Value) -> None:
        q, k, _ = node.inputs[:3]
        assert q is not None and k is not None
        q_heads, kv_heads, width = static(q, 1), static(k, 1), static(q, 3)
        assert q_heads is not None and kv_heads is not None and width is not None
        layer, plan = int(attribute(node, "layer")), self._plan
        source = self._projections(graph, node, past)
        attributes = QuantizedKVAttentionAttributes(
            q_num_heads=q_heads,
            kv_num_heads=kv_heads,
            scale=float(attribute(node, "scale")),
            softcap=float(attribute(node, "softcap", 0.0)),
            window=int(attribute(node, "window", 0)),
            rotary_interleaved=0 if source.rotary is None else source.rotary.interleaved,
            norm_epsilon=next((n.epsilon for n in (source.q_norm, source.k_norm) if n is not None), 1e-6),
            key_bits=plan.key_bits,
            value_bits=plan.value_bits,
            key_group_size=cache_group_size(plan.key_group_size, width) if plan.key_bits == 8 else 0,
            value_group_size=cache_group_size(plan.value_group_size, width) if plan.value_bits == 8 else 0,
        )
        caches = _cache_inputs(graph, layer, kv_heads, width, attributes)
        qkv = _joined(node, source.flat, (q_heads + 2 * kv_heads) * width)
        inputs = [
            qkv,
            *caches,
            past,
            query_length,
            None if source.rotary is None else source.rotary.cos,
            None if source.rotary is None else source.rotary.sin,
            None if source.q_norm is None else source.q_norm.weight,
            None if source.k_norm is None else source.k_norm.weight,
            node.inputs[3] if len(node.inputs) > 3 else None,
        ]
        new = ir.Node(
            SPEC.domain, SPEC.name, _trimmed(inputs), _attributes(attributes.as_dict()), num_outputs=5, version=1
        )
        insert_before(node, new)
        y = shaped(new, ["batch", "sequence", q_heads * width])
        _cache_outputs(graph, layer, new, caches)
        _connect(graph, node, y)

    def _projections(self, graph: ir.Graph, node: ir.Node, past: ir.Value) -> Projections:
        """What q, k and v are made of, as far as the op can take it over."""
        found = [walk(value, past) for value in node.inputs[:3] if value is not None]
        v = found[2]
        reason = _disagreement(found)
        if reason is None:
            q, k = found[:2]
            assert isinstance(q, Heads) and isinstance(k, Heads) and isinstance(v, Heads)
            return Projections((q.flat, k.flat, v.flat), q.rotary, q.norm, k.norm)
        self.refuse(f"norm and RoPE stay outside: {reason}", node)
        flat = [_flattened(graph, node, value) for value in node.inputs[:2] if value is not None]
        plain = isinstance(v, Heads) and v.norm is None and v.rotary is None
        assert node.inputs[2] is not None
        last = v.flat if plain and isinstance(v, Heads) else _flattened(graph, node, node.inputs[2])
        return Projections((flat[0], flat[1], last))


def _disagreement(found: list[Heads | str]) -> str | None:
    """Why q, k and v cannot be taken over as they were found; None if they can."""
    for name, one in zip("qkv", found):
        if isinstance(one, str):
            return f"{name}: {one}"
    q, k, v = (one for one in found if isinstance(one, Heads))
    if v.rotary is not None or v.norm is not None:
        return "v has a norm or RoPE"
    if q.rotary != k.rotary:
        return "q and k are rotated differently"
    if q.norm is not None and k.norm is not None and q.norm.epsilon != k.norm.epsilon:
        return "the norms of q and k have different epsilons"
    return None


def _flattened(graph: ir.Graph, before: ir.Node, value: ir.Value) -> ir.Value:
    """[B, H, S, D] as [B, S, H*D]."""
    heads, width = static(value, 1), static(value, 3)
    assert heads is not None and width is not None
    transpose = ir.Node("", "Transpose", [value], [ir.AttrInt64s("perm", [0, 2, 1, 3])])
    shape = constant(graph, f"rows_by_{heads * width}", np.array([0, 0, heads * width], np.int64))
    reshape = ir.Node("", "Reshape", [shaped(transpose, ["batch", "sequence", heads, width]), shape])
    insert_before(before, transpose, reshape)
    return shaped(reshape, ["batch", "sequence", heads * width])


def _joined(before: ir.Node, flat: tuple[ir.Value, ...], width: int) -> ir.Value:
    """The three tensors side by side: the one that they were cut from, if they are its parts in order."""
    whole = _cut_from(flat, width)
    if whole is not None:
        return whole
    concat = ir.Node("", "Concat", list(flat), [ir.AttrInt64("axis", -1)])
    insert_before(before, concat)
    return shaped(concat, ["batch", "sequence", width])


def _cut_from(flat: tuple[ir.Value, ...], width: int) -> ir.Value | None:
    node = flat[0].producer()
    if node is None or node.domain or node.op_type not in ("Split", "Slice"):
        return None
    whole = node.inputs[0]
    if whole is None or static(whole, -1) != width:
        return None
    if node.op_type == "Split":
        last = attribute(node, "axis", 0) in (-1, (rank(whole) or 0) - 1)
        return whole if last and tuple(node.outputs) == flat else None
    start = 0
    for part in flat:
        cut, length = part.producer(), static(part, -1)
        if cut is None or cut.op_type != "Slice" or cut.inputs[0] is not whole or length is None:
            return None
        starts, axes = integers(cut.inputs[1]), integers(cut.inputs[3]) if len(cut.inputs) > 3 else None
        if starts != [start] or axes not in ([-1], [(rank(whole) or 0) - 1]):
            return None
        start += length
    return whole if start == width else None


def _cache_inputs(
    graph: ir.Graph, layer: int, heads: int, width: int, attributes: QuantizedKVAttentionAttributes
) -> list[ir.Value | None]:
    """Add the layer's cache to the graph's inputs; in the op's order, None where 8 bits would have a scale."""
    caches: list[ir.Value | None] = []
    for kind, bits, group in (
        ("key", attributes.key_bits, attributes.key_group_size),
        ("value", attributes.value_bits, attributes.value_group_size),
    ):
        parts = [("cache", ir.DataType.FLOAT16 if bits == 16 else ir.DataType.INT8, width)]
        if bits == 8:
            parts.append(("scale", ir.DataType.FLOAT16, width // group))
        made = [
            ir.Value(
                name=f"{kind}_{part}.{layer}",
                shape=ir.Shape(["batch", heads, "capacity", last]),
                type=ir.TensorType(dtype),
            )
            for part, dtype, last in parts
        ]
        graph.inputs.extend(made)
        caches += [made[0], made[1] if len(made) > 1 else None]
    return caches


def _cache_outputs(graph: ir.Graph, layer: int, node: ir.Node, caches: list[ir.Value | None]) -> None:
    names = ("key_cache", "key_scale", "value_cache", "value_scale")
    for name, output, cache in zip(names, node.outputs[1:], caches):
        if cache is None:
            output.name = ""
            continue
        output.name, output.shape, output.type = f"{name}_out.{layer}", cache.shape, cache.type
        graph.outputs.append(output)


def _connect(graph: ir.Graph, node: ir.Node, y: ir.Value) -> None:
    """Give the users of the old [B, S, H, D] the new [B, S, H*D]."""
    old = node.outputs[0]
    user = only_user(old)
    if (
        user is not None
        and user.op_type == "Reshape"
        and rank(user.outputs[0]) == 3
        and static(user.outputs[0], -1) == static(y, -1)
    ):
        replace(user.outputs[0], y)
        graph.remove([user, node], safe=True)
        return
    heads, width = static(old, 2), static(old, 3)
    shape = constant(graph, f"heads_{heads}_{width}", np.array([0, 0, heads, width], np.int64))
    reshape = ir.Node("", "Reshape", [y, shape])
    insert_before(node, reshape)
    shaped(reshape, old.shape)
    replace(old, reshape.outputs[0])
    graph.remove(node, safe=True)


def _attributes(values: dict[str, int | float]) -> list[ir.Attr]:
    return [
        ir.AttrInt64(name, value) if isinstance(value, int) else ir.AttrFloat32(name, value)
        for name, value in values.items()
    ]


def _trimmed(inputs: list[ir.Value | None]) -> list[ir.Value | None]:
    while inputs[-1] is None:
        inputs.pop()
    return inputs
