"""A loaded pair against fp32 eager: target, draft, and generated ids."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specexport.exporter.compare_engine import compare_engine
from specexport.exporter.compare_generation import GenerationFigures, compare_prompt, summarize
from specexport.exporter.compare_layers import LayersError, compare_layers
from specexport.exporter.compare_reference import Reference, ReferenceModelError, as_reference
from specexport.exporter.compare_result import CompareOptions, Comparison, EngineComparison
from specexport.exporter.compare_statistics import Ids
from specexport.exporter.compare_text import CompareText, cut_windows, load_text
from specexport.exporter.progress import Progress, Silent
from specexport.plugins.errors import InputError

if TYPE_CHECKING:
    import torch

    Model = torch.nn.Module | Reference

__all__ = ["CompareOptions", "Comparison", "EngineComparison", "compare_engine", "compare_pair"]

#: Tokens of the window on which layers are compared.
LAYER_TOKENS = 256


def compare_pair(
    pair: Any,
    reference: Model,
    text: CompareText | Sequence[int] | str | None = None,
    options: CompareOptions | None = None,
    *,
    draft_reference: Model | None = None,
    reference_name: str = "",
    progress: Progress | None = None,
) -> Comparison:
    """Compare a loaded pair's target, draft and generations with fp32 eager.

    Args:
        pair: `specexport.runtime.load`'s.
        reference: The target's source, loaded in float32.
        text: What to compare on: windows and prompts, or ids [tokens] or a text that are cut into windows of 1,024;
            None for the text that ships.
        options: How; the defaults suit a build's closing comparison.
        draft_reference: The draft's source, for a draft that is another model; one of the target's first layers needs
            none.
        reference_name: For the report.
        progress: Told of each stage.

    Raises:
        InputError: The text or the options cannot be used, or the draft's reference is missing.
        ReferenceModelError: A reference does not fit its engine.
    """
    started = time.perf_counter()
    manifest, progress = pair.manifest, progress or Silent()
    draft = manifest.draft
    chosen = options or CompareOptions()
    if chosen.num_assistant_tokens is None and draft is not None:
        chosen = dataclasses.replace(chosen, num_assistant_tokens=draft.num_assistant_tokens)
    if not isinstance(text, CompareText):
        text = _as_text(pair, text)
    truth = as_reference(reference)
    target = _compare_role(pair.target, truth, text.windows, chosen, progress, "target")
    draft_comparison = None
    if draft is not None and draft.engine is not None:
        if draft_reference is None and draft.kind == "layers":
            draft_reference = cut_reference(reference, draft.layers)
        if draft_reference is None:
            raise InputError(
                f"the draft is another model ({draft.engine.model.source}); give its fp32 reference as well"
            )
        windows = tuple(ids[: pair.draft.engine.context_length] for ids in text.windows)
        draft_comparison = _compare_role(
            pair.draft.engine, as_reference(draft_reference), windows, chosen, progress, "draft"
        )
    generation = None
    if target.figures.nonfinite_rows:
        progress.note("the target's logits are not finite, so no generated ids are compared")
    else:
        generation = _compare_generation(pair, truth, text.prompts, chosen, progress)
    return Comparison(
        reference=reference_name or manifest.target.model.source,
        text=text.source,
        windows=len(text.windows),
        tokens=text.tokens,
        options=chosen,
        target=target,
        draft=draft_comparison,
        generation=generation,
        seconds=time.perf_counter() - started,
    )


def _compare_role(
    engine: Any,
    reference: Reference,
    windows: Sequence[Ids],
    options: CompareOptions,
    progress: Progress,
    role: str,
) -> EngineComparison:
    comparison = compare_engine(
        engine, reference, windows, options=options, progress=progress, title=f"Comparing the {role}"
    )
    if not options.per_layer:
        return comparison
    try:
        layers = compare_layers(engine, reference, windows[0][:LAYER_TOKENS])
    except (LayersError, ReferenceModelError) as error:
        note = f"{engine.entry.model.architecture}: {error}"
        progress.note(f"layers of the {role} are not compared: {note}")
        return dataclasses.replace(comparison, layers_note=note)
    return dataclasses.replace(comparison, layers=layers)


def _compare_generation(
    pair: Any, reference: Reference, prompts: Sequence[Ids], options: CompareOptions, progress: Progress
) -> GenerationFigures | None:
    if not prompts or not options.max_new_tokens:
        return None
    manifest = pair.manifest
    room = manifest.target.context_length - options.max_new_tokens - (options.num_assistant_tokens or 0) - 1
    found = []
    with progress.stage("Comparing generated ids", len(prompts)) as advance:
        for ids in prompts:
            if len(ids) <= room:
                found.append(
                    compare_prompt(
                        pair,
                        reference,
                        ids,
                        speculative=manifest.draft is not None,
                        max_new_tokens=options.max_new_tokens,
                        eos_token_ids=tuple(manifest.tokens.eos_token_ids),
                        vocab_size=manifest.contract.vocab_size,
                        tie_margin=options.tie_margin,
                    )
                )
            advance(1)
    if not found:
        return None
    return summarize(found, max_new_tokens=options.max_new_tokens, tie_margin=options.tie_margin)


def _as_text(pair: Any, text: Sequence[int] | str | None) -> CompareText:
    manifest = pair.manifest
    window = min(1024, manifest.target.context_length)
    bos = manifest.tokens.bos_token_id
    if pair.tokenizer is None and text is not None and not isinstance(text, str):
        return CompareText("given ids", cut_windows(text, window=window, tokens=None, bos_token_id=bos), ())
    shipped = load_text(pair.tokenizer, window=window, bos_token_id=bos)
    if text is None:
        return shipped
    ids = pair.tokenizer.encode(text) if isinstance(text, str) else text
    windows = cut_windows(ids, window=window, tokens=None, bos_token_id=bos)
    return CompareText("given text" if isinstance(text, str) else "given ids", windows, shipped.prompts)


def cut_reference(reference: Model, layers: int | None) -> Model:
    """The reference's first ``layers`` decoder layers as a model of its own, sharing the parameters."""
    import copy

    import torch

    from specexport.exporter.draft.layers import cut_layers

    if layers is None or not isinstance(reference, torch.nn.Module):
        raise InputError(f"no reference can be cut to the draft's {layers} layers; pass draft_reference")
    tensors = [*reference.parameters(), *reference.buffers()]
    return cut_layers(copy.deepcopy(reference, {id(tensor): tensor for tensor in tensors}), layers)
