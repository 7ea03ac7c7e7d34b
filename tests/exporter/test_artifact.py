"""Graphs are saved with streamed, shared external data, whatever their size."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from specexport.exporter.artifact import WeightsFile, weight_bytes, write_graph


def graph_of(tensors: dict[str, ir.TensorProtocol]) -> ir.Model:
    """A graph whose y is the sum over the tensors of row ``row``."""
    row = ir.Input("row", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    nodes, total = [], None
    initializers = []
    for name, tensor in tensors.items():
        value = ir.Value(name=name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        initializers.append(value)
        nodes.append(ir.node("Gather", [value, row], name=f"gather_{name}"))
        picked = nodes[-1].outputs[0]
        if total is not None:
            nodes.append(ir.node("Add", [total, picked]))
            picked = nodes[-1].outputs[0]
        total = picked
    total.name, total.type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([row], [total], nodes=nodes, initializers=initializers, opset_imports={"": 23}, name="g")
    return ir.Model(graph, ir_version=10)


def lazy(array_of, shape, name):
    return ir.LazyTensor(lambda: ir.tensor(array_of(), name=name), ir.DataType.FLOAT, ir.Shape(shape), name=name)


def run(path, row):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"row": np.array([row])})[0]


def test_two_graphs_share_the_tensors_that_both_have(tmp_path):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 64, 32)).astype(np.float32)
    target = graph_of({"a": lazy(lambda: a, a.shape, "a"), "b": lazy(lambda: b, b.shape, "b")})
    draft = graph_of({"a": lazy(lambda: a, a.shape, "a")})
    assert weight_bytes(target) == a.nbytes + b.nbytes
    sizes = []
    with WeightsFile(tmp_path / "weights.bin") as weights:
        write_graph(target, tmp_path / "target.onnx", weights, sizes.append)
        write_graph(draft, tmp_path / "draft.onnx", weights, sizes.append)
    assert sizes == [a.nbytes, b.nbytes, a.nbytes]
    assert (tmp_path / "weights.bin").stat().st_size == a.nbytes + b.nbytes
    np.testing.assert_array_equal(run(tmp_path / "target.onnx", 3), (a + b)[[3]])
    np.testing.assert_array_equal(run(tmp_path / "draft.onnx", 5), a[[5]])
    np.testing.assert_array_equal(target.graph.initializers["a"].const_value.numpy(), a)


def test_one_name_cannot_mean_two_tensors(tmp_path):
    first = graph_of({"a": ir.tensor(np.zeros((64, 32), np.float32))})
    second = graph_of({"a": ir.tensor(np.zeros((32, 64), np.float32))})
    with WeightsFile(tmp_path / "weights.bin") as weights:
        write_graph(first, tmp_path / "first.onnx", weights)
        with pytest.raises(ValueError, match="holds 'a'"):
            write_graph(second, tmp_path / "second.onnx", weights)


def test_more_than_two_gigabytes(tmp_path):
    part = (1 << 20, 64)  # 256 MiB each, nine of them
    names = [f"w{i}" for i in range(9)]
    model = graph_of({name: lazy(lambda i=i: np.full(part, i, np.float32), part, name) for i, name in enumerate(names)})
    with WeightsFile(tmp_path / "weights.bin") as weights:
        write_graph(model, tmp_path / "large.onnx", weights)
    assert (tmp_path / "weights.bin").stat().st_size > 2 << 30
    assert (tmp_path / "large.onnx").stat().st_size < 1 << 20
    np.testing.assert_array_equal(
        run(tmp_path / "large.onnx", part[0] - 1), np.full((1, 64), sum(range(9)), np.float32)
    )
    (tmp_path / "weights.bin").unlink()
