"""The bundle's manifest: frozen dataclasses, one JSON file. The reader owns the format (docs/bundle.md)."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from specexport.runtime.manifest_json import ManifestError, build, read_json

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
STATUSES = ("ok", "failed_accuracy", "not_compared", "building")

Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """One file of the bundle: its SHA-256 in lower-case hex and its size in bytes."""

    sha256: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One engine input or output: dtype as numpy calls it (int64, float32, float16, int8); symbolic axes are names."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclasses.dataclass(frozen=True)
class ModelIdentity:
    """Which model an engine was made from."""

    source: str
    revision: str | None
    architecture: str
    config_sha256: str
    parameters: int


@dataclasses.dataclass(frozen=True)
class BackendFiles:
    """What one backend runs: the model file and its external data, relative to the bundle."""

    file: str
    weights: str


@dataclasses.dataclass(frozen=True)
class CacheLayer:
    """One layer's cache.

    Bits are 16 (float16) or 8 (int8 with one float16 scale per row and group along the head dimension); a group
    size is 0 at 16 bits. ``window`` 0 means that every earlier position is attended.
    """

    kv_num_heads: int
    head_dim: int
    key_bits: int
    value_bits: int
    key_group_size: int
    value_group_size: int
    window: int


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The caches of an engine, layer by layer."""

    layers: tuple[CacheLayer, ...]


@dataclasses.dataclass(frozen=True)
class WeightsEntry:
    """How many matrices are stored in which scheme, and their bytes."""

    summary: Mapping[str, int]
    bytes: int


@dataclasses.dataclass(frozen=True)
class EngineEntry:
    """One engine: where it comes from, what it takes and returns, and the files that run it."""

    model: ModelIdentity
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    context_length: int
    engines: Mapping[str, BackendFiles]
    inputs: tuple[TensorEntry, ...]
    outputs: tuple[TensorEntry, ...]
    cache: CacheLayout
    weights: WeightsEntry


@dataclasses.dataclass(frozen=True)
class DraftEntry:
    """The draft: ``ngram`` (no engine), or ``layers`` or ``model`` with one. What is None is left out of the file."""

    kind: str
    num_assistant_tokens: int
    max_ngram_size: int | None = None
    layers: int | None = None
    engine: EngineEntry | None = None


@dataclasses.dataclass(frozen=True)
class ContractEntry:
    """What target and draft agree on: only ids below ``vocab_size`` are known to both and may be emitted."""

    vocab_size: int
    target_vocab_size: int
    draft_vocab_size: int
    masked_tail: int
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TokensEntry:
    """Special token ids; every end-of-sequence id counts."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The whole manifest; the runtime does not look into ``build``, ``passes``, ``measured`` and ``accuracy``."""

    format_version: int
    specexport_version: str
    created: str
    status: str
    tools: Mapping[str, str]
    build: Json
    ops: Mapping[str, int]
    target: EngineEntry
    draft: DraftEntry | None
    contract: ContractEntry
    tokens: TokensEntry
    files: Mapping[str, FileEntry]
    passes: Json
    measured: Json
    accuracy: Json

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> Manifest:
        """Parse ``directory/manifest.json``: form and types only; `validate.check_bundle` looks at the files.

        Raises:
            ManifestError: The file is missing, too large, no JSON or of another format version, or a key is
                missing, unknown or wrongly typed; the message names it.
        """
        path = pathlib.Path(directory) / MANIFEST_NAME
        return cls.from_json(read_json(path), str(path))

    @classmethod
    def from_json(cls, data: object, where: str = MANIFEST_NAME) -> Manifest:
        """The manifest in ``data`` (what ``json.loads`` gave); ``where`` begins every error message."""
        if isinstance(data, dict):
            version = data.get("format_version")
            if isinstance(version, int) and version != FORMAT_VERSION:
                raise ManifestError(
                    f"{where}: format_version is {version}, this specexport reads {FORMAT_VERSION}; "
                    f"{'upgrade specexport' if version > FORMAT_VERSION else 'rebuild the bundle'}"
                )
        manifest = build(cls, data, where, "")
        if manifest.status not in STATUSES:
            raise ManifestError(f"{where}: status is {manifest.status!r}, expected one of {', '.join(STATUSES)}")
        return manifest

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, as they stand in the file."""
        data: dict[str, Any] = _plain(dataclasses.asdict(self))
        if self.draft is not None:
            optional = ("max_ngram_size", "layers", "engine")
            data["draft"] = {k: v for k, v in data["draft"].items() if v is not None or k not in optional}
        return data

    def to_bytes(self) -> bytes:
        """The exact file: sorted keys, two spaces, UTF-8, a newline at the end."""
        text = json.dumps(self.to_json(), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"

    def write(self, directory: str | os.PathLike[str]) -> pathlib.Path:
        """Write ``directory/manifest.json`` in one rename, so that a reader never sees half of it."""
        path = pathlib.Path(directory) / MANIFEST_NAME
        part = path.with_name(path.name + ".part")
        part.write_bytes(self.to_bytes())
        part.replace(path)
        return path


def _plain(value: Any) -> Any:
    """Mappings as dicts and tuples as lists, all the way down."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
