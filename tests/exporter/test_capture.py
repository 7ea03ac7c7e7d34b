"""Capture: what is refused and how, what the graph holds, tables of rotary embeddings, norms found by trial."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import captured
import numpy as np
import onnx_ir as ir
import pytest
import tiny_models

from specexport.exporter.capture import LAYER_STEPS, NOTES_KEY, capture, skeleton
from specexport.exporter.capture_error import CaptureError
from specexport.exporter.capture_norm import probe_rms_norm
from specexport.exporter.capture_rope import find_rotary_modules, layer_types, probe_style, rope_tables, rotate

TINY: dict[str, Any] = {k: v for k, v in tiny_models.SIZES.items() if k != "intermediate_size"}


def config(name: str, **values: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**values)


REFUSED = [
    ("T5Config", {"d_model": 64, "vocab_size": 256}, "encoder-decoder"),
    ("LlamaConfig", {**TINY, **tiny_models._rope("dynamic", factor=2.0)}, "dynamic"),
    ("MambaConfig", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}, "linear_attention"),
    ("BertConfig", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, "bidirectional"),
    ("BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}, "position_ids"),
    ("FalconConfig", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, "attention function"),
    ("Llama4TextConfig", {**TINY, "head_dim": 16}, "chunked_attention"),
    ("Qwen3NextConfig", {**TINY, "head_dim": 16}, "linear_attention"),
    ("ViTConfig", {"hidden_size": 64}, "no causal language model"),
    (
        "DeepseekV3Config",
        {
            **{**TINY, "num_key_value_heads": 4},
            "first_k_dense_replace": 2,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
        "value heads of 16",
    ),
]


@pytest.mark.parametrize(("name", "values", "reason"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_what_cannot_be_captured_is_refused_by_name_and_reason(name: str, values: Any, reason: str) -> None:
    refused = config(name, **values)
    with pytest.raises(CaptureError, match=reason) as error:
        capture(skeleton(refused), context_length=64)
    assert refused.model_type in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_a_context_beyond_learned_positions_is_refused() -> None:
    with pytest.raises(CaptureError, match="learned positions for 512 tokens; a context of 513"):
        capture(skeleton(tiny_models.ARCHITECTURES["gpt2"]()), context_length=513)


def test_the_interface_and_the_weights_by_reference() -> None:
    model = captured.captured("llama_tied")
    graph = model.graph
    shapes = {value.name: list(map(str, value.shape)) for value in graph.inputs}
    assert shapes == {"input_ids": ["batch", "sequence"], "past_length": ["batch"], "logits_rows": ["rows"]}
    assert list(map(str, graph.outputs[0].shape)) == ["rows", "256"]
    state = {name for name, _ in tiny_models.build("llama_tied").named_parameters()}
    named = {name for name, value in graph.initializers.items() if isinstance(value.const_value, ir.LazyTensor)}
    assert named == state  # lm_head.weight is tied: it appears once, as the embedding
    with pytest.raises(RuntimeError, match="is a reference"):
        graph.initializers["model.norm.weight"].const_value.numpy()
    layers = [node.attributes["layer"].as_int() for node in graph if node.op_type == "Attention"]
    assert layers == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "arch", ["llama", "llama_rope_llama3", "llama_yarn", "llama_linear", "phi3_longrope", "gemma3", "phi3", "gpt_oss"]
)
def test_rope_tables_are_transformers_own_past_the_original_context(arch: str) -> None:
    import torch

    length = 700  # past every original context, and past max_position_embeddings
    (rotary,) = find_rotary_modules(skeleton(tiny_models.ARCHITECTURES[arch]())).values()
    for kind in layer_types(rotary):
        cos, sin = rope_tables(rotary, length, kind)
        extra = {} if kind is None else {"layer_type": kind}
        wanted = rotary(torch.zeros(1, 1, 1), position_ids=torch.arange(length)[None], **extra)
        np.testing.assert_array_equal(cos, wanted[0][0])
        np.testing.assert_array_equal(sin, wanted[1][0])
        assert cos.dtype == torch.float32


def test_the_graphs_tables_are_those_rows() -> None:
    initializers = captured.captured("llama_yarn").graph.initializers
    (rotary,) = find_rotary_modules(skeleton(tiny_models.ARCHITECTURES["llama_yarn"]())).values()
    cos, sin = rope_tables(rotary, captured.CONTEXT)
    for name, table in (("cos", cos), ("sin", sin)):
        have = initializers[f"model.rotary_emb.{name}"].const_value.numpy()
        np.testing.assert_array_equal(have, table[:, : table.shape[1] // 2].numpy())
    assert np.abs(cos[0].numpy()).max() > 1.0  # yarn's attention factor is in the table


def test_longrope_takes_long_factors_beyond_the_original_context_and_says_so() -> None:
    short = captured.captured("phi3_longrope", 128)
    long = captured.captured("phi3_longrope")
    assert "short factors" in json.loads(short.metadata_props[NOTES_KEY])[0]
    assert "long factors" in json.loads(long.metadata_props[NOTES_KEY])[0]
    tables = [model.graph.initializers["model.rotary_emb.sin"].const_value.numpy() for model in (short, long)]
    assert np.abs(tables[0][100] - tables[1][100]).max() > 0.1
    assert not json.loads(captured.captured("llama").metadata_props[NOTES_KEY])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_a_rotation_is_recognised_by_its_numbers(interleaved: bool, partial: bool) -> None:
    import torch

    angles = torch.arange(9)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    repeat = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat((t, t), -1))
    cos, sin = repeat(angles.cos()), repeat(angles.sin())

    def apply(q: Any, k: Any, c: Any, s: Any) -> Any:
        if not partial and q.shape[-1] != c.shape[-1]:
            raise RuntimeError
        half = (lambda t: t[..., ::2]) if interleaved else (lambda t: t[..., :4])
        return rotate(q, half(c), half(s), interleaved), rotate(k, half(c), half(s), interleaved)

    style = probe_style(apply, cos, sin)
    assert style is not None
    assert (style.interleaved, style.partial) == (interleaved, partial)
    assert probe_style(lambda q, k, c, s: apply(q, k, c, -s), cos, sin) is None
    assert probe_style(lambda q, k, c, s: (apply(q, k, c, s)[0], k), cos, sin) is None


def test_an_rms_norm_is_recognised_by_its_numbers() -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class Doubled(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: Any) -> Any:
            return 2 * super().forward(hidden_states)

    plain, offset = probe_rms_norm(LlamaRMSNorm(8, eps=1e-5)), probe_rms_norm(Gemma2RMSNorm(8, eps=1e-6))
    assert plain is not None
    assert offset is not None
    assert (plain.epsilon, plain.offset) == (1e-5, 0.0)
    assert (offset.epsilon, offset.offset) == (1e-6, 1.0)
    assert probe_rms_norm(Doubled(8)) is None


def test_a_capture_leaves_the_model_as_it_was() -> None:
    from transformers.models.llama import modeling_llama

    before = modeling_llama.apply_rotary_pos_emb
    module = skeleton(tiny_models.ARCHITECTURES["llama"]())
    buffers = {name for name, _ in module.named_buffers()}
    capture(module, context_length=64)
    assert modeling_llama.apply_rotary_pos_emb is before
    assert {name for name, _ in module.named_buffers()} == buffers
    assert not [part for part in module.modules() if "forward" in part.__dict__]


def test_a_skeleton_costs_no_memory_and_a_capture_is_silent() -> None:
    program = """
        import resource, sys
        import torch, transformers
        from specexport.exporter.capture import capture, skeleton
        sizes = dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=1, num_attention_heads=32)
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        module = skeleton(config)
        capture(module, context_length=64)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        parameters = sum(p.numel() for p in module.parameters())
        assert parameters > 2.5e9
        print(int(grown))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert int(done.stdout) < 600  # megabytes, where the weights would be 11,000


def test_each_layer_reports_its_steps() -> None:
    calls = []
    config = tiny_models.ARCHITECTURES["llama"]()
    capture(skeleton(config), context_length=64, on_layer=lambda: calls.append(1))
    assert len(calls) == LAYER_STEPS * config.num_hidden_layers
