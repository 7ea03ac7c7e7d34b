"""The benchmark as one self-contained HTML page."""

from __future__ import annotations

import html
import importlib.resources
import json
import pathlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

from specexport.exporter.bench_charts import ratio_bars
from specexport.exporter.report_svg import line_chart

Json = Mapping[str, Any]
MIB = 2**20


def render_report(result: Json) -> str:
    """The page for what `bench` returns; it loads nothing from anywhere."""
    parts = [_header(result), _tiles(result)]
    parts += [_context(found) for found in result["contexts"]]
    parts += [_prefill(result["prefill"]), _generation(result["generation"]), _machine(result)]
    template = importlib.resources.files("specexport.exporter").joinpath("report_template.html")
    page = string.Template(template.read_text("utf-8"))
    return page.substitute(title="Benchmark", body="\n".join(part for part in parts if part))


def write_report(result: Json, page: pathlib.Path) -> None:
    """Write the page, and the JSON that it shows beside it, under the same name."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render_report(result), "utf-8")
    page.with_suffix(".json").write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", "utf-8")


def _header(result: Json) -> str:
    machine, noise = result["machine"], result["noise"]
    about = f"{result['model']} · {machine['processor']}, {machine['threads']} threads, {machine['instruction_set']}"
    text = f'<header><h1>Benchmark</h1></header><p class="soft">{_escape(about)}</p>'
    if noise:
        text += f'<p class="{"bad" if noise["noisy"] else "soft"}">{_escape(noise["text"])}</p>'
    return text


def _tiles(result: Json) -> str:
    tiles = []
    for found in result["contexts"][:1]:
        at = f"at {found['context']:,} tokens"
        tiles.append((f"{found['decode']['tokens_per_second']['median']:.0f} tok/s", f"plain decoding {at}"))
        tiles.append((f"{found['bytes_per_token']['total'] / 1e6:.1f} MB", f"read for a token {at}"))
        share = found["bandwidth_share"]["median"]
        rate = found["read_bandwidth"]["median"] / 1e9
        tiles.append((f"{share:.0%}", f"of this machine's {rate:.1f} GB/s for as many bytes"))
        if "5" in found["verify_ratio"]:
            tiles.append((f"{found['verify_ratio']['5']['median']:.2f}", "cost of 5 rows to that of one"))
    if result["prefill"]:
        best = max(result["prefill"], key=lambda row: float(row["tokens_per_second"]["median"]))
        tiles.append((f"{best['tokens_per_second']['median']:,.0f} tok/s", f"prefill of {best['tokens']:,} tokens"))
    if memory := result["memory"]:
        tiles.append(
            (
                f"{memory['peak_bytes'] / MIB:,.0f} MiB",
                f"peak memory, {memory['beyond_bytes'] / MIB:,.0f} beyond weights and cache",
            )
        )
    shown = "".join(f'<div class="tile"><b>{_escape(b)}</b><span>{_escape(t)}</span></div>' for b, t in tiles)
    return f'<div class="tiles">{shown}</div>'


def _context(found: Json) -> str:
    widths = [int(width) for width in found["verify"]]
    times = list(found["verify"].values())
    cost = list(found["verify_ratio"].values())
    charts = [
        line_chart(
            "Milliseconds of a verify, median",
            widths,
            [time["median"] for time in times],
            x_label="rows",
            format_y=lambda value: f"{value:g}",
            low=0.0,
            hover=[
                f"{width} rows: {time['median']:.2f} ms, 90 % {time['p90']:.2f}, 99 % {time['p99']:.2f}"
                for width, time in zip(widths, times)
            ],
        ),
        line_chart(
            "Cost of a verify to that of one row, pair by pair",
            widths,
            [ratio["median"] for ratio in cost],
            x_label="rows",
            format_y=lambda value: f"{value:g}",
            low=0.0,
            level=1.0,
            level_label="one row",
            hover=[
                f"{width} rows: {ratio['median']:.2f}, from {ratio['p10']:.2f} to {ratio['p90']:.2f}"
                for width, ratio in zip(widths, cost)
            ],
        ),
    ]
    rows = [
        [str(width), *(f"{time[k]:.2f}" for k in ("median", "p90", "p99"))]
        + [f"{ratio[k]:.2f}" for k in ("median", "p10", "p90")]
        for width, time, ratio in zip(widths, times, cost)
    ]
    nbytes, draft = found["bytes_per_token"], found["draft_ms"]
    median = found["decode"]["milliseconds"]["median"]
    text = (
        f"A plain step takes {median:.2f} ms and reads {nbytes['total'] / 1e6:.1f} MB: "
        f"weights {nbytes['weights'] / 1e6:.1f}, head {nbytes['head'] / 1e6:.1f}, cache {nbytes['cache'] / 1e6:.1f}."
        + (f" A draft step takes {draft['median']:.2f} ms." if draft else "")
    )
    head = ["rows", "ms", "90 %", "99 %", "to one row", "10 %", "90 %"]
    details = f"<details><summary>all figures</summary>{_table(head, rows)}</details>"
    return (
        f"<section><h2>Steps at {found['context']:,} tokens</h2><p>{_escape(text)}</p>"
        f'<div class="charts">{"".join(charts)}</div>{details}</section>'
    )


def _prefill(rows: Sequence[Json]) -> str:
    if not rows:
        return ""
    lengths = [row["tokens"] for row in rows]
    speeds = [row["tokens_per_second"] for row in rows]
    chart = line_chart(
        "Prefill, tokens a second",
        lengths,
        [speed["median"] for speed in speeds],
        x_label="tokens of the prompt",
        format_y=lambda value: f"{value:,.0f}",
        low=0.0,
        hover=[
            f"{length:,} tokens: {speed['median']:,.0f} tok/s, from {speed['p10']:,.0f} to {speed['p90']:,.0f}"
            for length, speed in zip(lengths, speeds)
        ],
    )
    table = [[f"{n:,}", *(f"{speed[k]:,.0f}" for k in ("median", "p10", "p90"))] for n, speed in zip(lengths, speeds)]
    shown = _table(["prompt tokens", "tok/s", "10 %", "90 %"], table)
    return f'<section><h2>Prefill</h2><div class="charts">{chart}{shown}</div></section>'


def _generation(generation: Json | None) -> str:
    if generation is None:
        return ""
    entries = generation["categories"]
    names = [name for name in entries[0]["contestants"] if name != "plain"]
    charts = []
    for name in names:
        found = [(entry["category"], entry["contestants"][name]["ratio"]) for entry in entries]
        bars = [(ratio["median"], ratio["p10"], ratio["p90"]) for _, ratio in found]
        charts.append(ratio_bars(f"{name}: speed to plain decoding", [category for category, _ in found], bars))
    rows = []
    for entry in entries:
        for name, one in entry["contestants"].items():
            rows.append(
                [entry["category"], str(entry["prompts"]), name]
                + [f"{one['tokens_per_second']['median']:.1f}"]
                + [f"{one['ratio'][k]:.2f}" for k in ("median", "p10", "p90")]
                + [f"{one['tokens_per_step']:.2f}" if "tokens_per_step" in one else ""]
                + [f"{one['acceptance']:.0%}" if one.get("acceptance") is not None else ""]
            )
    verdicts = "".join(
        f'<span class="badge {"bad" if different else "good"}">{_escape(name)}: '
        f"{'ids differ on ' + str(len(different)) + ' prompts' if different else 'ids equal plain ids'}</span> "
        for name, different in generation["different_prompts"].items()
    )
    head = ["category", "prompts", "contestant", "tok/s", "to plain", "10 %", "90 %", "tokens a step", "accepted"]
    about = f"Greedy, {generation['tokens']} new tokens, {generation['rounds']} rounds, in turn; ratios pair by pair."
    return (
        f"<section><h2>Generation</h2><p>{verdicts}</p><p>{about}</p>"
        f'<div class="charts" style="grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); '
        f'margin-bottom: 12px">{"".join(charts)}</div>{_table(head, rows, texts=(0, 2))}</section>'
    )


def _machine(result: Json) -> str:
    machine = result["machine"]
    facts = {k: v for k, v in machine.items() if k != "versions"} | machine["versions"]
    facts |= {f"weights, {scheme}": f"{count} matrices" for scheme, count in result["weights"]["summary"].items()}
    rows = [[name.replace("_", " "), str(value)] for name, value in facts.items()]
    how = (
        "Bytes are counted from the engine's graph: matrices and vectors that a step reads whole, the output head, and "
        "keys, values and scales of the cache. The read bandwidth is measured in the same rounds, by the kernels' own "
        "threads, over a buffer of as many bytes."
    )
    table = _table(["", ""], rows, texts=(0, 1))
    return f'<section><h2>Machine</h2>{table}</section><footer><p class="note">{how}</p></footer>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        styles = ["" if index in texts else ' class="number"' for index in range(len(row))]
        return "".join(f"<{tag}{style}>{_escape(text)}</{tag}>" for style, text in zip(styles, row))

    lines = [cells("th", head) if any(head) else "", *(cells("td", row) for row in rows)]
    body = "".join(f"<tr>{line}</tr>" for line in lines if line)
    return f'<div class="card scroll"><table>{body}</table></div>'


def _escape(text: object) -> str:
    return html.escape(str(text), quote=True)
