"""Loads pair bundles and decodes speculatively: numpy, onnxruntime and tokenizers only."""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from specexport.runtime.pair import load as load

__all__ = ["load"]


def __getattr__(name: str) -> typing.Any:
    """`load` on demand: reading a manifest must not cost importing an inference engine."""
    if name == "load":
        from specexport.runtime.pair import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
