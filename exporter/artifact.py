"""Writes graphs whose weights stream, one tensor at a time, into data files that several graphs share."""

from __future__ import annotations

import contextlib
import pathlib
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

# Whole pages can be mapped straight from the file; small tensors would waste them.
PAGE = 4096
CACHE_LINE = 64
# Below this a tensor stays inside the graph, where ONNX Runtime's shape inference can see it.
INLINE_BYTES = 1024


class WeightsFile:
    """One external data file, appended to. A tensor of a name that is there already is shared, not written again.

    Args:
        path: The file to create; graphs that refer to it must lie in the same directory, because ONNX Runtime refuses
            external data outside the graph's own.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._written: dict[str, ir.ExternalTensor] = {}
        self._file = path.open("wb")

    def __enter__(self) -> WeightsFile:
        """The file itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def flush(self) -> None:
        """Let readers of the file see all that was added."""
        self._file.flush()

    def add(self, name: str, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
        """Write ``tensor`` under ``name`` and return the reference that a graph keeps in its place.

        Raises:
            ValueError: Another tensor of that name, with another shape or type, is in the file.
        """
        import onnx_ir as ir

        known = self._written.get(name)
        if known is not None:
            if known.shape != tensor.shape or known.dtype != tensor.dtype:
                raise ValueError(
                    f"{self.path.name} holds {name!r} as {known.dtype} {known.shape}; "
                    f"another graph wants it as {tensor.dtype} {tensor.shape}"
                )
            return known
        align = PAGE if tensor.nbytes >= PAGE else CACHE_LINE
        offset = -(-self._file.tell() // align) * align
        self._file.write(b"\0" * (offset - self._file.tell()))
        tensor.numpy().tofile(self._file)
        length = self._file.tell() - offset
        if length != tensor.nbytes:
            raise ValueError(f"{name!r} wrote {length} bytes where its shape and type ask for {tensor.nbytes}")
        reference = ir.ExternalTensor(
            self.path.name,
            offset,
            length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=name,
            base_dir=self.path.parent,
        )
        self._written[name] = reference
        return reference


class WeightsFiles(contextlib.ExitStack):
    """The data files of one bundle, each opened when it is first asked for and closed with this.

    Args:
        root: Directory that paths are relative to.
    """

    def __init__(self, root: pathlib.Path) -> None:
        super().__init__()
        self.root = root
        self._files: dict[str, WeightsFile] = {}

    def open(self, path: str) -> WeightsFile:
        """The file at ``path`` below the root; its directory is made if it is not there."""
        if path not in self._files:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = self.enter_context(WeightsFile(self.root / path))
        return self._files[path]

    def flush(self) -> None:
        """Let readers of the files see all that was added."""
        for file in self._files.values():
            file.flush()


def write_graph(
    model: ir.Model, path: pathlib.Path, weights: WeightsFile, on_bytes: Callable[[int], None] = lambda _: None
) -> None:
    """Save ``model`` at ``path`` with its weights in ``weights``; the model given keeps its own tensors.

    The graph is never one protobuf with its weights inside, so size is no limit.

    Args:
        model: Its large initializers may be lazy; they are read one at a time.
        path: The ONNX file.
        weights: An open file in the same directory.
        on_bytes: Called with the size of each tensor that is in ``weights`` now.
    """
    import onnx_ir as ir

    initializers = model.graph.initializers
    originals = {name: value.const_value for name, value in initializers.items()}
    try:
        for name, value in initializers.items():
            if value.const_value is not None and value.const_value.nbytes > INLINE_BYTES:
                value.const_value = weights.add(name, value.const_value)
                on_bytes(value.const_value.nbytes)
        ir.save(model, path)
    finally:
        for name, value in initializers.items():
            value.const_value = originals[name]


def weight_bytes(model: ir.Model) -> int:
    """Bytes that :func:`write_graph` puts into the weights file for this model alone."""
    sizes = (value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    return sum(size for size in sizes if size > INLINE_BYTES)
