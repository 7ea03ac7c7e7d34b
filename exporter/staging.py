"""A directory that appears whole or not at all: written beside its place, renamed at the end."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from specexport.plugins.errors import InputError, SpecexportError


class BuildError(SpecexportError):
    """A build that could not be finished; nothing was left behind."""


def check_destination(destination: pathlib.Path, *, force: bool) -> None:
    """Refuse a destination that a finished build could not take, before the long work starts.

    Raises:
        InputError: It exists and ``force`` is off, is not a bundle and could hold other work, or cannot be written.
    """
    if destination.exists():
        if not force:
            raise InputError(f"{destination} exists already; choose another --output or pass --force to replace it")
        is_bundle = destination.is_dir() and (
            (destination / "manifest.json").is_file() or not any(destination.iterdir())
        )
        if not is_bundle:
            raise InputError(f"{destination} is not a bundle (no manifest.json in it), so --force will not replace it")
    parent = destination.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    if not os.access(parent, os.W_OK):
        raise InputError(f"{parent} cannot be written; choose another --output")


@contextlib.contextmanager
def staged_directory(destination: pathlib.Path, *, force: bool) -> Iterator[pathlib.Path]:
    """Yield a directory beside ``destination`` that takes its name when the block ends without an error.

    Whatever ends the block early (an error, a full disk, an interrupt) removes what was written and leaves an older
    bundle at ``destination`` as it was.

    Raises:
        BuildError: The disk is full.
    """
    check_destination(destination, force=force)
    destination = destination.absolute()
    stage = pathlib.Path(tempfile.mkdtemp(prefix=f".{destination.name}.building-", dir=destination.parent))
    try:
        yield stage
        stage.chmod(0o755)
        _take_place(stage, destination)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(destination.parent).free
            raise BuildError(
                f"the disk that holds {destination.parent} is full ({free / 1e6:.0f} MB left); nothing was kept: "
                "free some space or choose another --output"
            ) from error
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _take_place(stage: pathlib.Path, destination: pathlib.Path) -> None:
    """Rename ``stage`` to ``destination``, moving an older bundle aside first so that one of the two always exists."""
    if not destination.exists():
        stage.rename(destination)
        return
    old = stage.with_name(stage.name + ".old")
    destination.rename(old)
    try:
        stage.rename(destination)
    except OSError:
        old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)
