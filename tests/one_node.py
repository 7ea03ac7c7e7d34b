"""Run one node of ours: by its kernel in the native library, or by its body alone."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from specexport.plugins.native.library import library_path

ISAS = ("avx512_vnni", "avx2", "portable")


def native() -> ctypes.CDLL:
    """The library's C interface."""
    library = ctypes.CDLL(str(library_path()))
    library.specexport_isa.restype = ctypes.c_char_p
    return library


@contextmanager
def machine(isa: str = "auto", threads: int = 0) -> Iterator[None]:
    """Kernels use this instruction set and thread count inside."""
    library = native()
    assert library.specexport_set_isa(isa.encode()), isa
    library.specexport_set_num_threads(threads)
    try:
        yield
    finally:
        library.specexport_set_isa(b"auto")
        library.specexport_set_num_threads(0)


def available_isas() -> list[str]:
    """Those of ISAS that this machine has."""
    library = native()
    found = [isa for isa in ISAS if library.specexport_set_isa(isa.encode())]
    library.specexport_set_isa(b"auto")
    return found


def one_node(
    domain: str,
    op_type: str,
    inputs: Mapping[str, np.ndarray[Any, Any] | None],
    attributes: Mapping[str, Any],
    functions: Sequence[onnx.FunctionProto] = (),
    output_rank: int | None = None,
) -> onnx.ModelProto:
    """A model of one node with one output ``y``; None is an absent input. Shapes are left open."""
    names = [name if value is not None else "" for name, value in inputs.items()]
    node = helper.make_node(op_type, names, ["y"], domain=domain, **attributes)
    if functions:
        node.overload = functions[0].overload
    graph_inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(value.dtype), [f"{name}_{i}" for i in range(value.ndim)]
        )
        for name, value in inputs.items()
        if value is not None
    ]
    shape = None if output_rank is None else [f"y_{i}" for i in range(output_rank)]
    graph = helper.make_graph(
        [node], "one_node", graph_inputs, [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)]
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=list(functions))


def session(model: onnx.ModelProto, *, kernels: bool) -> ort.InferenceSession:
    """A quiet CPU session, with or without the native library."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if kernels:
        options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(
    running: ort.InferenceSession, inputs: Mapping[str, np.ndarray[Any, Any] | None]
) -> np.ndarray[Any, np.dtype[Any]]:
    """Output ``y``."""
    result: np.ndarray[Any, np.dtype[Any]] = running.run(
        ["y"], {name: value for name, value in inputs.items() if value is not None}
    )[0]
    return result
