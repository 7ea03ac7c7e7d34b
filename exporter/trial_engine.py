"""A lowered engine whose activations' precision is changed at will; the weights stay where they are."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specexport.graph_passes.tensors import matrix_names
from specexport.plugins.quantized_linear.spec import CPU_INPUTS, SPEC
from specexport.runtime.engine import Engine
from specexport.runtime.prefill import PREFILL_CHUNK

if TYPE_CHECKING:
    from specexport.runtime.manifest import EngineEntry

BITS = "activation_bits"


@dataclasses.dataclass(frozen=True)
class Linear:
    """One linear of the lowered graph whose activations are quantized.

    Attributes:
        index: Of the node in the graph.
        matrices: State-dict names of what its weight is stacked of.
        weights: How many it has.
    """

    index: int
    matrices: tuple[str, ...]
    weights: int


class TrialEngine:
    """The engine at ``path``, run with int8 activations here and int16 there.

    Args:
        path: The lowered graph; variants are written beside it, because its weights lie there, and removed.
        entry: Its entry in the manifest.
    """

    def __init__(self, path: pathlib.Path, entry: EngineEntry) -> None:
        import onnx

        self._path, self._entry = path, entry
        self._model = onnx.load(path, load_external_data=False)
        self.linears = tuple(_linears(self._model))

    def logits(self, ids: npt.NDArray[np.int64], int8: Collection[Linear]) -> npt.NDArray[np.float32]:
        """Logits [tokens, vocab] of ``ids`` [tokens] with 8 bits in the linears ``int8`` and 16 in the others."""
        low = {linear.index for linear in int8}
        for linear in self.linears:
            _attribute(self._model.graph.node[linear.index], BITS).i = 8 if linear.index in low else 16
        variant = self._path.with_suffix(".trial.onnx")
        try:
            variant.write_bytes(self._model.SerializeToString())
            engine = Engine(variant, self._entry)
        finally:
            variant.unlink(missing_ok=True)
        cache = engine.new_cache(batch=1, capacity=len(ids))
        chunks = range(0, len(ids), PREFILL_CHUNK)
        return np.concatenate([engine.forward(ids[None, start : start + PREFILL_CHUNK], cache) for start in chunks])


def _linears(model: Any) -> list[Linear]:
    found = []
    for index, node in enumerate(model.graph.node):
        if node.op_type != SPEC.name or _attribute(node, BITS).i == 32:
            continue
        matrices = matrix_names(node.input[CPU_INPUTS.index("packed")])
        weights = _attribute(node, "in_features").i * _attribute(node, "out_features").i
        found.append(Linear(index, matrices, weights))
    return found


def _attribute(node: Any, name: str) -> Any:
    return next(attribute for attribute in node.attribute if attribute.name == name)
