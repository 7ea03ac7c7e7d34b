"""WeightStore gives the reference's values from every kind of file, one tensor at a time."""

from __future__ import annotations

import json
import pathlib
import struct
from typing import Any

import numpy as np
import pytest
import tiny_models

from specexport.exporter.checkpoint import read_checkpoint, read_safetensors_header
from specexport.exporter.loading import load_config, load_reference, open_weights
from specexport.exporter.source import Source, resolve
from specexport.exporter.weights import WeightStore, read_stored
from specexport.plugins.errors import InputError
from specexport.plugins.quantized_linear.format import QuantizationScheme


def _save(model: Any, folder: pathlib.Path, **options: Any) -> Source:
    model.save_pretrained(folder, **options)
    return resolve(str(folder))


@pytest.mark.parametrize("arch", sorted(tiny_models.ARCHITECTURES))
def test_every_architecture_has_the_values_of_its_reference(arch: str, tmp_path: pathlib.Path) -> None:
    source = _save(tiny_models.build(arch), tmp_path)
    config = load_config(source)
    expected = load_reference(source, config).state_dict()
    store = open_weights(source, config)
    assert set(store.names()) == set(expected)
    for name, tensor in expected.items():
        values = store.get(name)
        assert values.dtype == np.float32
        assert store.shape(name) == values.shape
        np.testing.assert_array_equal(values, tensor.numpy(), err_msg=name)


def test_plain_checkpoints_are_read_from_the_files_and_merged_ones_are_not(tmp_path: pathlib.Path) -> None:
    descriptions = {}
    for arch in ("llama", "llama_tied", "qwen3_moe"):
        source = _save(tiny_models.build(arch), tmp_path / arch)
        descriptions[arch] = open_weights(source, load_config(source)).description
    assert descriptions["llama"] == descriptions["llama_tied"] == "1 safetensors file, mapped"
    assert "transformers loaded (the files hold" in descriptions["qwen3_moe"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_float_types_become_float32(dtype: str, tmp_path: pathlib.Path) -> None:
    import torch

    model = tiny_models.build("llama").to(getattr(torch, dtype))
    source = _save(model, tmp_path)
    store = open_weights(source, load_config(source))
    assert "safetensors" in store.description
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(store.get(name), tensor.float().numpy())


def test_shards_and_pickles(tmp_path: pathlib.Path) -> None:
    import torch

    model = tiny_models.build("llama")
    sharded = _save(model, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.path.glob("*.safetensors"))) > 2
    pickled = tmp_path / "pickled"
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    for source, kind in ((sharded, "safetensors files"), (resolve(str(pickled)), "pickled file")):
        store = open_weights(source, load_config(source))
        assert kind in store.description
        for name, tensor in model.state_dict().items():
            np.testing.assert_array_equal(store.get(name), tensor.numpy())


def test_tied_names_share_one_tensor(tmp_path: pathlib.Path) -> None:
    source = _save(tiny_models.build("llama_tied"), tmp_path)
    store = open_weights(source, load_config(source))
    assert store.canonical("lm_head.weight") == "model.embed_tokens.weight"
    assert store.canonical("model.norm.weight") == "model.norm.weight"
    np.testing.assert_array_equal(store.get("lm_head.weight"), store.get("model.embed_tokens.weight"))


def test_unquantized_sources_are_quantized_on_request() -> None:
    store = WeightStore.from_module(tiny_models.build("llama"))
    name = "model.layers.0.mlp.down_proj.weight"
    assert store.native_scheme(name) is None
    scheme = QuantizationScheme(bits=8, group_size=32, has_minimum=False)
    weight = store.quantized(name, scheme)
    values = store.get(name)
    step = np.abs(values).reshape(64, 4, 32).max(axis=2) / 127
    error = np.abs(weight.dequantize() - values).reshape(64, 4, 32).max(axis=2)
    assert (error <= 0.51 * step).all()
    with pytest.raises(ValueError, match="read-only"):
        values[0, 0] = 1
    with pytest.raises(InputError, match=r"no weight 'model\.nothing'"):
        store.get("model.nothing")


def test_a_parameter_that_no_file_holds_is_named(tmp_path: pathlib.Path) -> None:
    from safetensors.torch import save_file

    model = tiny_models.build("llama")
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    source = resolve(str(tmp_path))
    with pytest.raises(InputError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        open_weights(source, load_config(source))


def _safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut short"),
        (b"\xff" * 8, "cut short"),
        (struct.pack("<Q", 100) + b"{}", "cut short"),
        (_safetensors(b"not json"), "not JSON"),
        (_safetensors([1]), "not a table"),
        (_safetensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(7)), "cut short.*'a' needs"),
        (_safetensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(8)), "cannot be 4 bytes"),
        (_safetensors({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, bytes(8)), "malformed"),
        (_safetensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, bytes(8)), "malformed"),
        (_safetensors({"a": {"shape": [2]}}), "malformed"),
        (_safetensors({"a": 3}), "malformed"),
    ],
)
def test_bad_safetensors_are_refused(content: bytes, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_safetensors_header(path)


def test_8_bit_floats_are_refused_when_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(_safetensors({"a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}, bytes(2)))
    with pytest.raises(InputError, match="F8_E4M3"):
        read_stored("a", read_safetensors_header(path)["a"])


def test_an_index_is_checked_against_its_shards(tmp_path: pathlib.Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    (tmp_path / "one.safetensors").write_bytes(_safetensors({"a": entry}, bytes(8)))
    for weight_map, message in (
        ({"a": "one.safetensors", "b": "two.safetensors"}, r"two\.safetensors is missing \(1 of 2"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "lists b in"),
        ({"a": "../one.safetensors"}, "not a file name"),
        ([], "not an index"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(InputError, match=message):
            read_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert read_checkpoint(tmp_path).tensors["a"].shape == (2,)


class _Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pathlib.Path.touch, (pathlib.Path("/tmp/specexport-was-here"),))


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path: pathlib.Path) -> None:
    import torch

    tiny_models.ARCHITECTURES["llama"]().save_pretrained(tmp_path)
    torch.save({"a": _Exploit()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="weights_only"):
        resolve(str(tmp_path))
    assert not pathlib.Path("/tmp/specexport-was-here").exists()
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(InputError, match="weights_only"):
        resolve(str(tmp_path))


def test_integers_in_place_of_floats_are_left_to_transformers(tmp_path: pathlib.Path) -> None:
    import torch
    from safetensors.torch import save_file

    model = tiny_models.build("llama")
    state = {**model.state_dict(), "model.norm.weight": torch.arange(64, dtype=torch.int32)}
    model.config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    source = resolve(str(tmp_path))
    store = open_weights(source, load_config(source))
    assert "model.norm.weight is stored as I32" in store.description
    np.testing.assert_array_equal(store.get("model.norm.weight"), np.arange(64))
