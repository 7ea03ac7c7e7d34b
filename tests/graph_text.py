"""Graphs for tests of passes: ONNX text to a model, weights by name, and running it with the ops' bodies."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

HEADER = '<ir_version: 10, opset_import: ["" : 23, "specexport" : 1, "specexport.capture" : 1]>\n'
WEIGHTS = np.random.default_rng(0)


class Weights:
    """A weight source over arrays."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self._arrays = arrays

    def get(self, name: str) -> Any:
        return self._arrays[name]

    def quantized(self, name: str, scheme: Any) -> Any:
        from specexport.plugins.quantized_linear.format import quantize

        return quantize(self._arrays[name], scheme)


def graph(text: str, **weights: Any) -> ir.Model:
    """The model of ``text``; those of its inputs that are named in ``weights`` become weights by name.

    A tuple stands for random float32 values of that shape.
    """
    from specexport.graph_passes.tensors import NamedWeight

    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEADER + text)))
    arrays = {
        name: WEIGHTS.standard_normal(value).astype(np.float32) if isinstance(value, tuple) else value
        for name, value in weights.items()
    }
    for name, array in arrays.items():
        value = next(value for value in model.graph.inputs if value.name == name)
        model.graph.inputs.remove(value)
        value.const_value = NamedWeight(name, ir.DataType.FLOAT, ir.Shape(array.shape), arrays.__getitem__)
        model.graph.initializers[name] = value
    model.meta["weights"] = Weights(arrays)
    return model


def ops(model: ir.Model) -> list[str]:
    """The op types of a model in order."""
    return [node.op_type for node in model.graph]


def run(model: ir.Model, **feeds: Any) -> list[Any]:
    """The outputs of ``model``; ours run as their bodies."""
    import onnxruntime

    from specexport.plugins.functions import attach

    model = model.clone()
    model.opset_imports.pop("specexport.capture", None)
    attach(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def changes_nothing_but_nodes(graph_pass: Any, model: ir.Model, **feeds: Any) -> list[str]:
    """Run a pass that must match; numbers before and after must agree, and a second run must do nothing.

    Returns:
        The op types after it.
    """
    from specexport.graph_passes.infrastructure import run_passes

    before = run(model, **feeds)
    (record,) = run_passes(model, [graph_pass])
    assert record.matched > 0, record
    assert record.modified
    for have, want in zip(run(model, **feeds), before, strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-5)
    after = ops(model)
    (again,) = run_passes(model, [graph_pass])
    assert not again.modified
    assert ops(model) == after
    return after


def refusals(graph_pass: Any, model: ir.Model) -> list[str]:
    """Run a pass that must match nothing; the graph stays, and its reasons are returned."""
    from specexport.graph_passes.infrastructure import run_passes

    before = ops(model)
    (record,) = run_passes(model, [graph_pass])
    assert (record.matched, record.modified) == (0, False)
    assert ops(model) == before
    return [refusal.reason for refusal in record.refused]


def floats(*shape: int) -> Any:
    """Random float32 input."""
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)
