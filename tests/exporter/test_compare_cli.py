"""``specexport compare`` from the outside: exit codes, output, files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result
from compare_fakes import FakeEngine, FakePair, FakeReference

from specexport.exporter.cli import cli

Run = Callable[..., Result]
QUICK = ("--tokens", "48", "--window", "24", "--generate-prompts", "1", "-n", "4")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Run:
    def invoke(*arguments: str, pair: FakePair | None = None) -> Result:
        loaded: dict[str, Any] = {}

        def load(directory: pathlib.Path, **options: Any) -> FakePair:
            assert directory == tmp_path
            loaded.update(options)
            return pair or FakePair(FakeEngine(noise=0.1, context_length=512))

        monkeypatch.setattr("specexport.runtime.load", load, raising=False)
        monkeypatch.setattr("specexport.exporter.cli_compare._reference", lambda *_: (FakeReference(), "the reference"))
        return CliRunner().invoke(cli, ["compare", str(tmp_path), *QUICK, *arguments])

    return invoke


def test_a_comparison_that_passes(run: Run, tmp_path: pathlib.Path) -> None:
    result = run("--fail-if", "kl_mean>50%", "--fail-if", "target.top1_agreement<10%")
    assert result.exit_code == 0, result.output
    assert "against the reference, fp32 eager, on 48 tokens in 2 windows" in result.stdout
    assert "passed  target.kl_mean is" in result.stdout
    stored = json.loads((tmp_path / "report" / "compare.json").read_text("utf-8"))
    assert stored["tokens"] == 48 and stored["verdicts"]["passed"] is True
    assert (tmp_path / "report" / "compare.html").read_text("utf-8").startswith("<!doctype html>")
    assert "compare.html" in result.stderr


def test_a_failed_gate_exits_1_and_is_named(run: Run) -> None:
    result = run("--fail-if", "kl_mean>1e-12", "--fail-if", "kl_max>1e9", "--json", "--no-report")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verdicts"]["passed"] is False
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("Error: target.kl_mean is ") and errors[0].endswith("fails at > 1e-12")


def test_broken_speculation_exits_1_without_any_gate(run: Run) -> None:
    result = run("--tie-margin", "0", "--no-report", pair=FakePair(FakeEngine(context_length=512), swap=2))
    assert result.exit_code == 1
    assert "Error: prompt 1: speculative ids leave the plain ones at token 2" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fail-if", "kld>1"), "known fields: kl_mean"),
        (("--fail-if", "draft.kl_mean>1"), "no draft model"),
        (("--window", "600"), "does not fit the engine's 512 positions"),
        (("--text", "/nowhere/at/all.txt"), "No such file"),
        (("--report", "a.html", "--no-report"), "contradict"),
        (("--tokens", "1"), "--tokens"),
    ],
)
def test_bad_input_exits_2_with_its_reason(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run("--tokens", "700", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stdout == ""


def test_a_hashed_report_is_not_overwritten(run: Run, tmp_path: pathlib.Path) -> None:
    pair = FakePair(FakeEngine(context_length=512))
    pair.manifest.files = {"report/compare.json": None}
    result = run(pair=pair)
    assert result.exit_code == 0
    assert not (tmp_path / "report").exists()
    assert "--report PATH writes elsewhere" in result.stderr
    assert run("--report", str(tmp_path / "a" / "b.html"), pair=pair).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b.html", "b.json"]
