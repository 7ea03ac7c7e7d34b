"""Models of one QuantizedKVAttention node, run by the kernel, by ONNX Runtime from the body, or by onnx's reference."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
import onnxruntime as ort

from specexport.plugins.native.library import library_path
from specexport.plugins.quantized_kv_attention.reference import Array, function
from specexport.plugins.quantized_kv_attention.spec import INPUTS, OUTPUTS, SPEC

Inputs = dict[str, Array | None]
CACHE_NAMES = ("key_cache", "key_scale", "value_cache", "value_scale")


def available_isas() -> list[str]:
    """The instruction sets that this machine can run, portable first."""
    native = _native()
    try:
        return [name for name in ("portable", "avx2", "avx512_vnni", "amx") if native.specexport_set_isa(name.encode())]
    finally:
        native.specexport_set_isa(b"auto")


def _native() -> ctypes.CDLL:
    native = ctypes.CDLL(str(library_path()))
    native.specexport_set_isa.argtypes = [ctypes.c_char_p]
    return native


@contextlib.contextmanager
def kernels(isa: str = "auto", num_threads: int = 0) -> Iterator[None]:
    """Run kernels on one instruction set and thread count inside the block."""
    native = _native()
    assert native.specexport_set_isa(isa.encode()), isa
    native.specexport_set_num_threads(num_threads)
    try:
        yield
    finally:
        native.specexport_set_isa(b"auto")
        native.specexport_set_num_threads(0)


def _names(inputs: Mapping[str, Array | None]) -> tuple[list[str], list[str]]:
    """Input and output names of the node, absent ones empty, trailing ones cut."""
    ins = [name if inputs.get(name) is not None else "" for name in INPUTS]
    outs = [name if name == "y" or inputs.get(name.removesuffix("_out")) is not None else "" for name in OUTPUTS]
    for names in (ins, outs):
        while not names[-1]:
            names.pop()
    return ins, outs


def node_model(inputs: Inputs, attributes: Mapping[str, int | float], body: bool) -> onnx.ModelProto:
    """One node on inputs of these types and ranks, with or without the op's function body."""
    ins, outs = _names(inputs)
    proto = function(attributes, {name for name in ins if name})

    def info(name: str, like: Array | None) -> onnx.ValueInfoProto:
        assert like is not None
        dtype = onnx.helper.np_dtype_to_tensor_dtype(like.dtype)
        return onnx.helper.make_tensor_value_info(name, dtype, [None] * like.ndim)

    node = onnx.helper.make_node(SPEC.name, ins, outs, domain=SPEC.domain)
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
    if body:
        node.overload = proto.overload
    likes = {name: inputs["qkv"] if name == "y" else inputs[name.removesuffix("_out")] for name in outs if name}
    graph = onnx.helper.make_graph(
        [node],
        "node",
        [info(name, inputs[name]) for name in ins if name],
        [info(name, like) for name, like in likes.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(SPEC.domain, SPEC.version)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[proto] if body else [])


class Node:
    """A session over one node; with the kernel, or (``kernel=False``) over its body."""

    def __init__(self, inputs: Inputs, attributes: Mapping[str, int | float], kernel: bool = True) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        if kernel:
            options.register_custom_ops_library(str(library_path()))
        model = node_model(inputs, attributes, body=not kernel).SerializeToString()
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        cache = inputs["key_cache"]
        assert cache is not None
        self.hidden = int(attributes["q_num_heads"]) * cache.shape[3]
        self.outputs = [value.name for value in self.session.get_outputs()]

    def run(self, inputs: Inputs) -> dict[str, Array]:
        """Outputs by name; the cache inputs stay as they are."""
        feeds = {name: array for name, array in inputs.items() if array is not None}
        return dict(zip(self.outputs, self.session.run(None, feeds)))

    def run_in_place(self, inputs: Inputs) -> Array:
        """y; the cache inputs' own memory is written."""
        binding = self.session.io_binding()
        qkv = inputs["qkv"]
        assert qkv is not None
        heads = np.zeros((*qkv.shape[:2], self.hidden), np.float32)
        for name, array in inputs.items():
            if array is None:
                continue
            value = ort.OrtValue.ortvalue_from_numpy(array)  # Shares the array's memory.
            assert array.size == 0 or value.data_ptr() == array.ctypes.data, name
            binding.bind_ortvalue_input(name, value)
            if name in CACHE_NAMES:
                binding.bind_ortvalue_output(f"{name}_out", value)
        binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(heads))
        self.session.run_with_iobinding(binding)
        return heads


def kernel(inputs: Inputs, attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """Outputs of the kernel by name."""
    return Node(inputs, attributes).run(inputs)


def select(inputs: Inputs, batch: slice, rows: slice) -> Inputs:
    """The call's sequences ``batch`` and, of their new rows, ``rows``; lengths are the caller's to set."""
    out = dict(inputs)
    for name in (*CACHE_NAMES, "past_length", "query_length"):
        array = inputs[name]
        out[name] = None if array is None else np.ascontiguousarray(array[batch])
    qkv = inputs["qkv"]
    assert qkv is not None
    out["qkv"] = np.ascontiguousarray(qkv[batch, rows])
    return out


def bits(array: Array) -> bytes:
    return array.tobytes()


@dataclasses.dataclass
class Sequence:
    """One growing cache and the node that appends to it in place."""

    node: Node
    inputs: Inputs
    length: int

    @classmethod
    def of(cls, inputs: Inputs, attributes: Mapping[str, int | float], b: int = 0) -> Sequence:
        own = select(inputs, slice(b, b + 1), slice(None))
        own = {name: None if array is None else array.copy() for name, array in own.items()}
        past = inputs["past_length"]
        assert past is not None
        return cls(Node(own, attributes), own, int(past[b]))

    def append(self, rows: Array) -> Array:
        """Y [S, Hq D] of ``rows`` [S, ..] appended at the length."""
        call = self.inputs | {
            "qkv": np.ascontiguousarray(rows[None]),
            "past_length": np.array([self.length]),
            "query_length": np.array([len(rows)]),
        }
        self.length += len(rows)
        y: Array = self.node.run_in_place(call)[0]
        return y

    def cache_bits(self) -> list[bytes]:
        """The bytes of the cache rows below the length."""
        held = [self.inputs[name] for name in CACHE_NAMES]
        return [bits(array[:, :, : self.length]) for array in held if array is not None]


def qkv_rows(inputs: Inputs, b: int = 0) -> Array:
    qkv = inputs["qkv"]
    assert qkv is not None
    rows: Array = qkv[b]
    return rows
