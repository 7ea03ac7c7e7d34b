"""What the manifest says of an engine, read off its graph, so that it cannot say anything else."""

from __future__ import annotations

import collections
import hashlib
import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from specexport.exporter.artifact import weight_bytes
from specexport.runtime.manifest import (
    BackendFiles,
    CacheLayer,
    CacheLayout,
    EngineEntry,
    FileEntry,
    ModelIdentity,
    TensorEntry,
    WeightsEntry,
)

if TYPE_CHECKING:
    import onnx_ir as ir
    import transformers

    from specexport.exporter.source import Source

ATTENTION = "QuantizedKVAttention"
# Reports may be made anew at any time, so a bundle does not vouch for them.
UNHASHED = ("manifest.json", "report")
CHUNK = 1 << 22


def identify(source: Source, config: transformers.PretrainedConfig, module: Any) -> ModelIdentity:
    """Which model this is: its origin, architecture, the hash of its configuration, and its number of parameters."""
    names = config.architectures or [type(module).__name__]
    return ModelIdentity(
        source=source.identity,
        revision=source.revision,
        architecture=names[0],
        config_sha256=hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest(),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
    )


def describe_engine(
    lowered: ir.Model,
    *,
    identity: ModelIdentity,
    config: Any,
    context_length: int,
    files: Mapping[str, BackendFiles],
) -> EngineEntry:
    """The manifest's entry for one engine, from its lowered graph."""
    outputs = _tensors(lowered.graph.outputs)
    vocab_size = outputs[0].shape[-1]
    if not isinstance(vocab_size, int):
        raise TypeError(f"the graph's logits have no fixed vocabulary: {outputs[0].shape}")
    return EngineEntry(
        model=identity,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        context_length=context_length,
        engines=files,
        inputs=_tensors(lowered.graph.inputs),
        outputs=outputs,
        cache=CacheLayout(tuple(_cache_layers(lowered))),
        weights=WeightsEntry(summary=_weight_summary(lowered), bytes=weight_bytes(lowered)),
    )


def op_versions(model: ir.Model) -> dict[str, int]:
    """``domain::name`` of every op of ours in ``model``, with the version of its specification."""
    found = {
        f"{node.domain}::{node.op_type}": node.version or model.graph.opset_imports[node.domain]
        for node in model.graph
        if node.domain.startswith("specexport")
    }
    return dict(sorted(found.items()))


def hash_files(directory: pathlib.Path) -> dict[str, FileEntry]:
    """Every file that the bundle vouches for, by relative POSIX path."""
    entries = {}
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if path.is_file() and relative.parts[0] not in UNHASHED:
            entries[relative.as_posix()] = FileEntry(sha256=_sha256(path), bytes=path.stat().st_size)
    return entries


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _tensors(values: Iterable[ir.Value]) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(
            name=str(value.name),
            dtype=str(value.dtype.numpy()),  # type: ignore[union-attr]
            shape=tuple(axis if isinstance(axis, int) else str(axis.value) for axis in value.shape or ()),
        )
        for value in values
    )


def _cache_layers(model: ir.Model) -> Iterable[CacheLayer]:
    caches = {value.name: value for value in model.graph.inputs}
    for node in model.graph:
        if node.op_type != ATTENTION:
            continue
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        cache = caches[node.inputs[1].name]  # type: ignore[union-attr]
        yield CacheLayer(
            kv_num_heads=attributes["kv_num_heads"],
            head_dim=int(cache.shape[3]),  # type: ignore[index, arg-type]
            key_bits=attributes["key_bits"],
            value_bits=attributes["value_bits"],
            key_group_size=attributes["key_group_size"],
            value_group_size=attributes["value_group_size"],
            window=attributes["window"],
        )


def _weight_summary(model: ir.Model) -> dict[str, int]:
    """Scheme to number of matrices, the fused ones counted as one."""
    counts: collections.Counter[str] = collections.Counter()
    for node in model.graph:
        if node.op_type not in ("QuantizedLinear", "QuantizedEmbedding"):
            continue
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        minimum = " with minimum" if attributes.get("has_minimum") else ""
        group = f" in groups of {attributes['group_size']}" if attributes["bits"] < 16 else ""
        kind = "fp32" if attributes["bits"] == 32 else f"int{attributes['bits']}"
        counts[kind + group + minimum] += 1
    return dict(sorted(counts.items()))
