"""Tiny GGUF files, written with the gguf package from the tiny random models."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

VOCAB_SIZE = 288  # 256 bytes, 30 merges, two special tokens.
_MERGES = [f"{a} {b}" for a in "theano" for b in "arsed"]
CHAT_TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def write(
    path: pathlib.Path,
    arch: str = "llama",
    kind: str = "Q4_1",
    kinds: dict[str, str] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    rope_scaling_type: str = "none",
    **overrides: Any,
) -> Any:
    """Write a tiny model as a GGUF file; returns the model whose float32 weights were quantized.

    Args:
        path: Of the file.
        arch: ``llama``, ``qwen2`` or ``qwen3``; also its key in ``tiny_models``.
        kind: Type of all matrices; vectors are F32.
        kinds: Other types by GGUF tensor name.
        drop: Tensors to leave out, by GGUF name.
        extra: Further F32 tensors by GGUF name.
        rope_scaling_type: Written as metadata only.
        overrides: Of the configuration.
    """
    import gguf
    import tiny_models

    model = tiny_models.build(arch, vocab_size=VOCAB_SIZE, **overrides)
    config = model.config
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch != "qwen2":  # Not every converter writes it.
        writer.add_vocab_size(VOCAB_SIZE)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_string(f"{arch}.rope.scaling.type", rope_scaling_type)
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(
        {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers
    )
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        stored = f"{names.get_name(stem)}.{suffix}"
        if stored in drop or (tied and name == "lm_head.weight"):
            continue
        values = tensor.numpy()
        if arch == "llama" and ".attn_q." in stored:
            values = interleave(values, config.num_attention_heads)
        if arch == "llama" and ".attn_k." in stored:
            values = interleave(values, config.num_key_value_heads)
        _add_tensor(writer, stored, values, (kinds or {}).get(stored, kind if values.ndim == 2 else "F32"))
    for stored, values in (extra or {}).items():
        _add_tensor(writer, stored, values, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def interleave(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to the rows of q and k."""
    rows = values.shape[0]
    return values.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def _add_tensor(writer: Any, name: str, values: np.ndarray[Any, Any], kind: str) -> None:
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    elif kind in ("Q4_K", "Q6_K"):  # Not quantized by the package: only the header matters.
        block, size = gguf.GGML_QUANT_SIZES[number]
        rows = np.zeros((values.shape[0], max(1, values.shape[1] // block) * size), np.uint8)
        writer.add_tensor(name, rows, raw_dtype=number)
    else:
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), number), raw_dtype=number)


def _add_tokenizer(writer: Any) -> None:
    from tokenizers import pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in _MERGES]
    tokens += ["<|start|>", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_pad_token_id(len(tokens) - 1)
    writer.add_chat_template(CHAT_TEMPLATE)
