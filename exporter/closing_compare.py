"""The comparison that ends a build: short, on text that ships, gated, and reported in the bundle."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from specexport.exporter.config import BuildConfig
from specexport.exporter.gates import check_gates, parse_gate
from specexport.exporter.progress import Progress

if TYPE_CHECKING:
    from specexport.exporter.compare import Comparison
    from specexport.exporter.compile import CapturedModel
    from specexport.exporter.draft.capture import CapturedDraft
    from specexport.exporter.gates import Gate
    from specexport.runtime.pair import Pair

# A model that an export has broken is off by more than 1; this is no promise of accuracy, which a recipe's gates are.
DEFAULT_GATES = ("kl_mean>0.05",)
WINDOW = 512
# Logits are what a comparison needs memory for: 128 rows of a vocabulary of 128,000 are 66 MB.
CHUNK = 128
GENERATED_PROMPTS = 1


def build_gates(config: BuildConfig, draft: CapturedDraft) -> list[Gate]:
    """The gates of a build: those given or the recipe's, else one that only a broken export fails.

    Raises:
        InputError: A gate is no expression, or asks for a draft that has no engine.
    """
    gates = [parse_gate(text) for text in config.fail_if or DEFAULT_GATES]
    check_gates(gates, has_draft=draft.model is not None)
    return gates


def compare_build(
    pair: Pair,
    target: CapturedModel,
    draft: CapturedDraft,
    gates: list[Gate],
    config: BuildConfig,
    stage: pathlib.Path,
    progress: Progress,
) -> Comparison | None:
    """Compare the built pair with fp32 eager on ``config.compare_tokens`` tokens; None if that is 0.

    Writes ``report/compare.json`` and ``report/compare.html`` below ``stage``.
    """
    if not config.compare_tokens:
        progress.note("not compared with the original (--compare-tokens 0)")
        return None
    from specexport.exporter.compare import CompareOptions, compare_pair
    from specexport.exporter.compare_text import load_text
    from specexport.exporter.loading import load_reference
    from specexport.exporter.report import write_report

    text = load_text(
        pair.tokenizer,
        window=min(WINDOW, target.context_length),
        tokens=config.compare_tokens,
        bos_token_id=pair.manifest.tokens.bos_token_id if pair.manifest else None,
        generation_prompts=GENERATED_PROMPTS,
    )
    with progress.stage("Loading the reference"):
        reference, draft_reference = load_reference(target.source, target.source_config), draft.reference()
    comparison = compare_pair(
        pair,
        reference,
        text,
        CompareOptions(prefill_chunk=CHUNK, path_tokens=CHUNK),
        draft_reference=draft_reference,
        reference_name=str(target.source),
        progress=progress,
    ).with_gates(gates)
    write_report(comparison.to_json(), stage / "report" / "compare.html", title=f"{config.output.name} against eager")
    return comparison
