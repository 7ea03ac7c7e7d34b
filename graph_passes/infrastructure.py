"""Runs passes one after another: each checked, timed, counted, and its changes written as a diff."""

from __future__ import annotations

import abc
import dataclasses
import difflib
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

# Initializers of at most this many bytes whose data is at hand stay in a checked graph; shapes are among them.
_SMALL_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Something that a pass looked at and left as it was."""

    reason: str
    where: str


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """What one pass did; goes into the manifest.

    Attributes:
        name: The pass's class without ``Pass``.
        modified: Whether the graph changed.
        seconds: Wall time, the check included.
        nodes_before: Nodes of the graph before it.
        nodes_after: Nodes after it.
        matched: Places that it rewrote.
        refused: Candidates that it left, with reasons.
    """

    name: str
    modified: bool
    seconds: float
    nodes_before: int
    nodes_after: int
    matched: int
    refused: tuple[Refusal, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**dataclasses.asdict(self), "refused": [dataclasses.asdict(refusal) for refusal in self.refused]}


class PassFailure(ir.passes.PassError):
    """A pass raised, or left a graph that is not valid; a fault of the pass, not of the model."""


class GraphPass(ir.passes.InPlacePass, abc.ABC):
    """A pass that counts what it rewrote and says why it left what it left.

    Attributes:
        matched: Places rewritten by the last call.
        refused: Candidates left by the last call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.matched = 0
        self.refused: list[Refusal] = []

    @property
    def title(self) -> str:
        """The pass's name in reports."""
        return type(self).__name__.removesuffix("Pass")

    @abc.abstractmethod
    def rewrite(self, model: ir.Model) -> None:
        """Change ``model``; call ``match`` for each place changed and ``refuse`` for each candidate left."""

    def match(self) -> None:
        """Count one place rewritten."""
        self.matched += 1

    def refuse(self, reason: str, where: ir.Value | ir.Node) -> None:
        """Say why a candidate stays as it is."""
        name = where.outputs[0].name if isinstance(where, ir.Node) else where.name
        self.refused.append(Refusal(reason, str(name)))

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run once; dead nodes and initializers are removed after a change."""
        self.matched, self.refused = 0, []
        self.rewrite(model)
        if self.matched:
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=self.matched > 0)


def run_passes(
    model: ir.Model,
    passes: Sequence[GraphPass],
    dump_dir: pathlib.Path | None = None,
    on_pass: Callable[[str], None] = lambda _: None,
) -> list[PassRecord]:
    """Run ``passes`` in order over ``model``, checking the graph after each that changed it.

    Args:
        model: Changed in place.
        passes: From ``pipeline``.
        dump_dir: Where ``NN-Name.diff`` of each pass that changed something is written.
        on_pass: Called with each pass's name before it runs.

    Raises:
        PassFailure: A pass raised, or its graph is not valid; names the pass and those before it.
    """
    records: list[PassRecord] = []
    for number, graph_pass in enumerate(passes):
        on_pass(graph_pass.title)
        before = text(model) if dump_dir is not None else ""
        nodes, start = len(model.graph), time.perf_counter()
        try:
            modified = graph_pass(model).modified
            if modified:
                check(model)
        except Exception as error:
            done = [record.name for record in records]
            raise PassFailure(f"the pass {graph_pass.title} failed after {done}: {error}") from error
        records.append(
            PassRecord(
                graph_pass.title,
                modified,
                round(time.perf_counter() - start, 4),
                nodes,
                len(model.graph),
                graph_pass.matched,
                tuple(graph_pass.refused),
            )
        )
        if dump_dir is not None and modified:
            dump_dir.mkdir(parents=True, exist_ok=True)
            lines = difflib.unified_diff(before.splitlines(), text(model).splitlines(), "before", "after", lineterm="")
            (dump_dir / f"{number:02}-{graph_pass.title}.diff").write_text("\n".join(lines) + "\n")
    return records


@contextmanager
def without_weights(model: ir.Model) -> Iterator[None]:
    """While open, weights are inputs of the graph, so that it can be serialized without reading them."""
    graph = model.graph
    hidden = {
        name: value
        for name, value in graph.initializers.items()
        if isinstance(value.const_value, ir.LazyTensor)
        or (value.const_value is not None and value.const_value.nbytes > _SMALL_BYTES)
    }
    order, inputs = list(graph.initializers), len(graph.inputs)
    try:
        for name, value in hidden.items():
            del graph.initializers[name]
            graph.inputs.append(value)
        yield
    finally:
        del graph.inputs[inputs:]
        everything = {**graph.initializers, **hidden}
        graph.initializers.clear()
        for name in order:
            graph.initializers[name] = everything[name]


def check(model: ir.Model) -> None:
    """ONNX's full check (types and shapes included), without reading a weight."""
    import onnx

    with without_weights(model):
        proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)


def text(model: ir.Model) -> str:
    """The graph as ONNX text, weights as inputs, bodies left out."""
    with without_weights(model):
        functions = dict(model.functions)
        model.functions.clear()
        try:
            return str(ir.to_onnx_text(model, exclude_initializers=True))
        finally:
            model.functions.update(functions)
