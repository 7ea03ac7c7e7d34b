"""From torch's ONNX graph to ours: parameters by state-dict name and without data, stable input names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import onnx_ir as ir

from specexport.graph_passes.tensors import NamedWeight

if TYPE_CHECKING:
    import torch

_PREFIX = "model."  # The tracing wrapper's attribute, in front of every parameter's name.


def finish(model: ir.Model, module: torch.nn.Module) -> ir.Model:
    """Rename initializers to state-dict names, drop the data of parameters, and name the interface.

    Args:
        model: What torch.onnx made of the traced wrapper.
        module: The traced model.
    """
    canonical = canonical_names(module)
    graph = model.graph
    for value in list(graph.initializers.values()):
        assert value.name is not None
        name = value.name.removeprefix(_PREFIX)
        if name not in canonical:
            # Buffers: rotary tables under the rotary module's name, the rest as torch has them.
            del graph.initializers[value.name]
            value.name = name.replace("specexport_", "")
            graph.initializers[value.name] = value
            continue
        first = canonical[name]
        tensor = value.const_value
        assert tensor is not None
        kept = graph.initializers.get(first)
        if kept is not None and kept is not value:
            ir.convenience.replace_all_uses_with(value, kept)
            del graph.initializers[value.name]
            continue
        del graph.initializers[value.name]
        value.name = first
        value.const_value = NamedWeight(first, tensor.dtype, ir.Shape([int(str(d)) for d in tensor.shape]))
        graph.initializers[first] = value
    graph.outputs[0].name = "logits"
    _name_axes(graph)
    graph.metadata_props.clear()
    model.metadata_props.clear()
    for node in graph:
        node.metadata_props.clear()
        for output in node.outputs:
            output.metadata_props.clear()
    model.producer_name, model.producer_version = "specexport", None
    return model


def _name_axes(graph: ir.Graph) -> None:
    """Give torch's symbols (s36 ...) the names of the interface: batch, sequence, rows."""
    ids, _, rows = graph.inputs
    assert ids.shape is not None and rows.shape is not None
    names = {
        str(dim): name
        for shape, axes in ((ids.shape, ("batch", "sequence")), (rows.shape, ("rows",)))
        for dim, name in zip(shape, axes)
    }
    pattern = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in names))
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape(
                [dim if isinstance(dim, int) else pattern.sub(lambda m: names[m[0]], str(dim)) for dim in value.shape]
            )


def canonical_names(module: torch.nn.Module) -> dict[str, str]:
    """Every parameter name (tied ones too) to the first name of the same parameter in state-dict order."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    return names
