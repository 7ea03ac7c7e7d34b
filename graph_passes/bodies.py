"""Every fused op gets its meaning: the ONNX function body travels in the model."""

from __future__ import annotations

import onnx_ir as ir

from specexport.graph_passes.infrastructure import GraphPass
from specexport.plugins.functions import attach


class AttachBodiesPass(GraphPass):
    """Attach the bodies of the ops in the graph, and drop those that no node needs."""

    def rewrite(self, model: ir.Model) -> None:
        """Attach; counts as one match if anything changed."""
        if attach(model):
            self.match()
