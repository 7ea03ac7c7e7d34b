"""The comparison as one self-contained HTML page."""

from __future__ import annotations

import html
import importlib.resources
import json
import pathlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

from specexport.exporter.report_svg import bar_chart, line_chart

Json = Mapping[str, Any]
PATH_NAMES = {"prefill": "prefill", "token_by_token": "token by token", "verify": "verify of k+1 rows"}


def render_report(comparison: Json, title: str = "Exported against eager") -> str:
    """The page for ``Comparison.to_json()``, or for what a compare.json holds; it loads nothing from anywhere."""
    parts = [_header(comparison, title)]
    for role in ("target", "draft"):
        if comparison.get(role) is not None:
            parts.append(_role(role, comparison[role]))
    parts += [_gates(comparison["gates"]), _generations(comparison["generation"]), _footer(comparison)]
    template = importlib.resources.files("specexport.exporter").joinpath("report_template.html")
    page = string.Template(template.read_text("utf-8"))
    return page.substitute(title=_escape(title), body="\n".join(part for part in parts if part))


def write_report(comparison: Json, page: pathlib.Path, title: str = "Exported against eager") -> None:
    """Write the page, and the JSON that it shows beside it, under the same name."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render_report(comparison, title), "utf-8")
    text = json.dumps(comparison, indent=2, allow_nan=False, ensure_ascii=False)
    page.with_suffix(".json").write_text(text + "\n", "utf-8")


def _header(comparison: Json, title: str) -> str:
    verdicts = comparison["verdicts"]
    badge = _badge("passed" if verdicts["passed"] else "failed", verdicts["passed"])
    problems = [*verdicts["faults"], *verdicts["failed_gates"]]
    listed = "".join(f'<p class="bad">{_escape(problem)}</p>' for problem in problems)
    about = (
        f"{_escape(comparison['reference']['source'])}, fp32 eager, on {comparison['tokens']:,} tokens in "
        f"{_count(comparison['windows'], 'window')} of {_escape(comparison['text'])}"
    )
    return f'<header><h1>{_escape(title)}</h1>{badge}</header><p class="soft">{about}</p>{listed}'


def _role(role: str, data: Json) -> str:
    tiles = [
        (_number(data["kl_mean"]), f"mean KL, nats ± {_number(data['kl_mean_standard_error'], 2)}"),
        (_number(data["kl_p99"]), f"99th percentile; maximum {_number(data['kl_max'])}"),
        (_percent(data["top1_agreement"]), "top-1 agreement"),
        (
            _percent(data["perplexity_delta"], sign=True),
            f"perplexity, ± {_percent(data['perplexity_delta_standard_error'])} paired",
        ),
        (_number(data["perplexity"], 5), f"perplexity; reference {_number(data['perplexity_reference'], 5)}"),
    ]
    shown = "".join(f'<div class="tile"><b>{_escape(b)}</b><span>{_escape(t)}</span></div>' for b, t in tiles)
    return (
        f'<section><h2>{role.capitalize()}</h2><div class="tiles">{shown}</div>'
        f'<div class="charts">{_charts(data)}</div>{_divergences(data)}{_paths(data)}</section>'
    )


def _charts(data: Json) -> str:
    bins = data["by_position"]
    middle = [(b["start"] + b["stop"] - 1) / 2 for b in bins]
    kl = [b["kl_mean"] for b in bins]
    agreement = [b["top1_agreement"] for b in bins]
    where = [f"positions {b['start']} to {b['stop'] - 1}, {b['tokens']} tokens" for b in bins]
    position = "position in the window, tokens"
    charts = [
        line_chart(
            "KL by position, nats",
            middle,
            kl,
            x_label=position,
            format_y=lambda value: f"{value:.3g}",
            low=0.0,
            level=data["kl_mean"],
            level_label="mean",
            hover=[f"{_number(value)} nats at {text}" for value, text in zip(kl, where)],
        ),
        line_chart(
            "Top-1 agreement by position",
            middle,
            agreement,
            x_label=position,
            format_y=lambda value: f"{value * 100:.4g} %",
            high=1.0,
            level=data["top1_agreement"],
            level_label="mean",
            hover=[f"{_percent(value)} at {text}" for value, text in zip(agreement, where)],
        ),
        _margins(data["disagreements"]),
    ]
    layers = data.get("layers")
    if layers:
        numbers = [layer["layer"] for layer in layers]
        for name, key, low, high in (
            ("Cosine by layer", "cosine_mean", None, 1.0),
            ("Norm by layer, exported / reference", "norm_ratio", None, None),
        ):
            values = [layer[key] for layer in layers]
            charts.append(
                line_chart(
                    name,
                    numbers,
                    values,
                    x_label="layer",
                    format_y=lambda value: f"{value:.6g}",
                    low=low,
                    high=high,
                    hover=[f"layer {n}: {_number(v, 6)}" for n, v in zip(numbers, values)],
                )
            )
    return "".join(charts)


def _margins(disagreements: Json) -> str:
    edges, tie_margin = disagreements["edges"], disagreements["tie_margin"]
    return bar_chart(
        "Disagreements by the reference's margin",
        [*(f"{edge:g}" for edge in edges[:-1]), f"{edges[-1]:g}+"],
        disagreements["counts"],
        x_label=f"top-1 minus top-2 logit, from; under {tie_margin:g}: a tie",
        classes=["tie" if edge < tie_margin else "fault" for edge in edges],
    )


def _divergences(data: Json) -> str:
    found = data["disagreements"]
    if not found["count"]:
        return "<p>Every top id is the reference's.</p>"
    rows = []
    for name, key in (("first", "first_divergence"), ("largest margin", "worst_divergence")):
        at = data[key]
        rows.append(
            [
                name,
                str(at["window"]),
                str(at["position"]),
                str(at["reference_id"]),
                str(at["exported_id"]),
                _number(at["margin"]),
                at["verdict"],
            ]
        )
    text = (
        f"<h3>Other top ids</h3><p>{_count(found['count'], 'position')} "
        f"of {data['tokens']:,} with another top id: {found['ties']:,} at ties "
        f"(margin under {found['tie_margin']:g}), {found['faults']:,} where the reference was surer.</p>"
    )
    head = ["divergence", "window", "position", "reference id", "exported id", "margin", "verdict"]
    return text + _table(head, rows, numbers=range(1, 6))


def _paths(data: Json) -> str:
    rows = []
    for name, path in data["paths"].items():
        same = "the measure" if name == "prefill" else "identical" if path["identical"] else None
        at = path["first_difference"]
        rows.append(
            [
                PATH_NAMES.get(name, name),
                f"{path['tokens']:,}",
                _number(path["kl_mean"]),
                _number(path["kl_max"]),
                _percent(path["top1_agreement"]),
                same or f"up to {_number(path['max_difference'])}, first in window {at[0]} at position {at[1]}",
            ]
        )
    note = data.get("layers_note")
    tail = f'<p class="note">Layers are not compared: {_escape(note)}</p>' if note else ""
    head = ["path", "rows", "mean KL", "max KL", "top-1", "logits against prefill's"]
    return "<h3>Paths</h3>" + _table(head, rows, numbers=range(1, 5)) + tail


def _gates(gates: Sequence[Json]) -> str:
    if not gates:
        return ""
    rows = [
        [
            f"{gate['model']}.{gate['field']}",
            _number(gate["value"]),
            f"{gate['operator']} {gate['limit']:g}",
            "passed" if gate["passed"] else "failed",
        ]
        for gate in gates
    ]
    return "<section><h2>Gates</h2>" + _table(["field", "value", "fails at", ""], rows, numbers=(1,)) + "</section>"


def _generations(generation: Json | None) -> str:
    if generation is None:
        return ""
    equal = generation["speculative_equals_plain"]
    mismatches = f"{generation['speculative_mismatches']} of {len(generation['prompts'])} prompts differ"
    speculation = (
        ""
        if equal is None
        else _badge("speculative ids equal plain ids" if equal else f"speculative ids: {mismatches}", equal)
    )
    text = (
        f"{generation['matched_mean']:.1f} ids match the reference's on average, of at most "
        f"{generation['max_new_tokens']}; {_count(generation['identical'], 'prompt')} to the end, "
        f"{generation['ties']} parting at a tie, {generation['faults']} where the reference was surer."
    )
    prompts = "".join(_prompt(prompt) for prompt in generation["prompts"])
    return f"<section><h2>Generated ids, greedy</h2><p>{speculation}</p><p>{_escape(text)}</p>{prompts}</section>"


def _prompt(prompt: Json) -> str:
    parted, speculative = prompt["difference"], prompt["speculative_difference"]
    total = len(prompt["plain_ids"])
    if parted is None:
        verdict = f'<span class="good">all {total} ids equal</span>'
    else:
        style = "soft" if parted["verdict"] == "tie" else "bad"
        verdict = (
            f'<span class="{style}">parts at token {parted["position"]} of {total}: {parted["verdict"]}, '
            f"margin {_number(parted['margin'])}</span>"
        )
    if speculative is not None:
        verdict += (
            f' <span class="bad">speculative leaves plain at token {speculative["position"]}, '
            f"margin {_number(speculative['margin'])}</span>"
        )
    sides = _sides(prompt, parted)
    return (
        f'<div class="card prompt"><h3>{verdict}</h3><details><summary>prompt, {prompt["prompt_tokens"]} tokens'
        f"</summary><pre>{_escape(prompt['prompt'])}</pre></details>{sides}</div>"
    )


def _sides(prompt: Json, parted: Json | None) -> str:
    columns = [("exported", prompt["plain_text"])]
    if prompt["speculative_difference"] is not None:
        columns.append(("exported, speculative", prompt["speculative_text"]))
    if parted is not None:
        columns.append(("reference", prompt["reference_text"]))
    common = _common_length([text for _, text in columns]) if len(columns) > 1 else None
    style = "tie" if parted is not None and parted["verdict"] == "tie" else ""
    shown = []
    for name, text in columns:
        rest = "" if common is None else text[common:]
        marked = f'<mark class="{style}">{_escape(rest)}</mark>' if rest else ""
        shown.append(f"<div><h4>{name}</h4><pre>{_escape(text[:common])}{marked}</pre></div>")
    return f'<div class="sides">{"".join(shown)}</div>'


def _common_length(texts: Sequence[str]) -> int:
    """Characters before the first that is not the same in all texts."""
    return next((index for index, column in enumerate(zip(*texts)) if len(set(column)) > 1), min(map(len, texts)))


def _footer(comparison: Json) -> str:
    return (
        '<footer><p class="note">KL is KL(reference || exported) in nats, from float64 log-softmax of both models on '
        "the same ids. Standard errors take tokens as independent. Perplexity's change is paired, token by token.</p>"
        f"<p>Compared in {comparison['seconds']:.0f} s.</p></footer>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    def cell(tag: str, index: int, text: str) -> str:
        style = "number" if index in numbers else {"fault": "bad", "failed": "bad", "passed": "good"}.get(text, "")
        style = "good" if text == "identical" else style
        return f'<{tag} class="{style}">{_escape(text)}</{tag}>'

    lines = ["".join(cell("th", index, text) for index, text in enumerate(head))]
    lines += ["".join(cell("td", index, text) for index, text in enumerate(row)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="card scroll"><table>{body}</table></div>'


def _badge(text: str, good: bool) -> str:
    return f'<span class="badge {"good" if good else "bad"}">{_escape(text)}</span>'


def _escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _number(value: float | None, digits: int = 3) -> str:
    return "not finite" if value is None else f"{value:.{digits}g}"


def _percent(value: float | None, sign: bool = False) -> str:
    if value is None:
        return "not finite"
    return f"{value * 100:{'+' if sign else ''}.2f} %"
