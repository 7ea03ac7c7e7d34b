"""Layer by layer: the exported model's residual stream against the reference's."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specexport.exporter.compare_reference import Reference
from specexport.exporter.compare_statistics import Ids
from specexport.plugins.errors import SpecexportError

if TYPE_CHECKING:
    import onnx_ir as ir

ATTENTION = "QuantizedKVAttention"
#: Inputs of the fused linear op at which a residual is added, by domain.
RESIDUAL_INPUT = {"specexport": 7, "specexport.cpu": 5}
#: Ops through which ids do not flow as data: what follows them is a size or a position.
_NO_DATA = ("Shape", "Size")


class LayersError(SpecexportError):
    """The graph's residual stream cannot be told from the rest; the message says what was found."""


@dataclasses.dataclass(frozen=True)
class LayerFigures:
    """The output of one decoder layer over the tokens of one window.

    Attributes:
        layer: Index.
        cosine_mean: Mean cosine of the exported and the reference row.
        cosine_min: The smallest.
        norm_ratio: Mean of the exported row's norm over the reference's.
    """

    layer: int
    cosine_mean: float
    cosine_min: float
    norm_ratio: float


def layer_figures(
    exported: Sequence[npt.NDArray[np.float32]], reference: Sequence[npt.NDArray[np.float32]]
) -> tuple[LayerFigures, ...]:
    """Compare layer outputs, [tokens, hidden] each.

    Raises:
        LayersError: The numbers of layers or the shapes differ.
    """
    if len(exported) != len(reference):
        raise LayersError(f"the engine has {len(exported)} layer outputs, the reference {len(reference)}")
    figures = []
    for layer, (ours, theirs) in enumerate(zip(exported, reference)):
        if ours.shape != theirs.shape:
            raise LayersError(f"layer {layer} gives {ours.shape}, the reference {theirs.shape}")
        x, y = ours.astype(np.float64), theirs.astype(np.float64)
        norm_x, norm_y = np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            cosine = (x * y).sum(axis=1) / (norm_x * norm_y)
            ratio = norm_x / norm_y
        figures.append(LayerFigures(layer, float(cosine.mean()), float(cosine.min()), float(ratio.mean())))
    return tuple(figures)


def compare_layers(engine: Any, reference: Reference, ids: Ids) -> tuple[LayerFigures, ...]:
    """Compare every layer's output on one window [tokens]; ``engine`` is the runtime's, made of one ONNX file.

    Raises:
        LayersError: The architecture's residual stream was not found in the graph.
    """
    ours = engine_layer_outputs(engine.path, engine.entry.cache, ids)
    return layer_figures(ours, reference.layer_outputs(ids))


def engine_layer_outputs(path: pathlib.Path, cache: Any, ids: Ids) -> list[npt.NDArray[np.float32]]:
    """Run a copy of an engine's graph with its layer outputs exposed; weights stay where they are, mapped.

    Args:
        path: The engine's ONNX file.
        cache: Its `specexport.runtime.manifest.CacheLayout`.
        ids: int64 [tokens].

    Returns:
        float32 [tokens, hidden] a layer.

    Raises:
        LayersError: See `layer_values`.
    """
    import onnx_ir as ir
    import onnxruntime

    from specexport.runtime.cache import cache_tensors
    from specexport.runtime.native import op_library

    model = ir.load(path)
    values = layer_values(model.graph)
    known = {output.name for output in model.graph.outputs}
    for value in values:
        if value.name not in known:
            value.type = ir.TensorType(ir.DataType.FLOAT)
            model.graph.outputs.append(value)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.register_custom_ops_library(op_library())
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds: dict[str, npt.NDArray[Any]] = {
        "input_ids": ids[None],
        "past_length": np.zeros(1, np.int64),
        "query_length": np.array([len(ids)], np.int64),
        "logits_rows": np.array([len(ids) - 1], np.int64),
    }
    for tensor in cache_tensors(cache):
        feeds[tensor.name] = np.zeros((1, tensor.heads, len(ids), tensor.width), tensor.dtype)
    outputs = session.run([value.name for value in values], feeds)
    return [np.asarray(output, np.float32).reshape(len(ids), -1) for output in outputs]


def layer_values(graph: ir.Graph) -> list[ir.Value]:
    """The values that hold each decoder layer's output, in order.

    A layer ends with an addition to the residual stream, and everything later passes through its result. So layer i's
    output is the last such value before attention i+1, and for the last layer the last one that does not depend on
    ``logits_rows``.

    Raises:
        LayersError: There is no such value for some layer.
    """
    nodes = list(graph)
    attention = [index for index, node in enumerate(nodes) if node.op_type == ATTENTION]
    if not attention:
        raise LayersError(f"the graph has no {ATTENTION} node, so its layers cannot be told apart")
    inputs = {value.name: value for value in graph.inputs}
    flow = _reached(nodes, inputs.get("input_ids"))
    selected = _reached(nodes, inputs.get("logits_rows"))
    needed = _needed(nodes, graph.outputs[0])
    cuts = [
        (index, value)
        for index, value in _cut_values(nodes, flow & needed)
        if value not in selected and _adds_residual(nodes[index])
    ]
    found = []
    for layer, start in enumerate(attention):
        stop = attention[layer + 1] if layer + 1 < len(attention) else len(nodes)
        inside = [value for index, value in cuts if start < index < stop]
        if not inside:
            raise LayersError(f"layer {layer} has no addition that everything later passes through")
        found.append(inside[-1])
    return found


def _reached(nodes: Sequence[ir.Node], source: ir.Value | None) -> set[ir.Value]:
    """Values that are computed from ``source``, itself included; sizes do not count as computed from it."""
    reached: set[ir.Value] = set() if source is None else {source}
    for node in nodes:
        if node.op_type not in _NO_DATA and any(value in reached for value in node.inputs if value is not None):
            reached.update(node.outputs)
    return reached


def _needed(nodes: Sequence[ir.Node], sink: ir.Value) -> set[ir.Value]:
    """Values that ``sink`` is computed from, itself included."""
    needed = {sink}
    for node in reversed(nodes):
        if any(output in needed for output in node.outputs):
            needed.update(value for value in node.inputs if value is not None)
    return needed


def _cut_values(nodes: Sequence[ir.Node], flow: set[ir.Value]) -> list[tuple[int, ir.Value]]:
    """(node index, value) of the values of ``flow`` past which no other value of it is used."""
    last_use: dict[ir.Value, int] = {}
    for index, node in enumerate(nodes):
        if any(output in flow for output in node.outputs):
            last_use.update((value, index) for value in node.inputs if value is not None and value in flow)
    cuts = []
    produced_here = {output for node in nodes for output in node.outputs}
    # The last use of any value that was there earlier: the graph's inputs to begin with.
    furthest = max((use for value, use in last_use.items() if value not in produced_here), default=-1)
    for index, node in enumerate(nodes):
        produced = [value for value in node.outputs if value in flow]
        if len(produced) == 1 and furthest <= index:
            cuts.append((index, produced[0]))
        for value in produced:
            furthest = max(furthest, last_use.get(value, index))
    return cuts


def _adds_residual(node: ir.Node) -> bool:
    position = RESIDUAL_INPUT.get(node.domain)
    if position is not None and node.op_type == "QuantizedLinear":
        return len(node.inputs) > position and node.inputs[position] is not None
    return node.op_type == "Add"
