"""A small bundle on disk: real files, real hashes, engines that are no engines."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from typing import Any

from specexport.runtime.manifest import (
    BackendFiles,
    CacheLayer,
    CacheLayout,
    ContractEntry,
    DraftEntry,
    EngineEntry,
    FileEntry,
    Manifest,
    ModelIdentity,
    TensorEntry,
    TokensEntry,
    WeightsEntry,
)

FILES = {
    "engines/cpu/target.onnx": b"target",
    "engines/cpu/draft.onnx": b"draft",
    "engines/cpu/weights.bin": b"\x00\x01\x02\x03" * 1000,
    "tokenizer.json": b"{}",
}


def engine_entry(name: str = "target", **changes: Any) -> EngineEntry:
    """One layer with an int8 key cache and a float16 value cache."""
    layer = CacheLayer(2, 8, 8, 16, 4, 0, 0)
    entry = EngineEntry(
        model=ModelIdentity("org/tiny", "abc123", "LlamaForCausalLM", "00ff", 1234),
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=1,
        context_length=64,
        engines={"cpu": BackendFiles(f"engines/cpu/{name}.onnx", "engines/cpu/weights.bin")},
        inputs=(TensorEntry("input_ids", "int64", ("batch", "sequence")),),
        outputs=(TensorEntry("logits", "float32", ("rows", 16)),),
        cache=CacheLayout((layer,)),
        weights=WeightsEntry({"int4+minimum": 7, "fp32": 3}, 4000),
    )
    return dataclasses.replace(entry, **changes)


def manifest(**changes: Any) -> Manifest:
    """A manifest that is right about FILES."""
    entry = Manifest(
        format_version=1,
        specexport_version="0.1.0",
        created="2026-12-01T12:00:00Z",
        status="ok",
        tools={"torch": "2.13.0"},
        build={"model": "org/tiny"},
        ops={"specexport::QuantizedKVAttention": 1, "specexport.cpu::QuantizedLinear": 1},
        target=engine_entry(),
        draft=DraftEntry("layers", 4, layers=1, engine=engine_entry("draft")),
        contract=ContractEntry(16, 16, 16, 0, ("same tokenizer",)),
        tokens=TokensEntry(1, (2, 5), None),
        files={name: file_entry(data) for name, data in FILES.items()},
        passes={"target": [], "draft": []},
        measured={},
        accuracy={"target": {"kl_mean": 0.0025}},
    )
    return dataclasses.replace(entry, **changes)


def file_entry(data: bytes) -> FileEntry:
    """What the manifest says of a file that holds ``data``."""
    return FileEntry(hashlib.sha256(data).hexdigest(), len(data))


def write_bundle(directory: pathlib.Path, **changes: Any) -> pathlib.Path:
    """FILES and their manifest in ``directory``."""
    for name, data in FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    manifest(**changes).write(directory)
    return directory
