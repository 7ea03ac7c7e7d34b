"""What the user typed becomes a checked source, or one clear line."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import tiny_gguf
import tiny_models

from specexport.exporter import hub, source
from specexport.exporter.loading import load_config
from specexport.exporter.source import resolve
from specexport.plugins.errors import InputError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("saved") / "llama")


def _copy(saved: pathlib.Path, target: pathlib.Path, **config: Any) -> pathlib.Path:
    target.mkdir(exist_ok=True)
    for file in saved.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    settings = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**settings, **config}))
    return target


def test_a_directory(saved: pathlib.Path) -> None:
    found = resolve(str(saved))
    assert (found.kind, found.path, found.gguf_file, found.revision) == ("directory", saved.resolve(), None, None)
    assert str(found) == str(saved.resolve())
    assert load_config(found).model_type == "llama"


def test_a_gguf_file_and_a_directory_that_holds_one(tmp_path: pathlib.Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    for text in (tmp_path, tmp_path / "tiny.gguf"):
        found = resolve(str(text))
        assert (found.kind, found.gguf_path) == ("gguf", (tmp_path / "tiny.gguf").resolve())
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(InputError, match="holds 2 GGUF files"):
        resolve(str(tmp_path))
    with pytest.raises(InputError, match="cannot be read as GGUF"):
        resolve(str(tmp_path / "other.gguf"))


def test_nothing_by_that_name_lists_what_was_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"no file or directory .*no recipe .*smollm2.*not in the hub's cache"):
        resolve("nobody/nothing", offline=True)
    with pytest.raises(InputError, match="model is empty"):
        resolve(" ")
    with pytest.raises(InputError, match=r"no model '\./nothing\.gguf': no file or directory [^;]*; no recipe [^;]*$"):
        resolve("./nothing.gguf")


def test_a_directory_without_configuration_or_weights(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no config\.json"):
        resolve(str(tmp_path / "empty"))
    copy = _copy(saved, tmp_path / "copy")
    weights = copy / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(InputError, match=r"model\.safetensors: cut short"):
        resolve(str(copy))
    weights.unlink()
    with pytest.raises(InputError, match="no weights"):
        resolve(str(copy))
    (copy / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json: not JSON"):
        resolve(str(copy))


def test_code_of_its_own_needs_consent(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    auto_map = {"AutoConfig": "configuration.Own", "AutoModelForCausalLM": "modeling.Own"}
    own = _copy(saved, tmp_path / "own", auto_map=auto_map, model_type="own")
    with pytest.raises(InputError, match="--trust-remote-code"):
        resolve(str(own))
    assert resolve(str(own), trust_remote_code=True).trust_remote_code
    # A model that transformers knows needs none of it.
    known = _copy(saved, tmp_path / "known", auto_map=auto_map)
    assert load_config(resolve(str(known))).model_type == "llama"


def test_architectures_that_cannot_be_exported(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for model_type, message in (("frobnicator", "frobnicator"), ("vit", "'vit' is not a decoder"), ("t5", "'t5'")):
        copy = _copy(saved, tmp_path / model_type, model_type=model_type)
        with pytest.raises(InputError, match=message):
            load_config(resolve(str(copy)))
    copy = _copy(saved, tmp_path / "mistyped", hidden_size="wide")
    with pytest.raises(InputError, match=r"cannot read its config\.json.*hidden_size"):
        load_config(resolve(str(copy)))


def test_a_quantized_checkpoint_is_refused_by_method(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copy = _copy(saved, tmp_path / "awq", quantization_config={"quant_method": "awq"})
    with pytest.raises(InputError, match="quantized with awq"):
        resolve(str(copy))


def test_only_what_is_needed_is_downloaded() -> None:
    files = ["config.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors", "pytorch_model.bin", "a/b.onnx"]
    patterns = hub.wanted_files(files)
    assert "pytorch_model.bin" not in patterns
    assert "model-1-of-2.safetensors" in patterns
    assert "pytorch_model.bin" in hub.wanted_files([name for name in files if "safetensors" not in name])


def test_the_hub_is_tried_once_then_its_cache(
    monkeypatch: pytest.MonkeyPatch, saved: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    import huggingface_hub

    calls = []
    snapshot = tmp_path / "snapshots" / "0123abcd"
    snapshot.parent.mkdir()
    _copy(saved, snapshot)

    def model_info(self: Any, repo_id: str, **options: Any) -> Any:
        calls.append(options["timeout"])
        raise ConnectionError("no route to host\nsecond line")

    def snapshot_download(repo_id: str, *, revision: str | None = None, local_files_only: bool = False) -> str:
        assert local_files_only
        if repo_id != "owner/cached":
            raise FileNotFoundError(repo_id)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = resolve("owner/cached")
    assert (found.kind, found.identity, found.revision) == ("hub", "owner/cached", "0123abcd")
    assert str(found) == "owner/cached@0123abcd"
    assert len(calls) == 1
    assert calls[0] <= 10
    with pytest.raises(InputError, match=r"did not give it \(no route to host\)"):
        resolve("owner/elsewhere")
    assert len(calls) == 2
    resolve("owner/cached", offline=True)
    assert len(calls) == 2


def test_the_hub_gives_the_commit(monkeypatch: pytest.MonkeyPatch, saved: pathlib.Path) -> None:
    import types

    import huggingface_hub

    def model_info(self: Any, repo_id: str, *, revision: str | None, timeout: float) -> Any:
        assert revision == "v2"
        return types.SimpleNamespace(sha="feed", siblings=[types.SimpleNamespace(rfilename="model.safetensors")])

    def snapshot_download(repo_id: str, *, revision: str, etag_timeout: float, allow_patterns: list[str]) -> str:
        assert revision == "feed"
        assert "*.py" not in allow_patterns
        return str(saved)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("owner/name", revision="v2").revision == "feed"


def test_json_that_is_no_object(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(InputError, match="must be a JSON object"):
        source.read_json(tmp_path / "a.json")
    assert source.read_json(tmp_path / "none.json") is None
