"""Walks back from one attention input to its projection, collecting RoPE and the per-head norm on the way."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from specexport.graph_passes.matching import attribute, counts_from, is_weight, rank, static


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotation of a head: tables [P, R/2] and which channels pair."""

    cos: ir.Value
    sin: ir.Value
    interleaved: int


@dataclasses.dataclass(frozen=True)
class HeadNorm:
    """The RMS norm of a head."""

    weight: ir.Value
    epsilon: float


@dataclasses.dataclass(frozen=True)
class Heads:
    """Where one of q, k, v comes from.

    Attributes:
        flat: float [B, S, H*D], before the norm and RoPE below.
        rotary: RoPE between ``flat`` and attention.
        norm: Norm between ``flat`` and RoPE.
    """

    flat: ir.Value
    rotary: Rotary | None
    norm: HeadNorm | None


def walk(value: ir.Value, past_length: ir.Value) -> Heads | str:
    """Find the heads' projection behind ``value`` [B, H, S, D].

    Returns:
        What was found, or the reason why the way back is not one that the cache op can take over.
    """
    heads, width = static(value, 1), static(value, 3)
    if heads is None or width is None:
        return "the number of heads or their width is not a constant"
    rotary: Rotary | None = None
    norm: HeadNorm | None = None
    heads_first = True
    while True:
        node = value.producer()
        if node is None or node.domain:
            return "no reshape from [batch, sequence, heads*width] was found"
        source = node.inputs[0]
        assert source is not None
        if node.op_type == "Transpose" and list(attribute(node, "perm", [])) == [0, 2, 1, 3]:
            heads_first = not heads_first
        elif node.op_type == "RotaryEmbedding":
            if rotary is not None or norm is not None:
                return "RoPE comes twice or before the norm"
            found = _rotary(node, heads_first, past_length)
            if isinstance(found, str):
                return found
            rotary = found
        elif node.op_type == "RMSNormalization":
            if norm is not None:
                return "there are two norms"
            weight = node.inputs[1]
            if weight is None or not is_weight(weight, 1) or attribute(node, "axis", -1) not in (-1, 3):
                return "the norm is not over the head's channels with a constant weight"
            norm = HeadNorm(weight, float(attribute(node, "epsilon", 1e-5)))
        elif node.op_type == "Reshape":
            if heads_first or rank(source) != 3 or static(source, -1) != heads * width or static(value, -1) != width:
                return "the heads are not a plain split of the last axis"
            return Heads(source, rotary, norm)
        else:
            return f"{node.op_type} stands between the projection and attention"
        value = source


def _rotary(node: ir.Node, heads_first: bool, past_length: ir.Value) -> Rotary | str:
    cos, sin = node.inputs[1:3]
    if not heads_first:
        return "RoPE is applied to [batch, sequence, heads, channels]"
    if cos is None or sin is None or not (is_weight(cos, 2) and is_weight(sin, 2)) or len(node.inputs) < 4:
        return "RoPE's cosines and sines are not tables"
    if not counts_from(node.inputs[3], past_length):
        return "RoPE's positions are not past_length onwards"
    return Rotary(cos, sin, int(attribute(node, "interleaved", 0)))
