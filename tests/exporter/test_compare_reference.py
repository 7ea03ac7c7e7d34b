"""The eager reference, its layers, and the engine graph's residual stream."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import tiny_models

from specexport.exporter.compare import cut_reference
from specexport.exporter.compare_layers import LayersError, layer_figures, layer_values
from specexport.exporter.compare_reference import (
    ReferenceModelError,
    TorchReference,
    as_reference,
    decoder_layers,
)
from specexport.plugins.errors import InputError

torch = pytest.importorskip("torch")
IDS = np.random.default_rng(0).integers(3, 200, 24)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    found: torch.nn.Module = tiny_models.build("llama")
    return found.float().eval()


def test_logits_are_the_modules(model: torch.nn.Module) -> None:
    logits = TorchReference(model).logits(IDS)
    assert logits.dtype == np.float32 and logits.shape == (24, tiny_models.VOCAB_SIZE)
    with torch.no_grad():
        expected = model(torch.from_numpy(IDS[:10])[None]).logits[0, -1].numpy()
    np.testing.assert_allclose(logits[9], expected, atol=1e-5)


def test_greedy_follows_the_logits_and_stops_at_an_end(model: torch.nn.Module) -> None:
    reference = TorchReference(model)
    found = reference.greedy(IDS, 6, ())
    history = IDS
    for token in found:
        assert token == reference.logits(history)[-1].argmax()
        history = np.append(history, token)
    assert len(found) == 6
    first = found.index(found[3])
    assert reference.greedy(IDS, 6, (found[3],)) == found[: first + 1]
    assert reference.greedy(IDS, 0, ()) == []


def test_a_reference_of_less_than_fp32_is_refused(model: torch.nn.Module) -> None:
    with pytest.raises(InputError, match=r"lm_head.weight is torch.bfloat16"):
        TorchReference(torch.nn.ModuleDict({"lm_head": torch.nn.Linear(2, 2).bfloat16()}))
    assert isinstance(as_reference(model), TorchReference)


def test_layer_outputs_are_the_residual_stream(model: torch.nn.Module) -> None:
    outputs = TorchReference(model).layer_outputs(IDS)
    assert [output.shape for output in outputs] == [(24, 64)] * 2
    with torch.no_grad():
        hidden = model(torch.from_numpy(IDS)[None], output_hidden_states=True).hidden_states
        np.testing.assert_allclose(outputs[0], hidden[1][0].numpy(), atol=1e-6)
        normed = model.model.norm(torch.from_numpy(outputs[1]))  # type: ignore[operator, union-attr]
        np.testing.assert_allclose(normed.numpy(), hidden[2][0].numpy(), atol=1e-5)


def test_layers_that_cannot_be_told_are_named() -> None:
    with pytest.raises(ReferenceModelError, match="Linear has 0 lists of None modules"):
        decoder_layers(torch.nn.Linear(2, 2))


def test_a_cut_reference_shares_parameters_and_leaves_the_whole_one_alone(model: torch.nn.Module) -> None:
    before = TorchReference(model).logits(IDS)
    cut = cut_reference(model, 1)
    assert isinstance(cut, torch.nn.Module)
    assert len(decoder_layers(cut)) == 1
    whole = dict(model.named_parameters())
    assert all(parameter is whole[name] for name, parameter in cut.named_parameters())
    np.testing.assert_array_equal(TorchReference(model).logits(IDS), before)
    short = TorchReference(cut).logits(IDS)
    with torch.no_grad():
        hidden = torch.from_numpy(TorchReference(model).layer_outputs(IDS)[0])
        expected = model.lm_head(model.model.norm(hidden)).numpy()  # type: ignore[operator, union-attr]
    np.testing.assert_allclose(short, expected, atol=1e-5)


LAYER = """
    qkv{n} = specexport.cpu.QuantizedLinear(x{n}, w)
    y{n}, k{n} = specexport.QuantizedKVAttention(qkv{n}, past_length)
    m{n} = specexport.cpu.QuantizedLinear(y{n}, w, "", "", "", x{n})
    u{n} = specexport.cpu.QuantizedLinear(m{n}, w)
    {end}
"""
FUSED = 'x{m} = specexport.cpu.QuantizedLinear(u{n}, w, "", "", "", m{n})'


def graph(*ends: str, tail: str = "") -> ir.Graph:
    """An engine's graph as its passes leave it: fused layers, then the rows that reach the head."""
    text = """<ir_version: 10, opset_import: ["" : 23, "specexport" : 1, "specexport.cpu" : 1]>
    engine (int64[B, S] input_ids, int64[B] past_length, int64[R] logits_rows, uint8[N] w) => (float[R, V] logits) {
        size = Shape(input_ids)
        x0 = specexport.cpu.QuantizedEmbedding(input_ids, w)
    """
    for n, end in enumerate(ends):
        text += LAYER.format(n=n, end=end.format(n=n, m=n + 1))
    last = len(ends)
    text += tail or f"picked = Gather(x{last}, logits_rows)\n"
    text += "r = Reshape(picked, size)\nlogits = specexport.cpu.QuantizedLinear(r, w)\n}"
    return ir.from_onnx_text(text).graph


def names(found: list[ir.Value]) -> list[str | None]:
    return [value.name for value in found]


def test_layer_outputs_of_fused_and_standard_graphs() -> None:
    plain = "d{n} = specexport.cpu.QuantizedLinear(u{n}, w)\n x{m} = Add(m{n}, d{n})"
    assert names(layer_values(graph(FUSED, FUSED, plain))) == ["x1", "x2", "x3"]


def test_a_final_norm_that_stays_standard_is_not_the_layers_output() -> None:
    tail = "normed = LayerNormalization(x2, w)\n picked = Gather(normed, logits_rows)\n"
    assert names(layer_values(graph(FUSED, FUSED, tail=tail))) == ["x1", "x2"]


def test_a_parallel_residual_has_one_sum_a_layer() -> None:
    parallel = "s{n} = Add(y{n}, u{n})\n x{m} = Add(s{n}, x{n})"
    assert names(layer_values(graph(parallel, FUSED))) == ["x1", "x2"]


def test_a_stream_that_bypasses_a_layer_is_refused_by_its_number() -> None:
    tail = "bypassing = Add(x3, x1)\n picked = Gather(bypassing, logits_rows)\n"
    with pytest.raises(LayersError, match="layer 1 has no addition"):
        layer_values(graph(FUSED, FUSED, FUSED, tail=tail))


def test_figures_of_a_layer() -> None:
    x = np.array([[1.0, 0], [0, 2]], np.float32)
    [found] = layer_figures([x], [np.array([[2.0, 0], [2, 0]], np.float32)])
    assert (found.cosine_mean, found.cosine_min, found.norm_ratio) == (0.5, 0.0, 0.75)
    with pytest.raises(LayersError, match="1 layer outputs, the reference 2"):
        layer_figures([x], [x, x])
