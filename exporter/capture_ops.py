"""The three operations that a capture keeps whole: attention, rotary embedding and RMS norm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# Domain of ops that live only between the capture and the passes; no saved model holds them.
CAPTURE_DOMAIN = "specexport.capture"
ATTENTION_NAME = "specexport"


@functools.cache
def register() -> dict[Any, Callable[..., Any]]:
    """Define the torch operators once in the process; returns how each is written in ONNX.

    ``specexport::attention``: q (B, Hq, S, D), k and v (B, Hkv, S, D) -> (B, S, Hq, D), causal.
    ``specexport::rotary``: x (B, H, S, D), cos and sin (B, S, R/2) -> (B, H, S, D).
    ``specexport::rms_norm``: x (..., D), weight (D) -> (..., D).
    """
    import torch

    # Schemas in words: a string annotation cannot name torch, which is imported only here.
    def define(name: str, schema: str, body: Callable[..., Any]) -> Any:
        return torch.library.custom_op(f"specexport::{name}", body, mutates_args=(), schema=schema)

    # The bodies are never run: a traced model is not called.
    attention = define(
        "attention",
        "(Tensor q, Tensor k, Tensor v, Tensor? sinks, int layer, float scale, int window, float softcap) -> Tensor",
        lambda q, *_: q.transpose(1, 2).contiguous(),
    )
    rotary = define("rotary", "(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor", lambda x, *_: x.clone())
    rms_norm = define("rms_norm", "(Tensor x, Tensor weight, float epsilon) -> Tensor", lambda x, *_: x.clone())

    def fake_attention(
        q: Any, k: Any, v: Any, sinks: Any, layer: int, scale: float, window: int, softcap: float
    ) -> Any:
        batch, heads, rows, _ = q.shape
        return q.new_empty(batch, rows, heads, v.shape[-1])

    def fake_rotary(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def fake_rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    attention.register_fake(fake_attention)
    rotary.register_fake(fake_rotary)
    rms_norm.register_fake(fake_rms_norm)
    return _translations(torch.ops.specexport)


def attention_translation(on_layer: Callable[[], None]) -> dict[Any, Callable[..., Any]]:
    """How attention is written in ONNX, with a call of ``on_layer`` each time."""
    import torch

    attention = torch.ops.specexport.attention.default
    write = register()[attention]

    @functools.wraps(write)
    def counted(*arguments: Any, **attributes: Any) -> Any:
        on_layer()
        return write(*arguments, **attributes)

    return {attention: counted}


def _translations(ops: Any) -> dict[Any, Callable[..., Any]]:
    import onnx.defs
    from onnxscript import opset23 as op
    from onnxscript.values import Opset

    schema = onnx.defs.OpSchema
    onnx.defs.register_schema(
        schema(
            "Attention",
            CAPTURE_DOMAIN,
            1,
            inputs=[
                schema.FormalParameter(
                    name,
                    "T",
                    param_option=schema.FormalParameterOption.Optional
                    if name == "sinks"
                    else schema.FormalParameterOption.Single,
                )
                for name in ("q", "k", "v", "sinks")
            ],
            outputs=[schema.FormalParameter("y", "T")],
            type_constraints=[("T", ["tensor(float)"], "")],
            attributes=[
                schema.Attribute("layer", schema.AttrType.INT, ""),
                schema.Attribute("scale", schema.AttrType.FLOAT, ""),
                schema.Attribute("window", schema.AttrType.INT, ""),
                schema.Attribute("softcap", schema.AttrType.FLOAT, ""),
            ],
        )
    )
    domain = Opset(CAPTURE_DOMAIN, 1)

    def attention(q: Any, k: Any, v: Any, sinks: Any, layer: int, scale: float, window: int, softcap: float) -> Any:
        inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
        return domain.Attention(*inputs, layer=layer, scale=scale, window=window, softcap=softcap)

    def rotary(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
        width = 2 * int(cos.shape[-1])
        partial = width if width < int(x.shape[-1]) else 0
        return op.RotaryEmbedding(x, cos, sin, interleaved=int(interleaved), rotary_embedding_dim=partial)

    def rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
        return op.RMSNormalization(x, weight, axis=-1, epsilon=epsilon)

    return {ops.attention.default: attention, ops.rotary.default: rotary, ops.rms_norm.default: rms_norm}
