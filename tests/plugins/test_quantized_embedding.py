"""QuantizedEmbedding: the kernel and the ONNX body against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_node import machine, one_node, run, session

from specexport.plugins import functions
from specexport.plugins.quantized_embedding import reference
from specexport.plugins.quantized_embedding.spec import INPUTS, SPEC

Arrays = dict[str, Any]
quick = settings(max_examples=30, deadline=None, derandomize=True)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Arrays, Arrays]:
    bits = draw(st.sampled_from((4, 8, 32)))
    group_size = 0 if bits == 32 else draw(st.sampled_from((32, 64, 128)))
    return reference.random_inputs(
        np.random.default_rng(draw(st.integers(0, 2**32))),
        ids=draw(st.sampled_from(((1,), (2, 3), (1, 40), (0,), (2, 0)))),
        vocab_size=draw(st.integers(1, 70)),
        hidden_size=draw(st.integers(1, 70)) if bits == 32 else group_size * draw(st.integers(1, 5)),
        has_minimum=bits != 32 and draw(st.booleans()),
        bits=bits,
        group_size=group_size,
    )


def kernel(inputs: Arrays, attributes: Arrays) -> np.ndarray[Any, Any]:
    lowered, full = reference.cpu_inputs(inputs, attributes)
    return run(session(one_node("specexport.cpu", SPEC.name, lowered, full), kernels=True), lowered)


# Both dequantize with one rounding, as the oracle does: equality, not closeness.
@pytest.mark.parametrize("threads", [1, 2])
@quick
@given(call=calls())
def test_kernel_equals_oracle(threads: int, call: tuple[Arrays, Arrays]) -> None:
    with machine(threads=threads):
        np.testing.assert_array_equal(kernel(*call), reference.oracle(*call)["y"])


@quick
@given(call=calls())
def test_body_equals_oracle(call: tuple[Arrays, Arrays]) -> None:
    inputs, attributes = call
    body = functions.function(SPEC, attributes, {name for name in INPUTS if inputs[name] is not None})
    rank = inputs["input_ids"].ndim + 1
    model = one_node(SPEC.domain, SPEC.name, inputs, attributes, [body], output_rank=rank)
    onnx.checker.check_model(model, full_check=True)
    expected = reference.oracle(*call)["y"]
    np.testing.assert_array_equal(run(session(model, kernels=False), inputs), expected)
    feeds = {name: value for name, value in inputs.items() if value is not None}
    np.testing.assert_array_equal(onnx.reference.ReferenceEvaluator(model).run(None, feeds)[0], expected)


@pytest.mark.parametrize("bad", [-1, 50, 2**40])
def test_an_id_outside_the_vocabulary_is_named(bad: int) -> None:
    inputs, attributes = reference.random_inputs(np.random.default_rng(0))
    inputs["input_ids"] = np.array([[3, bad]], np.int64)
    with pytest.raises(Exception, match=rf"id {bad} at position 1 is outside the vocabulary, 0 to 49"):
        kernel(inputs, attributes)


def test_a_packed_matrix_of_another_size_is_named() -> None:
    lowered, full = reference.cpu_inputs(*reference.random_inputs(np.random.default_rng(0)))
    running = session(one_node("specexport.cpu", SPEC.name, lowered, full), kernels=True)
    packed = lowered["packed"]
    assert packed is not None
    with pytest.raises(Exception, match=rf"packed: {packed.nbytes} bytes expected.*has {packed.nbytes - 1}"):
        run(running, lowered | {"packed": packed[:-1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 2}, "bits must be 4, 8 or 32, is 2"),
        ({"group_size": 16}, "group_size must be 32, 64 or 128 .*is 16"),
        ({"in_features": 65}, "in_features must be a multiple of group_size 32, is 65"),
        ({"has_minimum": 2}, "has_minimum must be 0 to 1, is 2"),
    ],
)
def test_bad_attributes_are_named(change: Arrays, message: str) -> None:
    lowered, full = reference.cpu_inputs(*reference.random_inputs(np.random.default_rng(0)))
    with pytest.raises(Exception, match=message):
        session(one_node("specexport.cpu", SPEC.name, lowered, full | change), kernels=True)
