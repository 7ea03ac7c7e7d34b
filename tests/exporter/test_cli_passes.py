"""``specexport passes`` over a tiny model's directory, without its weights."""

from __future__ import annotations

import json
import pathlib

import pytest
import tiny_models
from click.testing import CliRunner

from specexport.exporter.cli import cli


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("olmo2", tmp_path_factory.mktemp("olmo2"))


def test_the_table_counts_and_gives_reasons(directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(cli, ["passes", str(directory), "--dump-passes", str(tmp_path / "diffs")])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    (attention,) = (line.split() for line in lines if line.startswith("CachedAttention"))
    assert attention[1:3] == ["2", "0"]
    assert any("2 x not every part is a linear" in line for line in lines)
    assert "2 specexport::QuantizedKVAttention" in lines[-1]
    assert any(path.name.endswith("-CachedAttention.diff") for path in (tmp_path / "diffs").iterdir())


def test_one_pass_explained_and_json(directory: pathlib.Path) -> None:
    done = CliRunner().invoke(cli, ["passes", str(directory), "--explain", "FuseNormPass", "--json"])
    assert done.exit_code == 0, done.output
    (record,) = json.loads(done.output)["passes"]
    assert record["name"] == "FuseNorm"
    assert {refusal["reason"] for refusal in record["refused"]} == {
        "Concat uses its output too",
        "Add uses its output too",
    }


def test_a_pass_that_is_not_there(directory: pathlib.Path) -> None:
    done = CliRunner().invoke(cli, ["passes", str(directory), "--explain", "Nonsense"])
    assert done.exit_code == 2
    assert "there is no such pass" in done.output
