"""A real bundle of a tiny random Llama-like pair, written by hand: real engines, the real custom-op library."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import bundle_files
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from specexport.plugins.quantized_linear.format import QuantizationScheme, quantize
from specexport.plugins.quantized_linear.pack import pack
from specexport.runtime.cache import cache_tensors
from specexport.runtime.manifest import CacheLayer, CacheLayout, ContractEntry, DraftEntry, TensorEntry

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 96, 64, 4, 2, 16, 200
SCHEME = QuantizationScheme(bits=8, group_size=32, has_minimum=False)
CPU = "specexport.cpu"


class Builder:
    """Collects nodes and initializers of one engine."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, name: str, value: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def matrix(self, name: str, rows: int, columns: int, *, gated: bool = False) -> str:
        weight = quantize((self.rng.normal(size=(rows, columns)) * columns**-0.5).astype(np.float32), SCHEME)
        packed = pack(weight.weight, weight.scale, weight.minimum, SCHEME.bits, SCHEME.group_size, gated)
        return self.constant(name, packed)

    def linear(self, name: str, x: str, rows: int, columns: int, *, residual: str = "", **more: Any) -> str:
        gated = bool(more.get("gated"))
        attributes = {
            "bits": SCHEME.bits, "group_size": SCHEME.group_size, "activation_bits": 8, "activation_group_size": 32,
            "norm": "none", "epsilon": 1e-5, "activation": "none", "gated": 0,
            "in_features": columns, "out_features": rows, "has_minimum": 0, **more,
        }  # fmt: skip
        norm = self.constant(f"{name}.norm", np.ones(columns, np.float32)) if attributes["norm"] == "rms" else ""
        inputs = [x, self.matrix(f"{name}.weight", rows, columns, gated=gated), "", norm, "", residual]
        while not inputs[-1]:
            inputs.pop()
        return self.node("QuantizedLinear", inputs, [f"{name}.y"], CPU, **attributes)

    def node(self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return outputs[0]


def write_engine(directory: pathlib.Path, name: str, seed: int, layers: int) -> bundle_files.EngineEntry:
    """``engines/cpu/name.onnx`` with weights of its own in ``name.bin``; what the manifest says of it."""
    b = Builder(np.random.default_rng(seed))
    layout = CacheLayout(tuple(CacheLayer(KV_HEADS, HEAD_DIM, 8, 16, 16, 0, 0) for _ in range(layers)))
    tensors = cache_tensors(layout)
    angles = np.arange(CONTEXT)[:, None] * 100.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    cos, sin = (b.constant(n, f(angles).astype(np.float32)) for n, f in (("cos", np.cos), ("sin", np.sin)))
    table = b.matrix("embedding", VOCAB, HIDDEN)
    x = b.node(
        "QuantizedEmbedding", ["input_ids", table], ["x"], CPU,
        bits=8, group_size=32, in_features=HIDDEN, out_features=VOCAB, has_minimum=0,
    )  # fmt: skip
    for i in range(layers):
        qkv = b.linear(f"qkv.{i}", x, (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, norm="rms")
        key, scale, value = (t.name for t in tensors[3 * i : 3 * i + 3])
        y = b.node(
            "QuantizedKVAttention",
            [qkv, key, scale, value, "", "past_length", "query_length", cos, sin],
            [f"attention.{i}", *(t.output for t in tensors[3 * i : 3 * i + 3])],
            "specexport",
            q_num_heads=HEADS, kv_num_heads=KV_HEADS, scale=HEAD_DIM**-0.5, softcap=0.0, window=0,
            rotary_interleaved=0, norm_epsilon=1e-6, key_bits=8, value_bits=16, key_group_size=16, value_group_size=0,
        )  # fmt: skip
        x = b.linear(f"output.{i}", y, HIDDEN, HEADS * HEAD_DIM, residual=x)
        up = b.linear(f"up.{i}", x, 256, HIDDEN, norm="rms", activation="silu", gated=1)
        x = b.linear(f"down.{i}", up, HIDDEN, 128, residual=x)
    flat = b.node("Reshape", [x, b.constant("rows.shape", np.array([-1, HIDDEN]))], ["flat"])
    wanted = b.node("Gather", [flat, "logits_rows"], ["wanted"], axis=0)
    logits = b.linear("head", wanted, VOCAB, HIDDEN, norm="rms")
    b.nodes[-1].output[0] = "small.logits"
    b.node("Mul", ["small.logits", b.constant("gain", np.float32(4))], ["logits"])
    assert logits == "head.y"
    inputs = [
        TensorEntry("input_ids", "int64", ("batch", "sequence")),
        TensorEntry("past_length", "int64", ("batch",)),
        TensorEntry("query_length", "int64", ("batch",)),
        TensorEntry("logits_rows", "int64", ("rows",)),
        *(TensorEntry(t.name, t.dtype, ("batch", t.heads, "capacity", t.width)) for t in tensors),
    ]
    outputs = [
        TensorEntry("logits", "float32", ("rows", VOCAB)),
        *(TensorEntry(t.output, t.dtype, ("batch", t.heads, "capacity", t.width)) for t in tensors),
    ]
    graph = helper.make_graph(b.nodes, name, _infos(inputs), _infos(outputs), b.constants)
    opsets = [helper.make_opsetid(domain, 1) for domain in (CPU, "specexport")] + [helper.make_opsetid("", 20)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    folder = directory / "engines" / "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save_model(
        model, folder / f"{name}.onnx", save_as_external_data=True, location=f"{name}.bin", size_threshold=256
    )
    return bundle_files.engine_entry(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=layers, context_length=CONTEXT, cache=layout,
        engines={"cpu": bundle_files.BackendFiles(f"engines/cpu/{name}.onnx", f"engines/cpu/{name}.bin")},
        inputs=tuple(inputs), outputs=tuple(outputs),
    )  # fmt: skip


def _infos(tensors: list[TensorEntry]) -> list[onnx.ValueInfoProto]:
    types = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16,
             "int8": TensorProto.INT8}  # fmt: skip
    return [helper.make_tensor_value_info(t.name, types[t.dtype], t.shape) for t in tensors]


def write_tiny_bundle(directory: pathlib.Path, *, draft: str = "layers", files: dict[str, bytes] | None = None) -> None:
    """A pair in ``directory``; ``draft`` is layers (an own engine of other weights), ngram or none."""
    target = write_engine(directory, "target", seed=0, layers=2)
    entry = None
    if draft == "ngram":
        entry = DraftEntry("ngram", 3, max_ngram_size=3)
    elif draft == "layers":
        entry = DraftEntry("layers", 3, layers=1, engine=write_engine(directory, "draft", seed=0, layers=1))
    for name, data in (files or {}).items():
        (directory / name).write_bytes(data)
    found = {
        path.relative_to(directory).as_posix(): bundle_files.file_entry(path.read_bytes())
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    manifest = bundle_files.manifest(
        target=target, draft=entry, files=found, contract=ContractEntry(VOCAB, VOCAB, VOCAB, 0)
    )
    dataclasses.replace(manifest, ops={f"specexport::{op}": 1 for op in ("QuantizedKVAttention",)}).write(directory)
