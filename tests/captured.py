"""Tiny models captured once a process, and built into graphs that tests run."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import tiny_engine
import tiny_models

CONTEXT = 256


@dataclasses.dataclass(frozen=True)
class Built:
    """A tiny model, its graph after all passes, and what the passes said."""

    module: Any
    model: Any
    records: list[Any]

    def ops(self) -> dict[str, int]:
        """How many nodes of each op are left."""
        counts: dict[str, int] = {}
        for node in self.model.graph:
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
        return counts

    def save(self, directory: pathlib.Path) -> pathlib.Path:
        """Write the graph; returns its path."""
        import onnx_ir as ir

        path = directory / "model.onnx"
        ir.save(self.model, path)
        return path


@functools.cache
def _captured(arch: str, context_length: int) -> tuple[Any, Any]:
    from specexport.exporter.capture import capture, skeleton

    module = tiny_models.build(arch)
    return module, capture(skeleton(module.config), context_length=context_length)


def captured(arch: str, context_length: int = CONTEXT) -> Any:
    """A copy of the captured graph of a tiny model."""
    return _captured(arch, context_length)[1].clone()


def built(arch: str, context_length: int = CONTEXT, *, cpu: bool = True, **plan: Any) -> Built:
    """A tiny model through all passes; ``plan`` are fields of ``PassPlan`` beside the weights."""
    from specexport.graph_passes.infrastructure import run_passes
    from specexport.graph_passes.pipeline import cpu_passes, portable_passes
    from specexport.graph_passes.plan import PassPlan

    module, _ = _captured(arch, context_length)
    model = captured(arch, context_length)
    weights = plan.pop("weights", None) or tiny_engine.ModuleWeights(module)
    passes = portable_passes(PassPlan(weights=weights, **plan)) + (cpu_passes() if cpu else ())
    return Built(module, model, run_passes(model, passes))
