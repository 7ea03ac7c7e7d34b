"""Every tiny architecture, captured, through all passes, lowered: the same logits as eager Transformers."""

from __future__ import annotations

import pathlib
from typing import Any

import captured
import numpy as np
import pytest
import tiny_engine
import tiny_models

from specexport.plugins.native.library import library_path

# (rows of the call, rows that count in each of two sequences): prefill, single steps, ragged calls, a pause.
# 88 tokens in all: windows of 32 are crossed twice.
CALLS = ((20, (20, 17)), (1, (1, 1)), (5, (5, 2)), (30, (30, 30)), (1, (1, 1)), (1, (0, 1)), (31, (31, 28)))
# Standard nodes that are left in the whole graph, where not just the two that choose the rows of the logits.
ROWS = {"Reshape": 1, "Gather": 1}
LEFT = {
    "olmo2": {"RMSNormalization": 8, "Add": 4, "Concat": 2, **ROWS},
    "granite": {"Mul": 5, "Add": 4, "Div": 1, **ROWS},
    "gemma2": {"RMSNormalization": 8, "Add": 8, "Mul": 2, "Div": 1, "Tanh": 1, **ROWS},
    "gemma3": {"RMSNormalization": 8, "Add": 8, "Mul": 2, "Div": 1, "Tanh": 1, **ROWS},
    "gpt2": {"Shape": 1, "Squeeze": 1, "Range": 1, "Unsqueeze": 2, "Add": 2, "Reshape": 1, "Gather": 2},
    "gpt_neox": {"Add": 2, **ROWS},
}
EXPERTS = ("qwen3_moe", "gpt_oss")


def longest_context(arch: str) -> int:
    return 128 if arch == "phi3_longrope" else captured.CONTEXT  # up to 128 its reference takes the short factors


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_logits_are_those_of_eager_attention(arch: str, tmp_path: pathlib.Path) -> None:
    built = captured.built(arch, longest_context(arch))
    engine = tiny_engine.TinyEngine(built.save(tmp_path), library_path(), batch=2, capacity=96)
    ids = np.random.default_rng(0).integers(0, tiny_models.VOCAB_SIZE, (2, 96))
    reference = tiny_engine.eager_logits(built.module, ids)
    start, worst = np.zeros(2, int), 0.0
    for rows, counts in CALLS:
        call = np.zeros((2, rows), int)
        for b, count in enumerate(counts):
            call[b, :count] = ids[b, start[b] : start[b] + count]
        logits = engine.forward(call, query_length=counts)
        wanted = np.concatenate([reference[b, start[b] : start[b] + count] for b, count in enumerate(counts)])
        worst = max(worst, float(np.abs(logits - wanted).max()))
        start += counts
    # Both round keys and values to float16; an element at the edge may round the other way.
    assert worst < 1e-3 * np.abs(reference).max()
    assert np.abs(reference).std() > 0.3


@pytest.mark.parametrize("arch", [arch for arch in tiny_models.ARCHITECTURES if arch not in EXPERTS])
def test_what_is_left_of_each_layer(arch: str) -> None:
    built = captured.built(arch, longest_context(arch))
    layers = built.module.config.num_hidden_layers
    linears = 6 if arch == "olmo2" else 4  # OLMo 2 norms all heads together between its projections and RoPE
    ours = {"QuantizedKVAttention": layers, "QuantizedLinear": linears * layers + 1, "QuantizedEmbedding": 1}
    assert built.ops() == {**ours, **LEFT.get(arch, ROWS)}


def test_a_llama_layer_is_five_nodes() -> None:
    nodes = list(captured.built("llama").model.graph)
    layer = ["QuantizedLinear", "QuantizedKVAttention", "QuantizedLinear", "QuantizedLinear", "QuantizedLinear"]
    assert [node.op_type for node in nodes] == [
        "QuantizedEmbedding",
        *layer,
        *layer,
        "Reshape",
        "Gather",
        "QuantizedLinear",
    ]
    qkv, attention, output, gate_up, down = nodes[1:6]
    assert [node.attributes["norm"].as_string() for node in (qkv, output, gate_up, down)] == ["rms", "none"] * 2
    assert gate_up.attributes["gated"].as_int() == 1
    assert gate_up.attributes["activation"].as_string() == "silu"
    assert output.inputs[-1] is nodes[0].outputs[0]  # the residual stream
    assert down.inputs[-1] is output.outputs[0]
    assert [value is not None for value in attention.inputs] == [True, True, False, True, False, *[True] * 4]
    assert nodes[-1].attributes["norm"].as_string() == "rms"


@pytest.mark.parametrize("arch", EXPERTS)
def test_experts_stay_in_standard_onnx_and_the_rest_is_fused(arch: str) -> None:
    built = captured.built(arch)
    layers = built.module.config.num_hidden_layers
    ops = built.ops()
    assert ops["QuantizedKVAttention"] == layers
    assert ops["QuantizedLinear"] == 3 * layers + 1  # q/k/v, output, router; head
    assert ops["MatMul"] == 2 * layers
    reasons = {refusal.reason for record in built.records for refusal in record.refused}
    assert "its second operand is not a constant matrix" in reasons


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_neox", "qwen3_moe", "gpt2", "granite"])
def test_a_row_does_not_depend_on_its_company(arch: str, tmp_path: pathlib.Path) -> None:
    path = captured.built(arch).save(tmp_path)
    ids = np.random.default_rng(1).integers(0, tiny_models.VOCAB_SIZE, (2, 48))
    wide, steps = (tiny_engine.TinyEngine(path, library_path(), batch=2, capacity=64) for _ in range(2))
    for engine in (wide, steps):
        engine.forward(ids[:, :40])
    together = wide.forward(ids[:, 40:]).reshape(2, 8, -1)
    one_by_one = np.stack([steps.forward(ids[:, i : i + 1]) for i in range(40, 48)], axis=1)
    np.testing.assert_array_equal(together, one_by_one)
    alone = tiny_engine.TinyEngine(path, library_path(), batch=1, capacity=64)
    alone.forward(ids[:1, :40])
    np.testing.assert_array_equal(alone.forward(ids[:1, 40:]), together[0])


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2", "gpt_oss"])
def test_the_portable_model_runs_without_any_kernel_of_ours(arch: str, tmp_path: pathlib.Path) -> None:
    built = captured.built(arch, cpu=False)
    engine = tiny_engine.TinyEngine(built.save(tmp_path), None, batch=1, capacity=48)
    ids = np.random.default_rng(2).integers(0, tiny_models.VOCAB_SIZE, (1, 44))
    logits = np.concatenate([engine.forward(ids[:, :40]), engine.forward(ids[:, 40:])])
    reference = tiny_engine.eager_logits(built.module, ids)[0]
    assert np.abs(logits - reference).max() < 1e-3 * np.abs(reference).max()


@pytest.mark.parametrize(
    ("arch", "windows", "softcap", "scale"),
    [
        ("mistral", [32, 32], 0.0, 32**-0.5),
        ("gemma2", [32, 0, 32, 0], 50.0, 32**-0.5),
        ("gemma3", [32, 0, 32, 0], 0.0, 32**-0.5),
        ("gpt_oss", [32, 0], 0.0, 32**-0.5),
        ("granite", [0, 0], 0.0, 0.2),
    ],
)
def test_attention_attributes_by_layer(arch: str, windows: list[int], softcap: float, scale: float) -> None:
    nodes = [node for node in captured.captured(arch).graph if node.op_type == "Attention"]
    assert [node.attributes["window"].as_int() for node in nodes] == windows
    assert [node.attributes["softcap"].as_float() for node in nodes] == [softcap] * len(nodes)
    assert [node.attributes["scale"].as_float() for node in nodes] == pytest.approx([scale] * len(nodes))
    assert all((len(node.inputs) == 4) == (arch == "gpt_oss") for node in nodes)  # its sinks


def test_longrope_logits_past_the_original_context(tmp_path: pathlib.Path) -> None:
    built = captured.built("phi3_longrope")
    engine = tiny_engine.TinyEngine(built.save(tmp_path), library_path(), capacity=256)
    ids = np.random.default_rng(0).integers(0, 256, (1, 200))
    reference = tiny_engine.eager_logits(built.module, ids)[0]
    assert np.abs(engine.forward(ids) - reference).max() < 1e-3 * np.abs(reference).max()


def test_logits_rows_choose_rows_of_the_flattened_batch(tmp_path: pathlib.Path) -> None:
    path = captured.built("llama").save(tmp_path)
    ids = np.random.default_rng(3).integers(0, tiny_models.VOCAB_SIZE, (2, 6))
    every, some = (tiny_engine.TinyEngine(path, library_path(), batch=2, capacity=8) for _ in range(2))
    np.testing.assert_array_equal(some.forward(ids, rows=[11, 0, 5]), every.forward(ids)[[11, 0, 5]])


@pytest.mark.parametrize(("bits", "group_size", "has_minimum"), [(4, 32, True), (8, 32, False)])
@pytest.mark.parametrize("arch", ["llama_tied", "gpt2", "gpt_neox"])
def test_quantized_weights_are_the_models_of_their_values(
    arch: str, bits: int, group_size: int, has_minimum: bool, tmp_path: pathlib.Path
) -> None:
    import torch

    from specexport.plugins.quantized_linear.format import QuantizationScheme, quantize

    scheme = QuantizationScheme(bits, group_size, has_minimum)
    built = captured.built(arch, scheme=lambda name, shape: scheme)
    engine = tiny_engine.TinyEngine(built.save(tmp_path), library_path(), batch=1, capacity=32)
    ids = np.random.default_rng(4).integers(0, tiny_models.VOCAB_SIZE, (1, 24))
    module = tiny_models.build(arch)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2 and "wpe" not in name:
                stored = parameter.numpy()
                turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
                matrix = quantize(np.ascontiguousarray(stored.T if turned else stored), scheme).dequantize()
                parameter.copy_(torch.tensor(matrix.T if turned else matrix))
    reference = tiny_engine.eager_logits(module, ids)[0]
    assert np.abs(engine.forward(ids) - reference).max() < 1e-3 * np.abs(reference).max()


def test_int8_everywhere_agrees_between_bodies_and_kernels(tmp_path: pathlib.Path) -> None:
    from specexport.plugins.quantized_linear.format import QuantizationScheme

    plan: dict[str, Any] = {
        "scheme": lambda name, shape: QuantizationScheme(8, 32, False),
        "activation_bits": lambda name: 8,
        "key_bits": 8,
        "value_bits": 8,
    }
    ids = np.random.default_rng(5).integers(0, tiny_models.VOCAB_SIZE, (1, 24))
    logits = []
    for cpu in (False, True):
        directory = tmp_path / str(cpu)
        directory.mkdir()
        built = captured.built("llama", cpu=cpu, **plan)
        engine = tiny_engine.TinyEngine(built.save(directory), library_path() if cpu else None, capacity=32)
        logits.append(np.concatenate([engine.forward(ids[:, :20]), engine.forward(ids[:, 20:])]))
    exact = tiny_engine.eager_logits(built.module, ids)[0]
    error = np.abs(logits[1] - exact).max()
    assert 0 < error < 0.15 * np.abs(exact).max()
    assert np.abs(logits[0] - logits[1]).mean() < 0.1 * np.abs(logits[1] - exact).mean()


def test_a_tied_head_and_the_embedding_are_one_tensor() -> None:
    from specexport.plugins.quantized_linear.format import QuantizationScheme

    built = captured.built("llama_tied", scheme=lambda name, shape: QuantizationScheme(8, 32, False))
    nodes = list(built.model.graph)
    embedding = next(node for node in nodes if node.op_type == "QuantizedEmbedding")
    assert embedding.inputs[1] is nodes[-1].inputs[1]


def test_every_pass_does_nothing_the_second_time() -> None:
    from specexport.graph_passes.pipeline import cpu_passes, portable_passes
    from specexport.graph_passes.plan import PassPlan

    for arch in ("llama", "gemma2", "gpt_neox", "gpt2", "stablelm", "qwen3_moe"):
        model = captured.captured(arch)
        weights = tiny_engine.ModuleWeights(tiny_models.build(arch))
        for graph_pass in portable_passes(PassPlan(weights=weights)) + cpu_passes():
            graph_pass(model)
            names = [node.op_type for node in model.graph]
            assert not graph_pass(model).modified, (arch, graph_pass.title)
            assert [node.op_type for node in model.graph] == names


def test_a_cut_models_initializers_are_the_whole_models() -> None:
    from specexport.exporter.capture import capture, skeleton
    from specexport.exporter.draft.layers import cut_layers
    from specexport.graph_passes.infrastructure import run_passes
    from specexport.graph_passes.pipeline import cpu_passes, portable_passes
    from specexport.graph_passes.plan import NoWeights, PassPlan
    from specexport.plugins.quantized_linear.format import QuantizationScheme

    plan: dict[str, Any] = {
        "scheme": lambda name, shape: QuantizationScheme(4, 32, True),
        "activation_bits": lambda name: 8,
    }
    whole = captured.built("llama_tied", **plan).model.graph.initializers
    module = cut_layers(skeleton(tiny_models.ARCHITECTURES["llama_tied"]()), 2)
    draft = capture(module, context_length=captured.CONTEXT)
    run_passes(draft, portable_passes(PassPlan(weights=NoWeights(), **plan)) + cpu_passes())
    assert len(draft.graph) == 5 * 2 + 4
    for name, value in draft.graph.initializers.items():
        assert name in whole
        assert value.shape == whole[name].shape
