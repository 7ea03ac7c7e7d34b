"""Rotary embeddings as tables: Transformers' own cosines and sines for every position, gathered by position."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from specexport.exporter.capture_error import CaptureError


@dataclasses.dataclass(frozen=True)
class RotaryStyle:
    """How a model file's ``apply_rotary_pos_emb`` turns vectors, found by trying it.

    Attributes:
        interleaved: Pairs are (2i, 2i+1); otherwise (i, i + R/2).
        partial: Channels beyond the tables' width pass through unchanged inside the function.
    """

    interleaved: bool
    partial: bool


def find_rotary_modules(model: Any) -> dict[str, Any]:
    """The rotary-embedding modules of ``model`` by name (those whose forward takes position ids)."""
    return {
        name: module
        for name, module in model.named_modules()
        if "RotaryEmbedding" in type(module).__name__ and "position_ids" in inspect.signature(module.forward).parameters
    }


def layer_types(rotary: Any) -> list[str | None]:
    """The layer types that ``rotary`` makes separate tables for; ``[None]`` where it makes one."""
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return [None]
    return sorted(rotary.rope_type) if isinstance(rotary.rope_type, dict) else [None]


def rope_kinds(rotary: Any) -> set[str]:
    """The RoPE kinds (``default``, ``llama3``, ``yarn`` …) of a rotary module."""
    kind = getattr(rotary, "rope_type", "default")
    return set(kind.values()) if isinstance(kind, dict) else {str(kind)}


def rope_tables(rotary: Any, context_length: int, layer_type: str | None = None) -> tuple[Any, Any]:
    """Cosines and sines of positions 0..context_length-1, float32 (context_length, R), as the module gives them.

    One call for all positions, so scaling that depends on the longest position (longrope) is that of
    ``context_length``. The module itself is left as it was.

    Raises:
        CaptureError: The kind of RoPE depends on the length of each sequence (dynamic NTK).
    """
    import torch

    if any("dynamic" in kind for kind in rope_kinds(rotary)):
        raise CaptureError(
            f"{type(rotary).__name__} uses RoPE of kind 'dynamic', whose frequencies change with the length of the "
            "sequence, so no table of positions holds it; set another rope_type (yarn, linear) in config.json"
        )
    clone = copy.deepcopy(rotary).to("cpu")
    with torch.no_grad():
        arguments = {} if layer_type is None else {"layer_type": layer_type}
        result = clone(
            torch.zeros(1, 1, 1), position_ids=torch.arange(context_length, dtype=torch.int64)[None], **arguments
        )
    if not isinstance(result, tuple) or len(result) != 2:
        raise CaptureError(f"{type(rotary).__name__} gives no pair of cosines and sines")
    cos, sin = result
    return cos[0].float().contiguous(), sin[0].float().contiguous()


def compact(table: Any) -> tuple[str, Any]:
    """Drop the repetition of a (P, R) table: how it repeats (``halves``, ``pairs``, ``none``), and (P, R/2)."""
    import torch

    half = table.shape[-1] // 2
    if torch.equal(table[:, :half], table[:, half:]):
        return "halves", table[:, :half].contiguous()
    if torch.equal(table[:, ::2], table[:, 1::2]):
        return "pairs", table[:, ::2].contiguous()
    return "none", table


def rotate(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Rotate the first R channels of x (B, H, S, D) by cos, sin (B, S, R/2): the meaning that a style is held to."""
    import torch

    cos, sin = cos[:, None], sin[:, None]
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = (
        (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., : width // 2], turned[..., width // 2 :])
    )
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def probe_style(function: Callable[..., Any], cos: Any, sin: Any) -> RotaryStyle | None:
    """Find by trial which rotation ``apply_rotary_pos_emb`` does with tables (P, R); None if neither known one."""
    import torch

    rows = min(5, cos.shape[0])
    cos, sin = cos[-rows:][None], sin[-rows:][None]
    small_cos, small_sin = compact(cos[0])[1][None], compact(sin[0])[1][None]
    width = 2 * small_cos.shape[-1]

    def agrees(interleaved: bool, extra: int) -> bool:
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(1, 2, rows, width + extra, generator=generator)
        k = torch.randn(1, 1, rows, width + extra, generator=generator)
        try:
            q_turned, k_turned = function(q, k, cos, sin)
        except (RuntimeError, TypeError, ValueError):
            return False
        return all(
            have.shape == want.shape and torch.allclose(have, want, atol=1e-5, rtol=1e-5)
            for have, want in (
                (q_turned, rotate(q, small_cos, small_sin, interleaved)),
                (k_turned, rotate(k, small_cos, small_sin, interleaved)),
            )
        )

    for interleaved in (False, True):
        if agrees(interleaved, 0):
            return RotaryStyle(interleaved, agrees(interleaved, 8))
    return None


@contextlib.contextmanager
def rope_as_tables(model: Any, context_length: int, whole_op: bool = True) -> Iterator[bool]:
    """While open, ``model`` gathers its cosines from tables, and rotates by one operator where that is provable.

    Args:
        model: The causal language model.
        context_length: Rows of the tables.
        whole_op: Also replace ``apply_rotary_pos_emb`` by the operator ``specexport::rotary``.

    Yields:
        Whether the rotation was replaced. Then cos and sin carry R/2 channels.
    """
    import torch

    rotaries = find_rotary_modules(model)
    tables = {
        name: {kind: rope_tables(module, context_length, kind) for kind in layer_types(module)}
        for name, module in rotaries.items()
    }
    sources = {sys.modules[type(module).__module__] for module in rotaries.values()}
    styles: dict[Any, RotaryStyle] = {}
    for name, module in rotaries.items():
        source = sys.modules[type(module).__module__]
        function = getattr(source, "apply_rotary_pos_emb", None)
        found = [probe_style(function, *pair) for pair in tables[name].values()] if function else [None]
        if found[0] is not None and all(style == found[0] for style in found):
            styles[source] = found[0]
    replaced = whole_op and bool(sources) and set(styles) == sources
    with contextlib.ExitStack() as undo:
        for name, module in rotaries.items():
            for kind, pair in tables[name].items():
                for label, table in zip(("cos", "sin"), pair):
                    buffer = f"specexport_{label}" + ("" if kind is None else f"_{kind}")
                    value = compact(table)[1] if replaced else table
                    module.register_buffer(buffer, value, persistent=False)
                    undo.callback(module._buffers.pop, buffer)
            module.forward = _gather(module)
            undo.callback(delattr, module, "forward")
        if replaced:
            for source, style in styles.items():
                original = source.apply_rotary_pos_emb
                source.apply_rotary_pos_emb = _apply(style, torch.ops.specexport.rotary)
                undo.callback(setattr, source, "apply_rotary_pos_emb", original)
        yield replaced


def _gather(module: Any) -> Callable[..., Any]:
    def forward(x: Any, position_ids: Any, layer_type: str | None = None) -> tuple[Any, Any]:
        import torch.nn.functional as F

        suffix = "" if layer_type is None else f"_{layer_type}"
        cos = F.embedding(position_ids, getattr(module, f"specexport_cos{suffix}"))
        return cos, F.embedding(position_ids, getattr(module, f"specexport_sin{suffix}"))

    return forward


def _apply(style: RotaryStyle, rotary: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary_pos_emb(
        q: Any, k: Any, cos: Any, sin: Any, *unused: Any, unsqueeze_dim: int = 1, **also_unused: Any
    ) -> tuple[Any, Any]:
        def turn(x: Any) -> Any:
            if unsqueeze_dim == 2:
                return turn_heads_first(x.transpose(1, 2)).transpose(1, 2)
            return turn_heads_first(x)

        def turn_heads_first(x: Any) -> Any:
            if x.shape[-1] != 2 * cos.shape[-1] and not style.partial:
                raise CaptureError(
                    f"the rotary tables have {2 * cos.shape[-1]} channels but the heads have {x.shape[-1]}"
                )
            return rotary(x, cos, sin, style.interleaved)

        return turn(q), turn(k)

    return apply_rotary_pos_emb
