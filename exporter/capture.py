"""A Transformers causal language model to an ONNX graph: attention as one op a layer, weights by reference."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from specexport.exporter.capture_attention import attention_hook
from specexport.exporter.capture_error import CaptureError
from specexport.exporter.capture_norm import rms_norms_whole
from specexport.exporter.capture_ops import ATTENTION_NAME, register
from specexport.exporter.capture_rope import find_rotary_modules, rope_as_tables, rope_kinds

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

OPSET = 23
# Key of the captured model's metadata: a JSON list of sentences for the build's report.
NOTES_KEY = "specexport.capture_notes"
Progress = Callable[[str], None]


def skeleton(config: Any) -> torch.nn.Module:
    """The causal language model of ``config`` with our attention; its parameters are allocated but never written.

    Args:
        config: A ``transformers`` configuration.

    Returns:
        A module in eval mode. Its parameters' memory was not touched (it costs address space, not memory) and
        holds nothing of meaning; buffers are real.

    Raises:
        CaptureError: The architecture has no causal language model, or no place for our attention.
    """
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    architecture = architecture_of(config)
    if getattr(config, "is_encoder_decoder", False):
        raise CaptureError(f"{architecture} is an encoder-decoder; only decoder-only models are supported")
    with attention_hook(), no_init_weights(), quiet():
        try:
            factory: Any = transformers.AutoModelForCausalLM
            model: torch.nn.Module = factory.from_config(
                config, dtype=torch.float32, attn_implementation=ATTENTION_NAME
            )
        except ValueError as error:
            raise CaptureError(
                f"{architecture} has no causal language model that takes an attention function: {_first(error)}"
            ) from error
        if getattr(type(model), "_can_set_experts_implementation", lambda: False)():
            model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise CaptureError(f"{architecture} has no output head (get_output_embeddings)")
    for module in find_rotary_modules(model).values():
        if any("dynamic" in kind for kind in rope_kinds(module)):
            raise CaptureError(
                f"{architecture} uses RoPE of kind 'dynamic', whose frequencies change with the length of the "
                "sequence, so no table of positions holds it; set another rope_type (yarn, linear) in config.json"
            )
    model.tie_weights()  # type: ignore[operator]  # no_init_weights leaves this out too
    return model.eval()


def capture(module: torch.nn.Module, *, context_length: int, progress: Progress | None = None) -> ir.Model:
    """Trace ``module`` into an ONNX graph whose weights are references.

    Args:
        module: From ``skeleton``, or any causal language model with attention implementation ``specexport``.
        context_length: Positions that the graph knows: rows of the rotary tables.
        progress: Called with a few words before each slow step.

    Returns:
        Inputs ``input_ids`` int64 [batch, sequence], ``past_length`` int64 [batch], ``logits_rows`` int64
        [rows]; output ``logits`` float32 [rows, vocab]. Each layer has one
        ``specexport.capture::Attention`` node. Parameters are initializers named as in the state dict, tied
        ones once, without data; rotary tables are initializers with data.

    Raises:
        CaptureError: A part of the model cannot be expressed; names the architecture and the part.
    """
    import torch

    from specexport.exporter.capture_graph import finish

    say = progress or (lambda _: None)
    architecture = architecture_of(module.config)
    limit = _learned_positions(module)
    if limit is not None and context_length > limit:
        raise CaptureError(
            f"{architecture} has learned positions for {limit} tokens; a context of {context_length} is too long"
        )
    translations = register()
    try:
        with attention_hook() as log, quiet(), torch.no_grad(), contextlib.ExitStack() as patches:
            patches.enter_context(rms_norms_whole(module))
            patches.enter_context(rope_as_tables(module, context_length))
            patches.enter_context(_head_of_rows(module))
            say("tracing")
            program = _trace(module)
            say("writing the graph")
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=translations,
                verbose=False,
                optimize=False,
            )
            assert onnx_program is not None
            say("naming")
            model = finish(onnx_program.model, module)
    except CaptureError as error:
        raise CaptureError(f"{architecture}: {error}") from error
    except Exception as error:
        cause = _find_capture_error(error)
        if cause is not None:
            raise CaptureError(f"{architecture}: {cause}") from error
        raise CaptureError(f"{architecture} cannot be traced by torch.export: {_first(error)}") from error
    config: Any = module.config
    expected = int(config.get_text_config().num_hidden_layers)
    if sorted(log.layers) != list(range(expected)):
        raise CaptureError(
            f"{architecture}: {len(log.layers)} of {expected} layers call Transformers' attention interface; "
            "every layer must, once"
        )
    if not log.masked_windows <= log.windows:
        raise CaptureError(
            f"{architecture} masks with windows {sorted(log.masked_windows)} that its attention layers do not name"
        )
    model.metadata_props[NOTES_KEY] = json.dumps(_notes(module, context_length))
    return model


def architecture_of(config: Any) -> str:
    """The architecture's name for messages: the class that the checkpoint names, or the model type."""
    names = getattr(config, "architectures", None)
    return str(names[0] if names else getattr(config, "model_type", type(config).__name__))


def _trace(module: torch.nn.Module) -> torch.export.ExportedProgram:
    import torch

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, input_ids: Any, past_length: Any, logits_rows: Any) -> Any:
            steps = torch.arange(input_ids.shape[1], dtype=torch.int64)
            module.__dict__["specexport_logits_rows"] = logits_rows
            try:
                return self.model(
                    input_ids=input_ids, position_ids=past_length[:, None] + steps[None], **arguments
                ).logits
            finally:
                del module.__dict__["specexport_logits_rows"]

    accepted = inspect.signature(module.forward).parameters
    if "position_ids" not in accepted:
        raise CaptureError("its forward takes no position_ids, so a cached prefix cannot be placed")
    arguments = {"use_cache": False}
    if "output_router_logits" in accepted:
        arguments["output_router_logits"] = False
    batch, sequence, rows = (torch.export.Dim(n, min=1, max=1 << 30) for n in ("batch", "sequence", "rows"))
    example = (
        torch.zeros(2, 7, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(5, dtype=torch.int64),
    )
    return torch.export.export(
        Decoder().eval(), example, dynamic_shapes=({0: batch, 1: sequence}, {0: batch}, {0: rows}), strict=False
    )


@contextlib.contextmanager
def _head_of_rows(module: torch.nn.Module) -> Iterator[None]:
    """While open, the output head sees only the wanted rows of the flattened batch."""
    head = module.get_output_embeddings()  # type: ignore[operator]

    def forward(hidden: Any) -> Any:
        rows = module.__dict__["specexport_logits_rows"]
        return type(head).forward(head, hidden.flatten(0, -2).index_select(0, rows))

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's and Transformers' warnings and log lines off stderr."""
    loggers = [logging.getLogger(n) for n in ("torch.onnx", "torch.export", "transformers", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)


def _learned_positions(module: torch.nn.Module) -> int | None:
    """Rows of a learned position table, None without one."""
    import torch

    names = {"wpe", "embed_positions", "position_embeddings"}
    for name, part in module.named_modules():
        if name.rsplit(".", 1)[-1] in names and isinstance(part, torch.nn.Embedding):
            return int(part.num_embeddings)
    return None


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
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
