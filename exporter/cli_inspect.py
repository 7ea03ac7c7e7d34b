"""`specexport inspect`: the manifest, for a person or as JSON."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from specexport.runtime.manifest import DraftEntry, EngineEntry, Manifest

Lines = list[tuple[str, str]]  # label and value

MAX_LIST = 12  # longer lists are counted, not shown


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
    for heading, lines in _sections(manifest):
        click.secho(heading, bold=True)
        width = max(len(label) for label, _ in lines) + 2
        for label, value in lines:
            click.echo(f"  {label:<{width}}{value}")
        click.echo()
    if verify:
        click.secho(f"All {len(manifest.files)} files are what the manifest says.", fg="green")


def _sections(manifest: Manifest) -> Iterator[tuple[str, Lines]]:
    """Headings and their lines."""
    colour = {"ok": "green", "not_compared": "yellow"}.get(manifest.status, "red")
    yield (
        "Bundle",
        [
            ("status", click.style(manifest.status, fg=colour)),
            ("created", f"{manifest.created} by specexport {manifest.specexport_version}"),
            ("tools", ", ".join(f"{name} {version}" for name, version in sorted(manifest.tools.items()))),
            ("ops", ", ".join(f"{name} v{version}" for name, version in sorted(manifest.ops.items()))),
        ],
    )
    yield "Target", _engine_lines(manifest.target)
    yield "Draft", _draft_lines(manifest.draft)
    contract = manifest.contract
    yield (
        "Contract",
        [
            ("vocabulary", f"{contract.vocab_size} tokens, {contract.masked_tail} masked"),
            ("end of text", ", ".join(map(str, manifest.tokens.eos_token_ids)) or "no id"),
            *(("note", note) for note in contract.notes),
        ],
    )
    for heading, free in (("Accuracy", manifest.accuracy), ("Measured", manifest.measured)):
        lines = list(_free_lines(free))
        if lines:
            yield heading, lines
    files = sorted(manifest.files.items())
    total = sum(entry.bytes for _, entry in files)
    yield "Files", [*((name, _size(entry.bytes)) for name, entry in files), ("total", _size(total))]


def _draft_lines(draft: DraftEntry | None) -> Lines:
    if draft is None:
        return [("kind", "none: plain decoding")]
    details = {"ngram": f" of up to {draft.max_ngram_size} tokens", "layers": f":{draft.layers}"}
    lines = [
        ("kind", f"{draft.kind}{details.get(draft.kind, '')}"),
        ("drafted", f"{draft.num_assistant_tokens} tokens per step"),
    ]
    return lines + (_engine_lines(draft.engine) if draft.engine is not None else [])


def _engine_lines(entry: EngineEntry) -> Lines:
    model = entry.model
    revision = f" @ {model.revision[:12]}" if model.revision else ""
    kinds = ", ".join(f"{count} x {scheme}" for scheme, count in sorted(entry.weights.summary.items()))
    bits = sorted({(layer.key_bits, layer.value_bits) for layer in entry.cache.layers})
    schemes = ", ".join(f"keys {key} bits, values {value} bits" for key, value in bits)
    return [
        ("model", f"{model.source}{revision}"),
        ("architecture", f"{model.architecture}, {model.parameters / 1e6:.1f} M parameters"),
        ("shape", f"{entry.num_hidden_layers} layers, hidden {entry.hidden_size}, vocabulary {entry.vocab_size}"),
        ("context", f"{entry.context_length} positions"),
        ("weights", f"{_size(entry.weights.bytes)}: {kinds}"),
        ("cache", f"{schemes}; {_size(_cache_bytes(entry))} per 1,000 positions"),
        ("engines", ", ".join(sorted(entry.engines))),
    ]


def _cache_bytes(entry: EngineEntry, positions: int = 1000) -> int:
    """Bytes that ``positions`` positions of one sequence take, scales included."""
    total = 0
    for layer in entry.cache.layers:
        for bits, group in ((layer.key_bits, layer.key_group_size), (layer.value_bits, layer.value_group_size)):
            scales = 2 * layer.head_dim // group if group and bits < 16 else 0
            total += layer.kv_num_heads * (layer.head_dim * bits // 8 + scales) * positions
    return total


def _free_lines(free: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Any JSON object as dotted lines; what is null or empty is left out, and long lists are only counted."""
    for key, value in sorted(free.items()):
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _free_lines(value, f"{name}.")
        elif isinstance(value, list) and (len(value) > MAX_LIST or any(isinstance(v, list | dict) for v in value)):
            yield name, f"{len(value)} values"
        elif isinstance(value, float):
            yield name, f"{value:.6g}"
        elif value is not None and value != []:
            yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _size(count: float) -> str:
    """Bytes with a unit of 1000s."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
