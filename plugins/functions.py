"""Attach each fused op's meaning, its ONNX function body, to a model.

One node's body depends on its attributes and on which optional inputs it has; the two make the function's `overload`,
so nodes of one op and different attributes stand side by side in a model. A runtime that has a kernel of the op's name
takes the kernel, another one inlines the body.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from specexport.plugins.op import OpSpec

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

OPS = ("quantized_linear", "quantized_embedding", "quantized_kv_attention")
"""Folders of the ops that have a body."""


def spec_of(domain: str, op_type: str) -> tuple[OpSpec, tuple[str, ...]] | None:
    """The op of that name and the names of its inputs by position, or None if it is not one of ours."""
    for folder in OPS:
        module = importlib.import_module(f"specexport.plugins.{folder}.spec")
        if (module.SPEC.domain, module.SPEC.name) == (domain, op_type):
            return module.SPEC, module.INPUTS
    return None


def overload(attributes: Mapping[str, Any], present: Collection[str]) -> str:
    """The key of one body: every attribute and every present input, sorted."""
    values = ",".join(f"{name}={attributes[name]}" for name in sorted(attributes))
    return f"{values};{','.join(sorted(present))}"


def function(spec: OpSpec, attributes: Mapping[str, Any], present: Collection[str]) -> onnx.FunctionProto:
    """The body for these attributes and these inputs (by name), its `overload` set."""
    proto: onnx.FunctionProto = spec.load_reference().function(dict(attributes), set(present))
    proto.overload = overload(attributes, present)
    return proto


def attach(model: ir.Model) -> bool:
    """Give every node of ours its body and drop the bodies that no node needs any more.

    Nodes keep their place, inputs and attributes; only `overload` and the model's functions change.

    Returns:
        Whether anything changed; a second call changes nothing.
    """
    import onnx_ir as ir

    needed: set[ir.OperatorIdentifier] = set()
    changed = False
    for node in model.graph.all_nodes():
        found = spec_of(node.domain, node.op_type)
        if found is None:
            continue
        spec, names = found
        attributes = {name: _value(attribute) for name, attribute in node.attributes.items()}
        present = {name for name, value in zip(names, node.inputs) if value is not None}
        key = overload(attributes, present)
        identifier = (spec.domain, spec.name, key)
        needed.add(identifier)
        if node.overload != key:
            node.overload = key
            changed = True
        if identifier not in model.functions:
            model.functions[identifier] = ir.serde.deserialize_function(function(spec, attributes, present))
            changed = True
        if model.opset_imports.get(spec.domain) != spec.version:
            model.opset_imports[spec.domain] = spec.version
            changed = True
    for identifier in [key for key in model.functions if spec_of(key[0], key[1]) and key not in needed]:
        del model.functions[identifier]
        changed = True
    return changed


def _value(attribute: ir.Attr) -> Any:
    value = attribute.value
    return value.decode() if isinstance(value, bytes) else value
