"""The attention hook: one operator a layer, with what Transformers says of it, and no mask tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

from specexport.exporter.capture_error import CaptureError
from specexport.exporter.capture_ops import ATTENTION_NAME, register

# Mask pieces of transformers.masking_utils that the cache op's causal, windowed attention expresses.
# The packed-sequence pieces appear because positions are given; consecutive positions make them do nothing.
_CAUSAL = {
    "causal_mask_function",
    "and_masks",
    "sliding_window_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
}


@dataclasses.dataclass
class AttentionLog:
    """What the hook saw while the model was traced.

    Attributes:
        layers: Layer index of every attention call, in order.
        windows: Windows (tokens) that the calls named.
        masked_windows: Windows of the masks that the model asked for.
    """

    layers: list[int] = dataclasses.field(default_factory=list)
    windows: set[int] = dataclasses.field(default_factory=set)
    masked_windows: set[int] = dataclasses.field(default_factory=set)


@contextlib.contextmanager
def attention_hook(on_layer: Callable[[], None] = lambda: None) -> Iterator[AttentionLog]:
    """Register the hook with Transformers under the name ``specexport``; yields the log of this capture.

    Args:
        on_layer: Called at each attention call.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register()
    log = AttentionLog()
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention(log, on_layer))
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _mask(log))
    yield log


def _attention(log: AttentionLog, on_layer: Callable[[], None]) -> Callable[..., Any]:
    def attention(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Any = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> tuple[Any, None]:
        import torch

        layer = getattr(module, "layer_idx", None)
        where = f"{type(module).__name__} (layer {layer})"
        if layer is None:
            raise CaptureError(f"{where} has no layer_idx, so its cache cannot be named")
        if attention_mask is not None:
            raise CaptureError(f"{where} adds a mask or a position bias of its own to the attention scores")
        if is_causal is False or getattr(module, "is_causal", True) is False:
            raise CaptureError(f"{where} is not causal attention")
        if value.shape[-1] != query.shape[-1] or key.shape[-1] != query.shape[-1]:
            raise CaptureError(
                f"{where} has query heads of {query.shape[-1]} and value heads of {value.shape[-1]} channels; "
                "the cache holds heads of one width"
            )
        if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
            raise CaptureError(f"{where} has {query.shape[1]} query heads over {key.shape[1]} key heads")
        log.layers.append(int(layer))
        on_layer()
        if sliding_window:
            log.windows.add(int(sliding_window))
        scale = float(scaling) if scaling is not None else 1 / math.sqrt(query.shape[-1])
        y = torch.ops.specexport.attention(
            query, key, value, s_aux, int(layer), scale, int(sliding_window or 0), float(softcap or 0.0)
        )
        return y, None

    return attention


def _mask(log: AttentionLog) -> Callable[..., Any]:
    def mask(*_: Any, mask_function: Callable[..., Any] | None = None, **__: Any) -> None:
        if mask_function is not None:
            _inspect(mask_function, log)

    return mask


def _inspect(function: Callable[..., Any], log: AttentionLog) -> None:
    """Walk the closures of a mask function; refuse what is neither causal nor a sliding window."""
    kind = function.__qualname__.split(".", maxsplit=1)[0]
    if kind not in _CAUSAL:
        raise CaptureError(f"the model masks attention by {kind}; supported are causal attention and sliding windows")
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    if "sliding_window" in cells:
        log.masked_windows.add(int(cells["sliding_window"].cell_contents))
    for cell in cells.values():
        content = cell.cell_contents
        for inner in content if isinstance(content, tuple) else (content,):
            if inspect.isfunction(inner):
                _inspect(inner, log)
