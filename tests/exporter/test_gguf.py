"""GGUF: blocks repacked exactly, rows in the model's order, hostile files refused."""

from __future__ import annotations

import pathlib
import struct

import numpy as np
import pytest
import tiny_gguf
import tokenizers

from specexport.exporter.gguf_blocks import block_scheme, decode, repack
from specexport.exporter.gguf_config import llama3_factors, shortest_float
from specexport.exporter.gguf_file import SUPPORTED_TYPES, TensorType, read_gguf
from specexport.exporter.loading import load_config, load_reference, open_weights
from specexport.exporter.source import resolve
from specexport.exporter.tokenizer_files import collect_tokenizer
from specexport.plugins.errors import InputError
from specexport.plugins.quantized_linear.format import QuantizationScheme

KINDS = {kind.name: kind for kind in SUPPORTED_TYPES.values()}


def _blocks(kind: TensorType, rng: np.random.Generator, rows: int = 5, blocks: int = 3) -> np.ndarray:
    import gguf

    values = rng.standard_normal((rows, blocks * 32)).astype(np.float32)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.name])


@pytest.mark.parametrize("name", sorted(KINDS))
def test_decode_equals_the_gguf_package(name: str) -> None:
    import gguf

    rng = np.random.default_rng(0)
    stored = _blocks(KINDS[name], rng)
    if name in ("Q4_0", "Q4_1", "Q8_0"):  # Any bytes in the integers are legal blocks.
        blocks = stored.reshape(5, 3, -1)
        payload = 32 if name == "Q8_0" else 16
        blocks[..., -payload:] = rng.integers(0, 256, (5, 3, payload), np.uint8)
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[name])
    raw = np.ascontiguousarray(stored).view(np.uint8)
    np.testing.assert_array_equal(decode(KINDS[name], raw), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_repacked_blocks_mean_exactly_the_same(name: str) -> None:
    stored = _blocks(KINDS[name], np.random.default_rng(1))
    weight = repack(KINDS[name], stored)
    assert weight.scheme == block_scheme(KINDS[name])
    np.testing.assert_array_equal(weight.dequantize(), decode(KINDS[name], stored))


def test_nibble_order_of_a_hand_made_block() -> None:
    # Scale 1, integers: column c of the block holds c % 16 in the low half and 15 - c % 16 in the high half.
    block = np.frombuffer(np.float16(1).tobytes() + bytes(j | (15 - j) << 4 for j in range(16)), np.uint8)
    weight = repack(KINDS["Q4_0"], block.reshape(1, 18))
    columns = [j - 8 for j in range(16)] + [15 - j - 8 for j in range(16)]
    np.testing.assert_array_equal(weight.dequantize()[0], columns)
    assert weight.weight[0, 0] == 0 | 1 << 4  # Columns 0 and 1 share our first byte.
    assert weight.weight[0, 8] == 15 | 14 << 4


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_reference_equals_what_transformers_loads(arch: str, tmp_path: pathlib.Path) -> None:
    import torch
    import transformers

    tiny_gguf.write(tmp_path / "tiny.gguf", arch, kinds={"token_embd.weight": "Q8_0"})
    source = resolve(str(tmp_path))
    config = load_config(source)
    ours = load_reference(source, config).state_dict()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", config=config, dtype=torch.float32
    ).state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    store = open_weights(source, config)
    scheme = QuantizationScheme(bits=4, group_size=32, has_minimum=True)
    matrices = [name for name in store.names() if store.native_scheme(name) == scheme]
    assert len(matrices) >= 8
    for name in matrices:
        np.testing.assert_array_equal(store.quantized(name, scheme).dequantize(), ours[name].numpy())


def test_reference_computes_like_the_model_that_was_written(tmp_path: pathlib.Path) -> None:
    # Independent of transformers' GGUF code: with F32 tensors nothing may change, the order of rows included.
    import torch

    model = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", kind="F32", rms_norm_eps=1e-5)
    source = resolve(str(tmp_path / "tiny.gguf"))
    config = load_config(source)
    assert config.rms_norm_eps == 1e-5
    assert not hasattr(config, "quantization_config")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(load_reference(source, config)(ids).logits, expected)


def test_configuration_equals_the_one_read_with_the_vocabulary(tmp_path: pathlib.Path) -> None:
    import transformers

    tiny_gguf.write(tmp_path / "tiny.gguf")
    source = resolve(str(tmp_path))
    ours = load_config(source).to_diff_dict()
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf").to_diff_dict()
    assert ours.pop("architectures") == ["LlamaForCausalLM"]
    theirs.pop("architectures", None)
    assert ours.pop("rms_norm_eps", 1e-6) == shortest_float(theirs.pop("rms_norm_eps", 1e-6))
    assert ours == theirs


def test_llama3_rope_factors_become_configuration(tmp_path: pathlib.Path) -> None:
    import torch

    parameters = {
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_factors(32, parameters).astype(np.float32)
    tiny_gguf.write(tmp_path / "tiny.gguf", "llama", extra={"rope_freqs.weight": factors})
    source = resolve(str(tmp_path))
    config = load_config(source)
    assert config.rope_parameters["rope_type"] == "llama3"
    frequencies = load_reference(source, config).model.rotary_emb.inv_freq
    plain = 10000.0 ** -(torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(frequencies, plain / torch.from_numpy(factors), rtol=1e-5, atol=0)
    tiny_gguf.write(tmp_path / "tiny.gguf", "llama", extra={"rope_freqs.weight": factors * np.float32(1.1)})
    with pytest.raises(InputError, match="rope_freqs"):
        load_config(source)


def test_rope_scaling_that_would_be_dropped_is_refused(tmp_path: pathlib.Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", "qwen2", rope_scaling_type="yarn")
    with pytest.raises(InputError, match=r"RoPE scaling 'yarn'"):
        load_config(resolve(str(tmp_path)))


def test_a_type_without_repack_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", kinds={"blk.1.ffn_up.weight": "Q6_K"})
    with pytest.raises(InputError, match=r"blk\.1\.ffn_up\.weight.*Q6_K.*Q4_0, Q4_1, Q8_0"):
        resolve(str(tmp_path))


def test_tensors_missing_left_over_or_of_another_shape_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path, drop=("blk.1.ffn_up.weight",))
    source = resolve(str(path))
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        open_weights(source, load_config(source))
    tiny_gguf.write(path, extra={"blk.0.attn_sinks": np.zeros(4, np.float32)})
    with pytest.raises(InputError, match="attn_sinks"):
        open_weights(source, load_config(source))
    tiny_gguf.write(path, drop=("output_norm.weight",), extra={"output_norm.weight": np.zeros(63, np.float32)})
    with pytest.raises(InputError, match=r"output_norm.*\[63\].*\[64\]"):
        open_weights(source, load_config(source))


def test_one_part_of_a_split_file_is_refused(tmp_path: pathlib.Path) -> None:
    import gguf

    path = tmp_path / "tiny-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match="one part of 2"):
        read_gguf(path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    import gguf

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match="rwkv7"):
        load_config(resolve(str(path)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf.write(path, kind="Q8_0")
    return path.read_bytes()


def _refused(content: bytes, folder: pathlib.Path) -> str:
    path = folder / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_way_to_be_cut_short_is_refused(whole: bytes, tmp_path: pathlib.Path) -> None:
    for length in [0, 3, 4, 20, 24, 100, 1000, *range(2000, len(whole) - 32, 7919), len(whole) - 33]:
        _refused(whole[:length], tmp_path)
    assert "cut short" in _refused(whole[: len(whole) // 2], tmp_path)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "version"),
        (8, struct.pack("<Q", 1 << 60), "claims"),
        (16, struct.pack("<Q", 1 << 63), "claims"),
        (24, struct.pack("<Q", (1 << 64) - 1), "claims"),
    ],
)
def test_hostile_headers_are_refused(
    whole: bytes, tmp_path: pathlib.Path, position: int, value: bytes, message: str
) -> None:
    content = whole[:position] + value + whole[position + len(value) :]
    assert message in _refused(content, tmp_path)


def test_hostile_tensor_entries_are_refused(whole: bytes, tmp_path: pathlib.Path) -> None:
    # A tensor's entry: name, dimension count, dimensions, type, offset.
    at = whole.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight")

    def patched(offset: int, value: bytes) -> str:
        start = at + offset
        return _refused(whole[:start] + value + whole[start + len(value) :], tmp_path)

    assert "dimensions" in patched(0, struct.pack("<I", 1000))
    assert "cut short" in patched(4, struct.pack("<Q", 1 << 62))
    assert "whole blocks" in patched(4, struct.pack("<Q", 33))
    assert "whole blocks" in patched(12, struct.pack("<Q", 0))
    assert "GGML type 77777" in patched(20, struct.pack("<I", 77777))
    assert "cut short" in patched(24, struct.pack("<Q", (1 << 64) - 32))


def test_repeated_names_are_refused(whole: bytes, tmp_path: pathlib.Path) -> None:
    assert "twice" in _refused(whole.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"), tmp_path)
    assert "general.architecture" in _refused(whole.replace(b"general.architecture", b"general.architectura"), tmp_path)


@pytest.mark.real
def test_the_demo_model_is_held_exactly() -> None:
    import collections

    import gguf
    import torch

    source = resolve("smollm2-135m-instruct")
    config = load_config(source)
    assert (config.model_type, config.num_hidden_layers, config.vocab_size) == ("llama", 30, 49152)
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 100000.0)
    store = open_weights(source, config)
    schemes = collections.Counter(str(store.native_scheme(name)) for name in store.names())
    assert schemes == {"int4+minimum": 210, "int8": 2, "None": 61}  # The head is tied to the embedding.
    reference = load_reference(source, config)
    state = reference.state_dict()
    for layer in (0, 17, 29):
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{part}.weight"
            scheme = store.native_scheme(name)
            assert scheme is not None
            np.testing.assert_array_equal(store.quantized(name, scheme).dequantize(), state[name].numpy())
    # The order of rows, by transformers' own hand; the values, by the gguf package's.
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    raw = read_gguf(source.gguf_path).raw("blk.17.attn_k.weight")
    theirs = processor.process(gguf.dequantize(raw, gguf.GGMLQuantizationType.Q4_1), "blk.17.attn_k.weight").weights
    np.testing.assert_array_equal(state["model.layers.17.self_attn.k_proj.weight"].numpy(), theirs)
    # Read at a wrong place or in a wrong order, the model would not answer this.
    tokens = collect_tokenizer(source, config)
    tokenizer = tokenizers.Tokenizer.from_str(tokens.tokenizer_json)
    prompt = "<|im_start|>user\nWrite three sentences about the sea.<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    ids = torch.tensor([tokenizer.encode(system + prompt).ids])
    with torch.no_grad():
        out = reference.generate(ids, max_new_tokens=6, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :].tolist()).startswith("The sea is a vast and")
