"""One engine: an ONNX Runtime session whose caches are bound in place, and whose bindings are made once per shape."""

from __future__ import annotations

import pathlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specexport.plugins.errors import InputError, SpecexportError
from specexport.runtime.cache import Ints, KVCache, cache_tensors
from specexport.runtime.manifest import EngineEntry, TensorEntry
from specexport.runtime.native import op_library

Floats = npt.NDArray[np.float32]
MAX_BINDINGS = 32  # shapes kept per cache; a generation uses about num_assistant_tokens + 3


class EngineError(SpecexportError):
    """An engine file is not what its manifest says, or failed to run."""


class Model(Protocol):
    """What generation needs of an engine; tests put a table of logits here."""

    vocab_size: int
    context_length: int

    def new_cache(self, batch: int = 1, capacity: int = 256) -> KVCache: ...

    def forward(
        self,
        input_ids: npt.ArrayLike,
        cache: KVCache,
        *,
        query_length: npt.ArrayLike | None = None,
        logits_rows: npt.ArrayLike | None = None,
        copy: bool = True,
    ) -> Floats: ...


class Engine:
    """The compiled model of one role on the CPU."""

    def __init__(self, path: pathlib.Path, entry: EngineEntry) -> None:
        """Load ``path``; weights are mapped, not read.

        Raises:
            EngineError: ONNX Runtime refuses the file, or its inputs or outputs are not the manifest's.
        """
        self.entry = entry
        self.vocab_size = entry.vocab_size
        self.context_length = entry.context_length
        self.path = path
        self._session = _open_session(path)
        _check_tensors(path, "input", self._session.get_inputs(), entry.inputs)
        _check_tensors(path, "output", self._session.get_outputs(), entry.outputs)
        _check_layout(path, entry)

    def new_cache(self, batch: int = 1, capacity: int = 256) -> KVCache:
        """An empty cache for ``batch`` sequences; it grows on demand up to the context length."""
        return KVCache(self.entry.cache, context_length=self.context_length, batch=batch, capacity=capacity)

    def forward(
        self,
        input_ids: npt.ArrayLike,
        cache: KVCache,
        *,
        query_length: npt.ArrayLike | None = None,
        logits_rows: npt.ArrayLike | None = None,
        copy: bool = True,
    ) -> Floats:
        """Append ``input_ids`` at ``cache.length``, attend, and return logits.

        Args:
            input_ids: int64 [B, S].
            cache: This engine's, of batch B; its lengths advance by ``query_length``.
            query_length: int64 [B]: how many of the S columns count in each sequence. Default: all.
            logits_rows: int64 [R]: rows of the flattened B*S that are wanted. Default: every row that counts.
            copy: False returns the engine's own buffer, which the next call on this cache overwrites.

        Returns:
            float32 [R, vocab].

        Raises:
            CapacityError: The context length is exceeded; the cache is unchanged.
            EngineError: The session failed; the cache's lengths are unchanged.
        """
        ids = np.asarray(input_ids, np.int64)
        if ids.ndim != 2 or ids.shape[0] != cache.batch or ids.shape[1] == 0:
            raise InputError(f"input_ids must be [{cache.batch}, at least 1], is {list(ids.shape)}")
        batch, width = ids.shape
        counts = np.full(batch, width) if query_length is None else np.asarray(query_length, np.int64)
        if counts.shape != (batch,) or (counts < 0).any() or (counts > width).any():
            raise InputError(f"query_length must be [{batch}] of 0 to {width}, is {counts.tolist()}")
        if logits_rows is not None:
            rows = np.asarray(logits_rows, np.int64)
            if rows.ndim != 1 or (rows.size and (rows.min() < 0 or rows.max() >= batch * width)):
                raise InputError(f"logits_rows must be a list of 0 to {batch * width - 1}, is {rows.tolist()}")
        elif query_length is None:
            rows = np.arange(batch * width)
        else:
            rows = np.flatnonzero(np.arange(width) < counts[:, None])
        cache.reserve(int((cache.length + counts).max()))
        step = self._step(cache, (batch, width, len(rows)))
        logits = step.run(ids, cache.length, counts, rows)
        cache.advance(counts)
        return logits.copy() if copy else logits

    def _step(self, cache: KVCache, shape: tuple[int, int, int]) -> _Step:
        """The binding for ``shape``, made at its first use and after the cache has grown."""
        step: _Step | None = cache.bindings.get(shape)
        if step is None:
            if len(cache.bindings) >= MAX_BINDINGS:
                cache.bindings.pop(next(iter(cache.bindings)))
            step = cache.bindings[shape] = _Step(self, cache, shape)
        return step


class _Step:
    """Buffers and the io binding of one shape (B, S, R): running it allocates nothing here."""

    def __init__(self, engine: Engine, cache: KVCache, shape: tuple[int, int, int]) -> None:
        batch, width, rows = shape
        self._path = engine.path
        self._session = engine._session
        self._ids = np.zeros((batch, width), np.int64)
        self._past = np.zeros(batch, np.int64)
        self._query = np.zeros(batch, np.int64)
        self._rows = np.zeros(rows, np.int64)
        self._logits = np.zeros((rows, engine.vocab_size), np.float32)
        self._binding = self._session.io_binding()
        feeds = (self._ids, self._past, self._query, self._rows)
        for name, array in zip(("input_ids", "past_length", "query_length", "logits_rows"), feeds):
            self._bind(self._binding.bind_input, name, array)
        self._bind(self._binding.bind_output, "logits", self._logits)
        for tensor in cache.tensors:
            self._bind(self._binding.bind_input, tensor.name, cache.buffers[tensor.name])
            self._bind(self._binding.bind_output, tensor.output, cache.buffers[tensor.name])

    @staticmethod
    def _bind(bind: Any, name: str, array: npt.NDArray[Any]) -> None:
        bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def run(self, ids: Ints, past: Ints, query: Ints, rows: Ints) -> Floats:
        self._ids[...] = ids
        self._past[...] = past
        self._query[...] = query
        self._rows[...] = rows
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime's exceptions share no public base
            raise EngineError(f"{self._path}: {_one_line(error)}") from None
        return self._logits


def _open_session(path: pathlib.Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the kernels' own pool does the work; two pools would fight over the cores
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.register_custom_ops_library(op_library())
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # as above
        raise EngineError(f"{path}: ONNX Runtime cannot load it: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_tensors(path: pathlib.Path, kind: str, found: list[Any], expected: tuple[TensorEntry, ...]) -> None:
    """The session's inputs or outputs have the manifest's names, types and fixed sizes."""
    if [tensor.name for tensor in found] != [tensor.name for tensor in expected]:
        odd = sorted({t.name for t in found} ^ {t.name for t in expected}) or ["their order"]
        raise EngineError(f"{path}: its {kind}s differ from the manifest's: {', '.join(odd[:4])}")
    types = {"int64": "int64", "float32": "float", "float16": "float16", "int8": "int8", "uint8": "uint8"}
    for have, want in zip(found, expected):
        if have.type != f"tensor({types.get(want.dtype, want.dtype)})":
            raise EngineError(f"{path}: {kind} {want.name} is {have.type}, the manifest says {want.dtype}")
        sizes = [(a, b) for a, b in zip(have.shape, want.shape) if isinstance(a, int) or isinstance(b, int)]
        if len(have.shape) != len(want.shape) or any(a != b for a, b in sizes):
            raise EngineError(
                f"{path}: {kind} {want.name} has shape {list(have.shape)}, the manifest says {list(want.shape)}"
            )


def _check_layout(path: pathlib.Path, entry: EngineEntry) -> None:
    """The manifest's inputs and outputs are those that the runtime feeds and its cache layout asks for."""
    tensors = cache_tensors(entry.cache)
    names = ["input_ids", "past_length", "query_length", "logits_rows", *(tensor.name for tensor in tensors)]
    outputs = ["logits", *(tensor.output for tensor in tensors)]
    for expected, found in ((names, entry.inputs), (outputs, entry.outputs)):
        have = [tensor.name for tensor in found]
        if have != expected:
            odd = next((f"{a} instead of {b}" for a, b in zip(have, expected) if a != b), f"{len(have)} of them")
            raise EngineError(f"{path}: its inputs or outputs do not follow its cache layout: {odd}")
    cached = zip((*tensors, *tensors), (*entry.inputs[4:], *entry.outputs[1:]))
    for tensor, found_entry in cached:
        fixed = (*found_entry.shape[1:2], *found_entry.shape[3:])
        if (found_entry.dtype, fixed) != (tensor.dtype, (tensor.heads, tensor.width)):
            raise EngineError(
                f"{path}: {found_entry.name} is {found_entry.dtype} {list(found_entry.shape)}, its cache layout "
                f"asks for {tensor.dtype} with {tensor.heads} heads and rows of {tensor.width}"
            )
    if entry.outputs[0].shape[-1:] != (entry.vocab_size,):
        raise EngineError(f"{path}: logits are {list(entry.outputs[0].shape)}, its vocabulary is {entry.vocab_size}")
