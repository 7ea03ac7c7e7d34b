"""Tokenizer files and special tokens of each kind of source."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import tiny_gguf
import tiny_models
import tokenizers

from specexport.exporter.loading import load_config
from specexport.exporter.source import resolve
from specexport.exporter.tokenizer_files import TokenizerFiles, collect_tokenizer
from specexport.plugins.errors import InputError

TEXTS = [
    "",
    "Hello, world!",
    "the sea and the hat",
    " two  spaces,\ttab\nand\r\n lines  ",
    "na\u00efve caf\u00e9 \u4e2d\u6587 \U0001f600 \u0e44\u0e17\u0e22",
    "it's 12345.678 + 9e-3; don't",
    "def f(x):\n    return x ** 2  # <|end|> <|start|>",
    "\x00\x7f\u200b",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("saved") / "llama")


def _collect(folder: pathlib.Path) -> TokenizerFiles:
    source = resolve(str(folder))
    return collect_tokenizer(source, load_config(source))


def _copy(saved: pathlib.Path, target: pathlib.Path, **changes: Any) -> pathlib.Path:
    """A copy with JSON fields changed: ``tokenizer_config={...}``; None removes the file."""
    for file in saved.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    for stem, fields in changes.items():
        path = target / f"{stem}.json"
        if fields is None:
            path.unlink()
        else:
            path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return target


def test_files_are_carried_unchanged(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    found = _collect(saved)
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert set(found.files) == names
    for name in names:
        assert found.files[name] == (saved / name).read_bytes()
    assert found.chat_template == tiny_models.CHAT_TEMPLATE
    assert (found.bos_token_id, found.eos_token_ids, found.pad_token_id) == (1, (2,), 0)
    assert found.notes == ()
    assert {path.name for path in found.write(tmp_path)} == names


def test_all_end_of_sequence_ids_are_kept(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    found = _collect(_copy(saved, tmp_path, generation_config={"eos_token_id": [7, 2, 5]}))
    assert found.eos_token_ids == (2, 5, 7)


def test_without_generation_config_the_model_decides_then_the_tokenizer(
    saved: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = _copy(saved, tmp_path, generation_config=None, config={"eos_token_id": 9})
    assert _collect(folder).eos_token_ids == (9,)
    source = resolve(str(folder))
    config = load_config(source)
    config.eos_token_id = None
    assert collect_tokenizer(source, config).eos_token_ids == (2,)


@pytest.mark.parametrize(
    "field",
    ["{{ x }}", [{"name": "rag", "template": "other"}, {"name": "default", "template": "{{ x }}"}]],
)
def test_a_template_inside_the_tokenizer_config(saved: pathlib.Path, tmp_path: pathlib.Path, field: Any) -> None:
    folder = _copy(saved, tmp_path, tokenizer_config={"chat_template": field})
    (folder / "chat_template.jinja").unlink()
    assert _collect(folder).chat_template == "{{ x }}"


def test_a_tokenizer_without_its_file_is_refused(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = _copy(saved, tmp_path)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be loaded"):
        _collect(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"no tokenizer\.json.*save_pretrained"):
        _collect(folder)


def test_the_reference_encoding_wins(
    saved: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    folder = _copy(saved, tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    first = reference.backend_tokenizer.id_to_token(1)
    reference.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, 1)]
    )
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: reference)
    found = _collect(folder)
    assert "transformers encodes" in found.notes[0]
    assert tokenizers.Tokenizer.from_str(found.tokenizer_json).encode("a").ids[0] == 1


def test_a_gguf_tokenizer_encodes_like_transformers(tmp_path: pathlib.Path) -> None:
    import transformers

    tiny_gguf.write(tmp_path / "tiny.gguf")
    found = _collect(tmp_path)
    assert set(found.files) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert found.chat_template == tiny_gguf.CHAT_TEMPLATE
    size = tiny_gguf.VOCAB_SIZE
    assert (found.bos_token_id, found.eos_token_ids, found.pad_token_id) == (size - 2, (size - 1,), size - 1)
    assert str(tmp_path) not in found.files["tokenizer_config.json"].decode()
    _equal(found, transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf"))


def _equal(found: TokenizerFiles, reference: Any) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(found.tokenizer_json)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == reference(text)["input_ids"], text
        assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids), text


@pytest.mark.real
def test_the_demo_tokenizer_encodes_like_transformers() -> None:
    import transformers

    source = resolve("smollm2-135m-instruct")
    found = collect_tokenizer(source, load_config(source))
    assert (found.bos_token_id, found.eos_token_ids) == (1, (2,))
    assert "<|im_start|>" in (found.chat_template or "")
    # AutoTokenizer gives the same, after reading the file twice.
    _equal(found, transformers.PreTrainedTokenizerFast.from_pretrained(source.path, gguf_file=source.gguf_file))
