"""A Transformers causal language model to an ONNX graph: attention as one op a layer, weights by reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specexport.exporter.capture_attention import attention_hook
from specexport.exporter.capture_check import (
    architecture_of,
    check_attention,
    check_config,
    check_context,
    check_skeleton,
)
from specexport.exporter.capture_error import CaptureError
from specexport.exporter.capture_norm import rms_norms_whole
from specexport.exporter.capture_ops import ATTENTION_NAME, attention_translation, register
from specexport.exporter.capture_rope import find_rotary_modules, rope_as_tables, rope_kinds
from specexport.exporter.capture_trace import quiet, trace

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

OPSET = 23
# Key of the captured model's metadata: a JSON list of sentences for the build's report.
NOTES_KEY = "specexport.capture_notes"
LAYER_STEPS = 2  # each layer is traced, then written


def skeleton(config: Any) -> torch.nn.Module:
    """The causal language model of ``config`` with our attention; its parameters are allocated but never written.

    Args:
        config: A ``transformers`` configuration.

    Returns:
        A module in eval mode. Its parameters' memory was not touched (it costs address space, not memory) and
        holds nothing of meaning; buffers are real.

    Raises:
        CaptureError: The architecture has no causal language model, or a part that cannot be captured.
    """
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    check_config(config)
    with attention_hook(), no_init_weights(), quiet():
        try:
            factory: Any = transformers.AutoModelForCausalLM
            model: torch.nn.Module = factory.from_config(
                config, dtype=torch.float32, attn_implementation=ATTENTION_NAME
            )
        except Exception as error:  # Models check their configurations in their own ways.
            raise CaptureError(
                f"{architecture_of(config)} has no causal language model that takes an attention function: "
                f"{_first(error)}"
            ) from error
        if getattr(type(model), "_can_set_experts_implementation", lambda: False)():
            # One batched product over the chosen experts; the others loop over data-dependent counts.
            model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    check_skeleton(model)
    model.tie_weights()  # type: ignore[operator]  # no_init_weights leaves this out too
    return model.eval()


def capture(module: torch.nn.Module, *, context_length: int, on_layer: Callable[[], None] = lambda: None) -> ir.Model:
    """Trace ``module`` into an ONNX graph whose weights are references.

    Args:
        module: From ``skeleton``, or any causal language model with attention implementation ``specexport``.
        context_length: Positions that the graph knows: rows of the rotary tables.
        on_layer: Called `LAYER_STEPS` times for each layer, as the work goes on.

    Returns:
        Inputs ``input_ids`` int64 [batch, sequence], ``past_length`` int64 [batch], ``logits_rows`` int64
        [rows]; output ``logits`` float32 [rows, vocab]. Each layer has one
        ``specexport.capture::Attention`` node. Parameters are initializers named as in the state dict, tied
        ones once, without data; rotary tables are initializers with data.

    Raises:
        CaptureError: A part of the model cannot be expressed; names the architecture and the part.
    """
    check_context(module, context_length)
    try:
        try:
            model = _capture(module, context_length, on_layer, whole_rotary=True)
        except CaptureError:
            raise
        except Exception as error:
            if _find_capture_error(error) is not None or not find_rotary_modules(module):
                raise
            # Perhaps some layer rotates by a function of its own, which needs the tables as Transformers has them.
            model = _capture(module, context_length, on_layer, whole_rotary=False)
    except Exception as error:
        cause = _find_capture_error(error)
        reason = f"cannot be traced by torch.export: {_first(error)}" if cause is None else str(cause)
        raise CaptureError(f"{architecture_of(module.config)}: {reason}") from error
    model.metadata_props[NOTES_KEY] = json.dumps(_notes(module, context_length))
    return model


def _capture(
    module: torch.nn.Module, context_length: int, on_layer: Callable[[], None], *, whole_rotary: bool
) -> ir.Model:
    import torch

    from specexport.exporter.capture_graph import finish

    translations = {**register(), **attention_translation(on_layer)}
    with (
        attention_hook(on_layer) as log,
        quiet(),
        torch.no_grad(),
        rms_norms_whole(module),
        rope_as_tables(module, context_length, whole_op=whole_rotary),
    ):
        program = trace(module)
        check_attention(module, log)
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=translations,
            verbose=False,
            optimize=False,
        )
        assert onnx_program is not None
        return finish(onnx_program.model, module)


def _notes(module: torch.nn.Module, context_length: int) -> list[str]:
    notes = []
    for name, rotary in find_rotary_modules(module).items():
        if "longrope" not in rope_kinds(rotary):
            continue
        parameters = rotary.config.rope_parameters
        original = parameters.get("original_max_position_embeddings", rotary.config.max_position_embeddings)
        kind = "long" if context_length > original else "short"
        notes.append(
            f"{name}: longrope tables use the {kind} factors at every position "
            f"(context {context_length}, original {original})"
        )
    return notes


def _find_capture_error(error: BaseException | None) -> CaptureError | None:
    while error is not None:
        if isinstance(error, CaptureError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _first(error: BaseException) -> str:
    """The first line of what an error started with."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
