"""Writes a model directory of a chosen shape with random weights, a tensor at a time: for speed, not for text.

python benchmarks/random_model.py DIR [--hidden-size 2048 ...]     # default: the shape of Llama-3.2-1B
specexport build DIR --weights int4 --compare-tokens 0 --draft none --output PAIR
specexport bench PAIR --only steps --only prefill

Speed does not depend on what the weights are. Memory stays at a few tens of MB; the file has two bytes a parameter.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import struct
from collections.abc import Iterator

import numpy as np

# https://huggingface.co/meta-llama/Llama-3.2-1B, config.json
SHAPE = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
CHUNK = 1 << 22  # numbers made at a time


def tensors(shape: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama with tied embeddings, in the order of the file."""
    hidden, inner, width = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    query, key = shape["num_attention_heads"] * width, shape["num_key_value_heads"] * width
    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", key, hidden),
            ("self_attn.v_proj", key, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield f"{at}.{name}.weight", (rows, columns)
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def bfloat16(rng: np.random.Generator, count: int, one: bool) -> bytes:
    """``count`` numbers, normal with deviation 0.02, or ones for norms; cut to bfloat16."""
    if one:
        return np.full(count, 0x3F80, "<u2").tobytes()
    numbers = rng.standard_normal(count, np.float32) * np.float32(0.02)
    return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()


def write_tokenizer(path: pathlib.Path) -> None:
    """One id a byte: prompts get as many tokens as they have bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def write_model(directory: pathlib.Path, shape: dict[str, int], seed: int = 0) -> int:
    """config.json, tokenizer.json and model.safetensors in ``directory``; the number of parameters."""
    directory.mkdir(parents=True, exist_ok=True)
    every = list(tensors(shape))
    header, offset = {}, 0
    for name, dimensions in every:
        nbytes = 2 * math.prod(dimensions)
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(seed)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, dimensions in every:
            left = math.prod(dimensions)
            while left:
                count = min(left, CHUNK)
                file.write(bfloat16(rng, count, one=len(dimensions) == 1))
                left -= count
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **shape,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(directory / "tokenizer.json")
    return offset // 2


def main() -> None:
    """Write, and say how much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    for name, value in SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = vars(parser.parse_args())
    directory = options.pop("directory")
    print(f"{directory}: {write_model(directory, options):,} parameters")


if __name__ == "__main__":
    main()
