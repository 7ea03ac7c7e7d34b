"""Weights by name become weights that can be read from the plan's source."""

from __future__ import annotations

import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.graph_passes.plan import WeightSource
from specexport.graph_passes.tensors import NamedWeight, dims


class BindWeightsPass(GraphPass):
    """Bind every captured weight to its source; nothing is read yet."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__()
        self._source = source

    def rewrite(self, model: ir.Model) -> None:
        """Bind each unbound weight."""
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if isinstance(tensor, NamedWeight) and not tensor.bound:
                value.const_value = NamedWeight(name, tensor.dtype, ir.Shape(dims(value)), self._source.get)
                self.match()
