"""Attaching op bodies to a model."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from one_node import session
from onnx import helper, numpy_helper

from specexport.plugins.functions import attach, overload
from specexport.plugins.quantized_linear import reference
from specexport.plugins.quantized_linear.spec import INPUTS


def two_linears() -> tuple[onnx.ModelProto, np.ndarray, np.ndarray]:
    """A model of two linears that differ in bits and in optional inputs; x and the expected y."""
    rng = np.random.default_rng(0)
    nodes, initializers = [], []
    x = rng.standard_normal((3, 64)).astype(np.float32)
    y = x
    for i, (bits, bias) in enumerate(((4, True), (8, False))):
        inputs, attributes = reference.random_inputs(rng, in_features=64, out_features=64, bits=bits, bias=bias)
        y = reference.oracle(inputs | {"x": y}, attributes)["y"]
        names = []
        for name in INPUTS:
            if name == "x":
                names.append(f"y{i}")
            elif inputs[name] is None:
                names.append("")
            else:
                names.append(f"{name}{i}")
                initializers.append(numpy_helper.from_array(inputs[name], names[-1]))
        while not names[-1]:
            names.pop()
        nodes.append(helper.make_node("QuantizedLinear", names, [f"y{i + 1}"], domain="specexport", **attributes))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("y0", 1, ["rows", 64])], [value("y2", 1, ["rows", 64])], initializers)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("specexport", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), x, y


def test_nodes_of_different_attributes_get_their_own_bodies_and_run_without_kernels() -> None:
    proto, x, expected = two_linears()
    model = ir.from_proto(proto)
    assert attach(model)
    attached = ir.to_proto(model)
    assert len({(f.domain, f.name, f.overload) for f in attached.functions}) == 2
    onnx.checker.check_model(attached, full_check=True)
    y = session(attached, kernels=False).run(None, {"y0": x})[0]
    np.testing.assert_allclose(y, expected, atol=0.05)  # a rounding of the second input may flip: one step
    assert np.abs(y - expected).mean() < 1e-3


def test_attaching_twice_changes_nothing() -> None:
    model = ir.from_proto(two_linears()[0])
    attach(model)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not attach(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_bodies_that_no_node_needs_go() -> None:
    model = ir.from_proto(two_linears()[0])
    attach(model)
    for node in model.graph:
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)
    assert attach(model)
    assert len(model.functions) == 2
    assert all("epsilon=0.5" in key[2] for key in model.functions)


def test_the_overload_tells_attributes_and_inputs_apart() -> None:
    keys = {
        overload({"bits": bits}, present) for bits in (4, 8) for present in ({"x"}, {"x", "bias"}, {"x", "residual"})
    }
    assert len(keys) == 6
    assert overload({"a": 1, "b": 2}, ["x", "y"]) == overload({"b": 2, "a": 1}, ["y", "x"])
