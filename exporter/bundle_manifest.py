"""The manifest of a bundle: first while it is being built, then with what was measured."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
from typing import TYPE_CHECKING, Any

from specexport.exporter.config import BuildConfig
from specexport.exporter.entries import hash_files
from specexport.runtime.manifest import FORMAT_VERSION, ContractEntry, DraftEntry, Manifest, TokensEntry

if TYPE_CHECKING:
    from specexport.exporter.compare import Comparison
    from specexport.exporter.compile import CompiledEngine
    from specexport.exporter.contract import Contract
    from specexport.exporter.tokenizer_files import TokenizerFiles

TOOLS = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "tokenizers", "numpy")


def assemble_manifest(
    config: BuildConfig,
    target: CompiledEngine,
    draft_engine: CompiledEngine | None,
    draft: DraftEntry | None,
    contract: Contract,
    tokenizer: TokenizerFiles,
    stage: pathlib.Path,
) -> Manifest:
    """The manifest of what lies below ``stage``, marked as not finished; writes ``report/passes.json`` beside."""
    engines = {"target": target} | ({} if draft_engine is None else {"draft": draft_engine})
    passes = {role: [record.to_json() for record in engine.records] for role, engine in engines.items()}
    report = stage / "report"
    report.mkdir(exist_ok=True)
    (report / "passes.json").write_text(json.dumps(passes, indent=1, sort_keys=True) + "\n")
    return Manifest(
        format_version=FORMAT_VERSION,
        specexport_version=importlib.metadata.version("specexport"),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        status="building",
        tools={name: importlib.metadata.version(name) for name in TOOLS},
        build=config.to_json(),
        ops={name: version for engine in engines.values() for name, version in engine.ops.items()},
        target=target.entry,
        draft=draft,
        contract=ContractEntry(**dataclasses.asdict(contract)),
        tokens=TokensEntry(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_ids=tokenizer.eos_token_ids,
            pad_token_id=tokenizer.pad_token_id,
        ),
        files=hash_files(stage),
        passes=passes,
        measured={},
        accuracy={},
    )


def conclude(manifest: Manifest, measured: dict[str, Any], comparison: Comparison | None) -> Manifest:
    """The finished manifest: costs, accuracy, and whether the gates hold."""
    status = "not_compared" if comparison is None else "ok" if comparison.passed else "failed_accuracy"
    accuracy = {} if comparison is None else comparison.short()
    return dataclasses.replace(manifest, status=status, measured=measured, accuracy=accuracy)
