"""The HTML page: whole, self-contained, and deaf to what texts contain."""

from __future__ import annotations

import html.parser
import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
from compare_fakes import VOCAB, FakeEngine, FakePair, FakeReference

from specexport.exporter.compare import CompareOptions, Comparison, compare_pair
from specexport.exporter.compare_table import render_table
from specexport.exporter.compare_text import CompareText
from specexport.exporter.gates import parse_gate
from specexport.exporter.report import render_report, write_report
from specexport.exporter.report_svg import bar_chart, line_chart, ticks

EVIL = "<script>alert('x')</script> & \"quoted\""


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    rng = np.random.default_rng(0)
    text = CompareText(EVIL, (rng.integers(0, VOCAB, 40),), (rng.integers(0, VOCAB, 5),))
    pair = FakePair(FakeEngine(noise=1.0), swap=3)
    pair.tokenizer.decode = lambda ids: f"{EVIL} {ids}"  # type: ignore[method-assign]
    options = CompareOptions(max_new_tokens=8, tie_margin=0.2)
    found = compare_pair(pair, FakeReference(), text, options, reference_name=EVIL)
    return found.with_gates([parse_gate("kl_mean>1e-9"), parse_gate("top1_agreement<1%")])


class Tags(html.parser.HTMLParser):
    """Collects start tags and checks that every element is closed in order."""

    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    return tags


def test_the_page_loads_nothing_and_runs_nothing(comparison: Comparison) -> None:
    page = render_report(comparison.to_json())
    tags = parse(page)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in tags.tags}
    assert not any(name in ("src", "href") or name.startswith("on") for _, attrs in tags.tags for name in attrs)
    assert "http" not in page and "@import" not in page and "url(" not in page
    assert "prefers-color-scheme: dark" in page
    assert sum(tag == "svg" for tag, _ in tags.tags) == 3


def test_all_text_is_escaped(comparison: Comparison) -> None:
    page = render_report(comparison.to_json(), title=EVIL)
    assert "<script" not in page and "alert('x')" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;quoted&quot;" in page


def test_the_page_says_what_was_found(comparison: Comparison) -> None:
    page = render_report(comparison.to_json())
    text = re.sub(r"<[^>]+>", " ", page)
    assert "failed" in text
    assert f"{comparison.target.figures.kl_mean:.3g}" in text
    assert "target.kl_mean is" in text and "fails at" in text
    assert "speculative leaves plain at token 3" in text
    assert "identical" in text
    assert "token by token" in text and "verify of k+1 rows" in text


def test_a_page_without_finite_numbers_still_renders() -> None:
    text = CompareText("a test", (np.arange(30) % VOCAB,), ())
    found = compare_pair(FakePair(FakeEngine(fault="nan")), FakeReference(), text, CompareOptions())
    page = render_report(found.to_json())
    parse(page)
    assert "not finite" in page
    assert "rows have logits that are not finite" in page
    assert "nan" in render_table(found)


def test_the_report_is_two_files(comparison: Comparison, tmp_path: pathlib.Path) -> None:
    write_report(comparison.to_json(), tmp_path / "new" / "compare.html")
    stored: dict[str, Any] = json.loads((tmp_path / "new" / "compare.json").read_text("utf-8"))
    assert stored == comparison.to_json()
    assert render_report(stored) == render_report(comparison.to_json())


def test_the_table_names_figures_gates_and_faults(comparison: Comparison) -> None:
    table = render_table(comparison)
    lines = table.splitlines()
    assert any(line.startswith("KL mean") and f"{comparison.target.figures.kl_mean:.3g}" in line for line in lines)
    assert any(line.startswith("FAILED  target.kl_mean is") for line in lines)
    assert any(line.startswith("passed  target.top1_agreement is") for line in lines)
    assert "speculative against plain ids: DIFFER on 1 prompts" in lines


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.957, 1), (0, 3.2e-9), (-5, 17), (2, 2), (0, 0), (1e6, 3e6)])
def test_ticks_span_the_range_with_few_round_steps(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high
    assert 2 <= len(found) <= 8
    np.testing.assert_allclose(np.diff(found), found[1] - found[0], rtol=1e-3)


def test_charts_place_points_inside_and_leave_gaps() -> None:
    chart = line_chart("t", [0, 1, 2, 3], [0.1, None, 0.3, 0.2], x_label="x", format_y=str, low=0.0)
    assert chart.count("<polyline") == 2
    ys = [
        float(y)
        for points in re.findall(r'class="line" points="([^"]+)"', chart)
        for y in re.findall(r",(\S+)", points)
    ]
    assert min(ys) == 16.0 and max(ys) < 236 - 44
    bars = bar_chart("t", ["a", "b"], [1, 4], x_label="x", classes=["tie", "fault"])
    low, high = (float(h) for h in re.findall(r'<rect[^>]* height="([^"]+)"', bars))
    assert high == pytest.approx(4 * low, rel=0.01)
