"""Tiny random causal language models, one for each architecture that the capture is tested with."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

VOCAB_SIZE = 256
EOS_TOKEN_ID = 2
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _config(name: str, **overrides: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        values: dict[str, Any] = {**SIZES, **overrides}
        return getattr(transformers, name)(**{k: v for k, v in values.items() if v is not None})

    return make


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_GPT2: dict[str, Any] = {
    **dict.fromkeys(SIZES),
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
}
_LONGROPE = _rope(
    "longrope",
    short_factor=[1.0 + 0.05 * i for i in range(8)],
    long_factor=[1.5 + 0.5 * i for i in range(8)],
    original_max_position_embeddings=128,
)
_WINDOWS = {"sliding_window": 32, "num_hidden_layers": 4, "head_dim": 32}

# Name of the tiny model -> a function that makes its configuration. All widths are multiples of 32.
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig", head_dim=32),
    "llama_tied": _config("LlamaConfig", head_dim=32, num_hidden_layers=4, tie_word_embeddings=True),
    "llama_rope_llama3": _config(
        "LlamaConfig",
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    "llama_yarn": _config("LlamaConfig", **_rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "llama_linear": _config("LlamaConfig", **_rope("linear", factor=4.0)),
    "phi3_longrope": _config("Phi3Config", original_max_position_embeddings=128, **_LONGROPE),
    "mistral": _config("MistralConfig", sliding_window=32, head_dim=32),
    "qwen2": _config("Qwen2Config"),
    "qwen3": _config("Qwen3Config", head_dim=32),
    "gemma2": _config("Gemma2Config", query_pre_attn_scalar=32, **_WINDOWS),
    "gemma3": _config(
        "Gemma3TextConfig",
        query_pre_attn_scalar=32,
        final_logit_softcapping=20.0,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **_WINDOWS,
    ),
    "phi3": _config("Phi3Config", partial_rotary_factor=0.5, **_rope("default", partial_rotary_factor=0.5)),
    "smollm3": _config("SmolLM3Config", num_hidden_layers=4, no_rope_layer_interval=2),
    "olmo2": _config("Olmo2Config"),
    "granite": _config(
        "GraniteConfig",
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "stablelm": _config("StableLmConfig", use_qkv_bias=True),
    "gpt2": _config("GPT2Config", **_GPT2),
    "gpt_neox": _config("GPTNeoXConfig", num_key_value_heads=None, rotary_pct=0.5),
    "qwen3_moe": _config("Qwen3MoeConfig", head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "gpt_oss": _config("GptOssConfig", head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=32),
}


def build(arch: str, seed: int = 0, **overrides: Any) -> Any:
    """A ``transformers`` causal language model with random float32 weights, in eval mode.

    Args:
        arch: A key of ``ARCHITECTURES``.
        seed: Of the weights; the same seed gives the same weights.
        overrides: Attributes to set on the configuration before the model is made.
    """
    import torch
    import transformers

    config = ARCHITECTURES[arch]()
    for key, value in overrides.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.add_(noise, alpha=0.2)  # Norms keep their neutral value, 1 or 0, as the middle.
            elif parameter.dim() == 1:
                parameter.copy_(noise * 0.2)
            elif name.endswith(("embed_tokens.weight", "embed_in.weight", "wte.weight", "wpe.weight")):
                parameter.copy_(noise * 0.4)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    return model.eval()


def save(arch: str, directory: pathlib.Path, seed: int = 0, **overrides: Any) -> pathlib.Path:
    """Write ``build(arch)`` as a Hugging Face directory with a byte-level tokenizer."""
    import transformers

    model = build(arch, seed, **overrides)
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=[EOS_TOKEN_ID], pad_token_id=0)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: pathlib.Path) -> None:
    """Write a tokenizer of 256 byte ids: its json, its configuration and a chat template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": alphabet[1],
        "eos_token": alphabet[EOS_TOKEN_ID],
        "pad_token": alphabet[0],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
