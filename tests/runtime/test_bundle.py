"""Hostile bundles: each way that a directory can differ from its manifest is refused with its own message."""

from __future__ import annotations

import dataclasses
import json
import os
import time

import bundle_files
import pytest
from bundle_files import FILES, engine_entry, file_entry, manifest, write_bundle

from specexport.runtime.bundle import open_bundle, sha256
from specexport.runtime.manifest import ContractEntry, DraftEntry
from specexport.runtime.manifest_json import ManifestError

WEIGHTS = "engines/cpu/weights.bin"


def files(**changes):
    return {**manifest().files, **changes}


def test_a_right_bundle_opens(tmp_path):
    bundle = open_bundle(write_bundle(tmp_path))
    assert bundle.path(WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert bundle.has("tokenizer.json") and not bundle.has("manifest.json")
    with pytest.raises(ManifestError, match=r"chat_template.jinja is not among its files"):
        bundle.path("chat_template.jinja")


def test_a_missing_file(tmp_path):
    (write_bundle(tmp_path) / WEIGHTS).unlink()
    with pytest.raises(ManifestError, match=r"weights.bin: listed in the manifest but missing"):
        open_bundle(tmp_path)


def test_a_directory_in_place_of_a_file(tmp_path):
    path = write_bundle(tmp_path) / "tokenizer.json"
    path.unlink()
    path.mkdir()
    with pytest.raises(ManifestError, match=r"tokenizer.json: listed in the manifest but missing"):
        open_bundle(tmp_path)


def test_a_wrong_size(tmp_path):
    (write_bundle(tmp_path) / WEIGHTS).write_bytes(FILES[WEIGHTS][:-1])
    for verify in (True, False):
        with pytest.raises(ManifestError, match=r"weights.bin: 3999 bytes, the manifest says 4000"):
            open_bundle(tmp_path, verify=verify)


def test_a_wrong_hash(tmp_path):
    (write_bundle(tmp_path) / WEIGHTS).write_bytes(b"\x07" + FILES[WEIGHTS][1:])
    with pytest.raises(ManifestError, match=r"weights.bin: sha256 is .* the manifest says .*changed or damaged"):
        open_bundle(tmp_path)
    open_bundle(tmp_path, verify=False)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/.", "", "a\\b", "C:/x", "a/", "a\0b"]
)
def test_a_path_that_leaves_the_bundle_or_is_odd(tmp_path, name):
    write_bundle(tmp_path, files=files(**{name: file_entry(b"")}))
    with pytest.raises(ManifestError, match="a path must be relative"):
        open_bundle(tmp_path)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_out_of_the_bundle(tmp_path, what):
    bundle, outside = tmp_path / "bundle", tmp_path / "outside"
    write_bundle(bundle)
    write_bundle(outside)
    inner = "tokenizer.json" if what == "file" else "engines"
    path = bundle / inner
    path.rename(tmp_path / "gone")
    path.symlink_to(outside / inner)
    with pytest.raises(ManifestError, match="a link leads out of the bundle"):
        open_bundle(bundle)


@pytest.mark.parametrize("name", ["loop", "x" * 5000, "\ud800"])
def test_a_name_that_cannot_be_looked_up(tmp_path, name):
    write_bundle(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    data = json.loads((tmp_path / "manifest.json").read_text())
    data["files"][name] = {"sha256": "00", "bytes": 0}
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ManifestError, match=r"cannot be looked up|listed in the manifest but missing"):
        open_bundle(tmp_path)


def test_a_link_inside_the_bundle_and_a_link_to_the_bundle_are_fine(tmp_path):
    bundle = write_bundle(tmp_path / "bundle")
    (bundle / "tokenizer.json").rename(bundle / "blob")
    (bundle / "tokenizer.json").symlink_to("blob")
    (tmp_path / "alias").symlink_to("bundle")
    open_bundle(tmp_path / "alias")


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (
            {"specexport::QuantizedLinear": 9},
            "op specexport::QuantizedLinear version 9, this specexport has version 1; upgrade specexport",
        ),
        ({"specexport.cpu::QuantizedLinear": 0}, "version 0, this specexport has version 1; rebuild the bundle"),
        ({"specexport::Telepathy": 1}, "needs op specexport::Telepathy version 1, which this specexport lacks"),
        ({"com.evil::QuantizedLinear": 1}, "com.evil::QuantizedLinear version 1, which this specexport lacks"),
    ],
)
def test_an_op_or_version_that_is_not_here(tmp_path, ops, message):
    with pytest.raises(ManifestError, match=message):
        open_bundle(write_bundle(tmp_path, ops=ops))


def test_a_bundle_that_failed_its_gate(tmp_path):
    write_bundle(tmp_path, status="failed_accuracy")
    with pytest.raises(ManifestError, match=r"failed its accuracy gate.*allow_failed=True"):
        open_bundle(tmp_path)
    assert open_bundle(tmp_path, allow_failed=True).manifest.status == "failed_accuracy"
    open_bundle(write_bundle(tmp_path, status="not_compared"))
    with pytest.raises(ManifestError, match=r"of a build that did not end .status building."):
        open_bundle(write_bundle(tmp_path, status="building"))


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (DraftEntry("oracle", 4), "draft.kind is 'oracle', this specexport knows ngram, layers and model"),
        (DraftEntry("layers", 4, layers=2), "draft.engine must be there exactly when"),
        (DraftEntry("ngram", 4, max_ngram_size=3, engine=engine_entry()), "draft.engine must be there exactly when"),
        (DraftEntry("ngram", 4), "draft.max_ngram_size must be at least 1"),
        (
            DraftEntry("model", 4, engine=engine_entry("other")),
            r"draft.engines.cpu names engines/cpu/other.onnx, which",
        ),
    ],
)
def test_a_draft_that_does_not_hold_together(tmp_path, draft, message):
    with pytest.raises(ManifestError, match=message):
        open_bundle(write_bundle(tmp_path, draft=draft))


def test_an_engine_for_another_backend(tmp_path):
    write_bundle(tmp_path, target=dataclasses.replace(engine_entry(), engines={"cuda": engine_entry().engines["cpu"]}))
    with pytest.raises(ManifestError, match=r"target has no cpu engine; it has \['cuda'\]"):
        open_bundle(tmp_path)


@pytest.mark.parametrize("size", [0, 17])
def test_a_contract_wider_than_a_vocabulary(tmp_path, size):
    with pytest.raises(ManifestError, match=f"contract.vocab_size is {size}, the target's is 16"):
        open_bundle(write_bundle(tmp_path, contract=ContractEntry(size, 16, 16, 0)))


def test_hashing_is_fast(tmp_path):
    path = tmp_path / "big"
    with path.open("wb") as file:
        for _ in range(4):
            file.write(os.urandom(1 << 20) * 8)
    sha256(path)
    start = time.process_time()
    digest = sha256(path)
    assert time.process_time() - start < 0.2  # 32 MB; 200 MB in 0.5 s leaves 0.08
    assert digest == bundle_files.hashlib.sha256(path.read_bytes()).hexdigest()
