"""What is refused by name: architectures that the graph cannot express, found before and after tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specexport.exporter.capture_attention import AttentionLog
from specexport.exporter.capture_error import CaptureError
from specexport.exporter.capture_rope import find_rotary_modules, rope_kinds

if TYPE_CHECKING:
    import torch

# Kinds of layers that attend over all or over a window of the tokens before; all others keep another state.
_ATTENTION_KINDS = {"full_attention", "sliding_attention", "attention"}
_LEARNED_POSITIONS = ("wpe", "embed_positions", "position_embeddings")


def architecture_of(config: Any) -> str:
    """The architecture's name for messages: the class that the checkpoint names, or the model type."""
    names = getattr(config, "architectures", None)
    return str(names[0] if names else getattr(config, "model_type", type(config).__name__))


def check_config(config: Any) -> None:
    """Refuse by the configuration alone.

    Raises:
        CaptureError: An encoder-decoder, or layers that are not plain attention.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise CaptureError(f"{architecture_of(config)} is an encoder-decoder; only decoder-only models are supported")
    text = config.get_text_config()
    for field in ("layer_types", "layers_block_type"):
        kinds = getattr(text, field, None)
        others = sorted({str(kind) for kind in kinds} - _ATTENTION_KINDS) if isinstance(kinds, (list, tuple)) else []
        if others:
            raise CaptureError(
                f"{architecture_of(config)} has layers of kind {', '.join(others)}; "
                "supported are full attention and sliding windows"
            )


def check_skeleton(model: torch.nn.Module) -> None:
    """Refuse by the modules of a model.

    Raises:
        CaptureError: No output head, or RoPE that no table holds.
    """
    name = architecture_of(model.config)
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise CaptureError(f"{name} has no output head (get_output_embeddings)")
    for module in find_rotary_modules(model).values():
        if any("dynamic" in kind for kind in rope_kinds(module)):
            raise CaptureError(
                f"{name} uses RoPE of kind 'dynamic', whose frequencies change with the length of the "
                "sequence, so no table of positions holds it; set another rope_type (yarn, linear) in config.json"
            )


def check_context(model: torch.nn.Module, context_length: int) -> None:
    """Refuse a context that a learned position table does not reach.

    Raises:
        CaptureError: The table is shorter.
    """
    limit = learned_positions(model)
    if limit is not None and context_length > limit:
        raise CaptureError(
            f"{architecture_of(model.config)} has learned positions for {limit} tokens; "
            f"a context of {context_length} is too long"
        )


def learned_positions(model: torch.nn.Module) -> int | None:
    """Tokens that a learned position table is for, None without one."""
    import torch

    for name, part in model.named_modules():
        if name.rsplit(".", 1)[-1] in _LEARNED_POSITIONS and isinstance(part, torch.nn.Embedding):
            # OPT and its kin keep the first rows for padding.
            return int(part.num_embeddings) - int(getattr(part, "offset", 0))
    return None


def check_attention(model: torch.nn.Module, log: AttentionLog) -> None:
    """Refuse a traced model whose attention was not all seen.

    Raises:
        CaptureError: A layer does not call the attention interface, or its masks and its windows differ.
    """
    config: Any = model.config
    name, expected = architecture_of(config), int(config.get_text_config().num_hidden_layers)
    if sorted(log.layers) != list(range(expected)):
        raise CaptureError(
            f"{name}: {len(log.layers)} of {expected} layers call Transformers' attention interface; "
            "every layer must, once"
        )
    if log.masked_windows != log.windows:
        raise CaptureError(
            f"{name} masks with windows {sorted(log.masked_windows)} where its attention layers name "
            f"{sorted(log.windows)}; which one holds is not clear"
        )
