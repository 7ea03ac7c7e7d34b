"""Runs an exported tiny model through ONNX Runtime, with caches in numpy, for tests of the graph itself."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np


class ModuleWeights:
    """The weights of a loaded module, as the passes want them."""

    def __init__(self, module: Any) -> None:
        self._state = dict(module.named_parameters(remove_duplicate=False))

    def get(self, name: str) -> Any:
        return self._state[name].detach().numpy()

    def quantized(self, name: str, scheme: Any) -> Any:
        from specexport.plugins.quantized_linear.format import quantize

        return quantize(self.get(name), scheme)


class TinyEngine:
    """An ONNX model with growing caches of one capacity.

    Args:
        path: The model.
        library: The custom-op library; None runs the ops' bodies.
        batch: Sequences.
        capacity: Rows of each cache.
    """

    def __init__(self, path: pathlib.Path, library: pathlib.Path | None, batch: int = 1, capacity: int = 160) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        if library is not None:
            options.register_custom_ops_library(str(library))
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        types = {"tensor(float16)": np.float16, "tensor(int8)": np.int8}
        self.caches = {
            entry.name: np.zeros([batch, entry.shape[1], capacity, entry.shape[3]], types[entry.type])
            for entry in self.session.get_inputs()
            if entry.name.startswith(("key_", "value_"))
        }
        self.length = np.zeros(batch, np.int64)

    def forward(self, ids: Any, query_length: Any = None, rows: Any = None) -> Any:
        """Logits float32 [R, V] of ``ids`` [B, S] appended to the caches; by default of every row that counts."""
        ids = np.asarray(ids, np.int64)
        batch, steps = ids.shape
        counts = np.full(batch, steps, np.int64) if query_length is None else np.asarray(query_length, np.int64)
        if rows is None:
            rows = [b * steps + s for b in range(batch) for s in range(counts[b])]
        feeds = {
            "input_ids": ids,
            "past_length": self.length,
            "query_length": counts,
            "logits_rows": np.asarray(rows, np.int64),
            **self.caches,
        }
        names = [entry.name for entry in self.session.get_outputs()]
        results = dict(zip(names, self.session.run(names, feeds)))
        for name in self.caches:
            self.caches[name] = results[name.replace("_cache.", "_cache_out.").replace("_scale.", "_scale_out.")]
        self.length = self.length + counts
        return results["logits"]


def eager_logits(model: Any, ids: Any, half_cache: bool = True) -> Any:
    """Logits float32 [B, S, V] of Transformers' eager attention, keys and values rounded to float16 as a cache would.

    With that rounding in the reference too, what is left is the order of additions alone.
    """
    import sys

    import torch

    source = sys.modules[type(model).__module__]
    original = source.eager_attention_forward

    def rounded(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        return original(module, query, key.half().float(), value.half().float(), *rest, **options)

    model.set_attn_implementation("eager")
    source.eager_attention_forward = rounded if half_cache else original
    try:
        with torch.no_grad():
            return model(torch.as_tensor(ids), use_cache=False).logits.numpy()
    finally:
        source.eager_attention_forward = original
