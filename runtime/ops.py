"""Which ops, and which versions of them, this installation can run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from specexport.runtime.manifest_json import ManifestError

OP_FOLDERS = ("quantized_linear", "quantized_embedding", "quantized_kv_attention")
ENGINE_SUFFIX = ".cpu"


def available_ops() -> dict[str, int]:
    """``domain::name`` of every op in `specexport.plugins`, with its version."""
    specs = [importlib.import_module(f"specexport.plugins.{folder}.spec").SPEC for folder in OP_FOLDERS]
    return {spec.qualified_name: spec.version for spec in specs}


def check_ops(wanted: Mapping[str, int], available: Mapping[str, int], where: str) -> None:
    """Refuse a bundle whose ops are not the ones that are here; an engine form has its op's version.

    Raises:
        ManifestError: An op is unknown, or of another version (both versions are named).
    """
    for name, version in wanted.items():
        domain, _, op = name.partition("::")
        known = available.get(f"{domain.removesuffix(ENGINE_SUFFIX)}::{op}")
        if known is None:
            raise ManifestError(f"{where}: needs op {name} version {version}, which this specexport lacks; upgrade it")
        if known != version:
            advice = "upgrade specexport" if version > known else "rebuild the bundle"
            raise ManifestError(
                f"{where}: needs op {name} version {version}, this specexport has version {known}; {advice}"
            )
