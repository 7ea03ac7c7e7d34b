"""`specexport inspect`: the manifest, for a person or as JSON."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from specexport.runtime.manifest import EngineEntry, Manifest

WIDTH = 14


@click.command()
@click.argument("bundle", type=click.Path(path_type=pathlib.Path))
@click.option("--verify", is_flag=True, help="Check every file's hash, and that this specexport can run the bundle.")
@click.option("--json", "as_json", is_flag=True, help="The manifest as JSON.")
def inspect(bundle: pathlib.Path, verify: bool, as_json: bool) -> None:
    """Show what BUNDLE holds: models, weights, caches, draft, accuracy, files."""
    from specexport.runtime.bundle import open_bundle
    from specexport.runtime.manifest import Manifest

    manifest = open_bundle(bundle, allow_failed=True).manifest if verify else Manifest.read(bundle)
    if as_json:
        click.echo(json.dumps(manifest.to_json(), indent=2, sort_keys=True, ensure_ascii=False))
        return
    for name, value in _lines(manifest):
        if not name:
            click.echo()
        elif value is None:
            click.secho(name, bold=True)
        else:
            click.echo(f"  {name:<{WIDTH}}{value}")
    if verify:
        click.echo()
        click.secho(f"All {len(manifest.files)} files are what the manifest says.", fg="green")


def _lines(manifest: Manifest) -> Iterator[tuple[str, str | None]]:
    """(label, value), (heading, None) and ("", None) between sections."""
    status = {"ok": "green", "failed_accuracy": "red", "not_compared": "yellow"}[manifest.status]
    yield "Bundle", None
    yield "status", click.style(manifest.status, fg=status)
    yield "created", f"{manifest.created} by specexport {manifest.specexport_version}"
    yield "tools", ", ".join(f"{name} {version}" for name, version in sorted(manifest.tools.items()))
    yield "ops", ", ".join(f"{name} v{version}" for name, version in sorted(manifest.ops.items()))
    yield "", None
    yield "Target", None
    yield from _engine_lines(manifest.target)
    yield "", None
    yield "Draft", None
    if manifest.draft is None:
        yield "kind", "none: plain decoding"
    else:
        draft = manifest.draft
        details = {"ngram": f" of up to {draft.max_ngram_size} tokens", "layers": f":{draft.layers}"}
        yield "kind", f"{draft.kind}{details.get(draft.kind, '')}"
        yield "drafted", f"{draft.num_assistant_tokens} tokens per step"
        if draft.engine is not None:
            yield from _engine_lines(draft.engine)
    yield "", None
    yield "Contract", None
    contract = manifest.contract
    yield "vocabulary", f"{contract.vocab_size} tokens, {contract.masked_tail} masked"
    yield "end of text", ", ".join(map(str, manifest.tokens.eos_token_ids)) or "no id"
    for note in contract.notes:
        yield "note", note
    for heading, free in (("Accuracy", manifest.accuracy), ("Measured", manifest.measured)):
        if free:
            yield "", None
            yield heading, None
            yield from _free_lines(free)
    yield "", None
    yield "Files", None
    for name, entry in sorted(manifest.files.items()):
        yield _size(entry.bytes), name
    yield "total", _size(sum(entry.bytes for entry in manifest.files.values()))


def _engine_lines(entry: EngineEntry) -> Iterator[tuple[str, str | None]]:
    model = entry.model
    revision = f" @ {model.revision[:12]}" if model.revision else ""
    yield "model", f"{model.source}{revision}"
    yield "architecture", f"{model.architecture}, {model.parameters / 1e6:.1f} M parameters"
    yield "shape", f"{entry.num_hidden_layers} layers, hidden {entry.hidden_size}, vocabulary {entry.vocab_size}"
    yield "context", f"{entry.context_length} positions"
    kinds = ", ".join(f"{count} x {scheme}" for scheme, count in sorted(entry.weights.summary.items()))
    yield "weights", f"{_size(entry.weights.bytes)}: {kinds}"
    bits = sorted({(layer.key_bits, layer.value_bits) for layer in entry.cache.layers})
    schemes = ", ".join(f"keys {key} bits, values {value} bits" for key, value in bits)
    yield "cache", f"{schemes}; {_size(_cache_bytes(entry))} per 1,000 positions"
    yield "engines", ", ".join(sorted(entry.engines))


def _cache_bytes(entry: EngineEntry, positions: int = 1000) -> int:
    """Bytes that ``positions`` positions of one sequence take, scales included."""
    total = 0
    for layer in entry.cache.layers:
        for bits, group in ((layer.key_bits, layer.key_group_size), (layer.value_bits, layer.value_group_size)):
            scales = 2 * layer.head_dim // group if group and bits < 16 else 0
            total += layer.kv_num_heads * (layer.head_dim * bits // 8 + scales) * positions
    return total


def _free_lines(free: Any, prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Any JSON object as dotted lines; long lists are counted, not shown."""
    for key, value in sorted(free.items()):
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _free_lines(value, f"{name}.")
        elif isinstance(value, list) and len(value) > 12:
            yield f"{name} ", f"{len(value)} values"
        else:
            text = f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
            yield f"{name} ", text


def _size(count: float) -> str:
    """Bytes with a unit of 1000s."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
