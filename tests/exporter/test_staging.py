"""A bundle appears whole or not at all."""

import errno
import pathlib

import pytest

from specexport.exporter.staging import BuildError, staged_directory
from specexport.plugins.errors import InputError


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_finished_build_takes_its_place(tmp_path):
    with staged_directory(tmp_path / "pair", force=False) as stage:
        (stage / "manifest.json").write_text("{}")
        assert names(tmp_path) == [stage.name]
    assert names(tmp_path) == ["pair"]
    assert names(tmp_path / "pair") == ["manifest.json"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), ValueError("a pass failed"), OSError(errno.EIO, "I/O")])
def test_whatever_ends_a_build_early_leaves_nothing(tmp_path, interruption):
    with pytest.raises(type(interruption)), staged_directory(tmp_path / "pair", force=False) as stage:
        (stage / "weights.bin").write_bytes(b"half")
        raise interruption
    assert names(tmp_path) == []


def test_a_full_disk_is_one_clear_error(tmp_path):
    with (
        pytest.raises(BuildError, match=r"is full .* nothing was kept"),
        staged_directory(tmp_path / "pair", force=False),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert names(tmp_path) == []


def test_force_replaces_a_bundle_and_a_failure_keeps_the_old_one(tmp_path):
    pair = tmp_path / "pair"
    pair.mkdir()
    (pair / "manifest.json").write_text("old")
    with pytest.raises(InputError, match="exists already"), staged_directory(pair, force=False):
        pass
    with pytest.raises(ValueError, match="late"), staged_directory(pair, force=True):
        raise ValueError("late")
    assert (pair / "manifest.json").read_text() == "old"
    with staged_directory(pair, force=True) as stage:
        (stage / "manifest.json").write_text("new")
    assert (pair / "manifest.json").read_text() == "new"
    assert names(tmp_path) == ["pair"]


def test_force_never_replaces_what_is_no_bundle(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="not a bundle"), staged_directory(home, force=True):
        pass
    assert names(home) == ["thesis.tex"]
