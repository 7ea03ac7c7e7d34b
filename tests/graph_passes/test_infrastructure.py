"""Running passes: records, checks, diffs, and weights that are never read on the way."""

from __future__ import annotations

import json
import pathlib

import onnx_ir as ir
import pytest
from graph_text import graph, ops

from specexport.graph_passes.fold_constants import FoldConstantsPass
from specexport.graph_passes.infrastructure import GraphPass, PassFailure, check, run_passes, text
from specexport.graph_passes.plan import PassPlan
from specexport.graph_passes.tensors import NamedWeight

TEXT = "g (float[2,4] x, float[4] w) => (float[2,4] y) { z = Identity(x) y = Add(z, w) }"


class BreakPass(GraphPass):
    """Leaves a node whose input nothing makes."""

    def rewrite(self, model: ir.Model) -> None:
        node = ir.Node("", "Neg", [ir.Value(name="nowhere")])
        model.graph.insert_before(model.graph[0], node)
        output = node.outputs[0]
        output.name, output.shape, output.type = "broken", ir.Shape([2]), ir.TensorType(ir.DataType.FLOAT)
        model.graph.outputs.append(node.outputs[0])
        self.match()


class RaisePass(GraphPass):
    """Has a bug."""

    def rewrite(self, model: ir.Model) -> None:
        raise KeyError("no such thing")


def test_records_say_what_happened(tmp_path: pathlib.Path) -> None:
    model = graph(TEXT, w=(4,))
    seen: list[str] = []
    first, second = run_passes(model, [FoldConstantsPass(), FoldConstantsPass()], tmp_path, on_pass=seen.append)
    assert seen == ["FoldConstants", "FoldConstants"]
    assert (first.matched, first.modified, first.nodes_before, first.nodes_after) == (1, True, 2, 1)
    assert (second.matched, second.modified, second.nodes_before, second.nodes_after) == (0, False, 1, 1)
    assert json.loads(json.dumps(first.to_json()))["refused"] == []
    (diff,) = tmp_path.iterdir()
    assert diff.name == "00-FoldConstants.diff"
    assert any(line.startswith("-") and "Identity" in line for line in diff.read_text().splitlines())


@pytest.mark.parametrize(("broken", "reason"), [(BreakPass(), "nowhere"), (RaisePass(), "no such thing")])
def test_a_pass_that_breaks_the_graph_is_named_with_those_before_it(broken: GraphPass, reason: str) -> None:
    title = type(broken).__name__.removesuffix("Pass")
    with pytest.raises(PassFailure, match=rf"the pass {title} failed after \['FoldConstants'\]: .*{reason}"):
        run_passes(graph(TEXT, w=(4,)), [FoldConstantsPass(), broken])


def test_weights_are_not_read_for_checks_and_diffs(tmp_path: pathlib.Path) -> None:
    model = graph(TEXT, w=(4,))
    value = model.graph.initializers["w"]
    value.const_value = NamedWeight("w", ir.DataType.FLOAT, ir.Shape([4]))
    names = list(model.graph.initializers), [value.name for value in model.graph.inputs]
    check(model)
    assert "w" in text(model)
    run_passes(model, [FoldConstantsPass()], tmp_path)
    assert (list(model.graph.initializers), [value.name for value in model.graph.inputs]) == names
    assert ops(model) == ["Add"]
    assert model.graph.initializers["w"].const_value is value.const_value


def test_a_plan_is_checked() -> None:
    from specexport.graph_passes.plan import NoWeights

    with pytest.raises(ValueError, match="key_bits must be one of"):
        PassPlan(weights=NoWeights(), key_bits=5)
    with pytest.raises(RuntimeError, match="no weights were given"):
        NoWeights().get("w")
