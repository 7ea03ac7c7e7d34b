"""The manifest: golden bytes, and one message for each way to be wrong."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import bundle_files
import pytest

from specexport.plugins.errors import InputError
from specexport.runtime import manifest as manifest_module
from specexport.runtime.manifest import DraftEntry, Manifest
from specexport.runtime.manifest_json import MAX_JSON_BYTES, ManifestError

GOLDEN = pathlib.Path(__file__).with_name("golden_manifest.json")


def test_the_bytes_are_the_golden_ones():
    assert bundle_files.manifest().to_bytes() == GOLDEN.read_bytes()


def test_the_golden_bytes_are_read(tmp_path):
    (tmp_path / "manifest.json").write_bytes(GOLDEN.read_bytes())
    assert Manifest.read(tmp_path) == bundle_files.manifest()


@pytest.mark.parametrize("draft", [None, DraftEntry("ngram", 4, max_ngram_size=3)])
def test_round_trip(tmp_path, draft):
    manifest = dataclasses.replace(bundle_files.manifest(), draft=draft)
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    data = json.loads((tmp_path / "manifest.json").read_text())
    assert data["draft"] == (
        None if draft is None else {"kind": "ngram", "max_ngram_size": 3, "num_assistant_tokens": 4}
    )


def changed(*path, to=...):
    """The golden manifest with one value replaced, or removed."""
    data = json.loads(GOLDEN.read_bytes())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if to is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply|not valid JSON"),
        (b'{"format_version": 1, "format_version": 1}', "key 'format_version' appears twice"),
        (b'{"format_version": NaN}', "NaN is not a JSON number"),
        (b"[]", "the manifest is a list, expected an object"),
        (b"null", "the manifest is null, expected an object"),
        (changed("format_version", to=2), "format_version is 2, this specexport reads 1; upgrade specexport"),
        (changed("format_version", to=0), "format_version is 0, this specexport reads 1; rebuild the bundle"),
        (changed("format_version", to="1"), "format_version is a string, expected an integer"),
        (changed("format_version", to=True), "format_version is a boolean, expected an integer"),
        (changed("format_version"), "format_version is missing"),
        (changed("target"), "target is missing"),
        (changed("target", "cache", "layers", 0, "head_dim"), r"target.cache.layers\[0\].head_dim is missing"),
        (changed("target", "vocab_size", to=1.5), "target.vocab_size is a number, expected an integer"),
        (changed("target", "vocab_size", to=-1), "target.vocab_size is -1, expected no negative number"),
        (changed("target", "inputs", to={}), "target.inputs is an object, expected a list"),
        (changed("target", "inputs", 0, "shape", 0, to=None), r"target.inputs\[0\].shape\[0\] is null"),
        (changed("files", to=[]), "files is a list, expected an object"),
        (changed("files", "tokenizer.json", to="x"), r"files\['tokenizer.json'\] is a string, expected an object"),
        (changed("tokens", "eos_token_ids", to=2), "tokens.eos_token_ids is an integer, expected a list"),
        (changed("surprise", to=1), "the manifest has an unknown key 'surprise'"),
        (changed("contract", "surprise", to=1), "contract has an unknown key 'surprise'"),
        (changed("status", to="fine"), "status is 'fine', expected one of"),
    ],
)
def test_each_wrong_manifest_has_its_message(tmp_path, content, message):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ManifestError, match=message) as caught:
        Manifest.read(tmp_path)
    assert isinstance(caught.value, InputError)
    assert str(tmp_path / "manifest.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_huge_manifest(tmp_path):
    with pytest.raises(ManifestError, match=r"manifest.json: no such file; name a directory"):
        Manifest.read(tmp_path)
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ManifestError, match="a manifest has at most 16777216"):
        Manifest.read(tmp_path)


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "bundle").write_bytes(b"")
    with pytest.raises(ManifestError, match="no such file"):
        Manifest.read(tmp_path / "bundle")


def test_the_page_names_every_key():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "bundle.md").read_text()
    classes = [c for c in vars(manifest_module).values() if dataclasses.is_dataclass(c)]
    keys = {field.name for c in classes for field in dataclasses.fields(c)}
    assert len(keys) > 40
    assert {key for key in keys if f"`{key}`" not in page and f".{key}`" not in page} == set()
