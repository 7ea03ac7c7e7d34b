"""A bundle directory is what its manifest says: paths, sizes, hashes, op versions, status."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import pathlib

from specexport.runtime.manifest import MANIFEST_NAME, EngineEntry, FileEntry, Manifest
from specexport.runtime.manifest_json import ManifestError
from specexport.runtime.ops import available_ops, check_ops

CHUNK_BYTES = 4 << 20
REFUSED = {"failed_accuracy": "failed its accuracy gate", "building": "is of a build that did not end"}


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A checked directory and its manifest."""

    directory: pathlib.Path
    manifest: Manifest

    def path(self, name: str) -> pathlib.Path:
        """The file ``name``, a key of the manifest's ``files``."""
        if name not in self.manifest.files:
            raise ManifestError(f"{self.directory / MANIFEST_NAME}: {name} is not among its files")
        return self.directory / name

    def has(self, name: str) -> bool:
        """Whether the manifest lists ``name``; what it does not list is never read."""
        return name in self.manifest.files


def open_bundle(
    directory: str | os.PathLike[str], *, verify: bool = True, allow_failed: bool = False, backend: str = "cpu"
) -> Bundle:
    """Read and check a bundle; nothing of it is used before this returns.

    Args:
        directory: What `specexport build` made.
        verify: Hash every file. Without it only presence and sizes are checked.
        allow_failed: Accept a bundle whose accuracy gate failed or whose build did not end.
        backend: The engine that will run.

    Raises:
        ManifestError: One message for each way to be wrong (docs/bundle.md).
    """
    root = pathlib.Path(directory)
    manifest = Manifest.read(root)
    where = str(root / MANIFEST_NAME)
    check_ops(manifest.ops, available_ops(), where)
    if manifest.status in REFUSED and not allow_failed:
        raise ManifestError(
            f"{where}: this bundle {REFUSED[manifest.status]} (status {manifest.status}); rebuild it, "
            "or load it with allow_failed=True (--allow-failed) to look into it"
        )
    _check_draft(manifest, where)
    for role, entry in (("target", manifest.target), ("draft", manifest.draft.engine if manifest.draft else None)):
        if entry is not None:
            _check_engine(role, entry, manifest, backend, where)
    _check_files(root, manifest, verify, where)
    return Bundle(root, manifest)


def _check_draft(manifest: Manifest, where: str) -> None:
    """The draft's kind and the keys that go with it."""
    draft = manifest.draft
    if draft is None:
        return
    if draft.kind not in ("ngram", "layers", "model"):
        raise ManifestError(f"{where}: draft.kind is {draft.kind!r}, this specexport knows ngram, layers and model")
    if (draft.engine is None) != (draft.kind == "ngram"):
        raise ManifestError(f"{where}: draft.engine must be there exactly when draft.kind is layers or model")
    if draft.kind == "ngram" and not draft.max_ngram_size:
        raise ManifestError(f"{where}: draft.max_ngram_size must be at least 1 for an ngram draft")


def _check_engine(role: str, entry: EngineEntry, manifest: Manifest, backend: str, where: str) -> None:
    """The engine has the backend, its files are listed, and the contract's ids are within its vocabulary."""
    files = entry.engines.get(backend)
    if files is None:
        raise ManifestError(f"{where}: {role} has no {backend} engine; it has {sorted(entry.engines)}")
    for name in (files.file, files.weights):
        if name not in manifest.files:
            raise ManifestError(f"{where}: {role}.engines.{backend} names {name}, which is not among its files")
    if not 0 < manifest.contract.vocab_size <= entry.vocab_size:
        raise ManifestError(
            f"{where}: contract.vocab_size is {manifest.contract.vocab_size}, the {role}'s is {entry.vocab_size}"
        )


def _check_files(root: pathlib.Path, manifest: Manifest, verify: bool, where: str) -> None:
    """Every listed file lies inside the bundle, with its size and its hash."""
    inside = root.resolve()
    for name, entry in manifest.files.items():
        _check_name(name, where)
        path = root / name
        try:
            outside, present = not path.resolve().is_relative_to(inside), path.is_file()
            size = path.stat().st_size if present else 0
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name that cannot be one here
            raise ManifestError(f"{where}: files has {name!r}, which cannot be looked up: {error}") from None
        if outside:
            raise ManifestError(f"{path}: a link leads out of the bundle")
        if not present:
            raise ManifestError(f"{path}: listed in the manifest but missing; copy the whole bundle, or rebuild it")
        if size != entry.bytes:
            raise ManifestError(f"{path}: {size} bytes, the manifest says {entry.bytes}; the file is cut or changed")
    if verify:
        with concurrent.futures.ThreadPoolExecutor(max_workers=4) as pool:  # hashlib releases the lock
            for _ in pool.map(lambda item: _check_hash(root / item[0], item[1]), manifest.files.items()):
                pass


def _check_name(name: str, where: str) -> None:
    """A listed path is relative, in POSIX form, and goes only downwards."""
    if not name or "\\" in name or "\0" in name or ":" in name or any(p in ("", ".", "..") for p in name.split("/")):
        raise ManifestError(f"{where}: files has {name!r}; a path must be relative, with / and without . or ..")


def _check_hash(path: pathlib.Path, entry: FileEntry) -> None:
    try:
        digest = sha256(path)
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from None
    if digest != entry.sha256:
        raise ManifestError(
            f"{path}: sha256 is {digest[:12]}..., the manifest says {entry.sha256[:12]}...; "
            "the file was changed or damaged: copy it again, or rebuild the bundle"
        )


def sha256(path: pathlib.Path) -> str:
    """The file's SHA-256 in hex, read in large chunks."""
    digest, buffer = hashlib.sha256(), bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()
