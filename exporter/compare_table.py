"""The comparison as a table of text."""

from __future__ import annotations

from collections.abc import Sequence

from specexport.exporter.compare_result import Comparison, EngineComparison, path_verdict


def render_table(comparison: Comparison) -> str:
    """Target and draft side by side, then generated ids, gates and the verdict."""
    engines = [("target", comparison.target)]
    if comparison.draft is not None:
        engines.append(("draft", comparison.draft))
    tolerance = comparison.options.path_tolerance
    columns = [[name for name, _ in _cells(comparison.target, tolerance)]]
    columns += [[cell for _, cell in _cells(engine, tolerance)] for _, engine in engines]
    lines = [
        f"against {comparison.reference}, fp32 eager, on {comparison.tokens:,} tokens in {comparison.windows} "
        f"window{'' if comparison.windows == 1 else 's'} of {comparison.text}",
        "",
        *_align([["", *(name for name, _ in engines)], *map(list, zip(*columns))]),
    ]
    for name, engine in engines:
        if engine.layers is not None:
            lines += ["", *_layers(name, engine)]
        elif engine.layers_note is not None:
            lines += ["", f"layers of the {name} are not compared: {engine.layers_note}"]
    generation = comparison.generation
    if generation is not None:
        speculation = {True: "equal", False: f"DIFFER on {generation.speculative_mismatches} prompts", None: "no draft"}
        lines += [
            "",
            f"generated ids: {generation.matched_mean:.1f} of at most {generation.max_new_tokens} match the "
            f"reference's on {len(generation.prompts)} prompts; {generation.identical} to the end, "
            f"{generation.ties} part at a tie, {generation.faults} where the reference was surer",
            f"speculative against plain ids: {speculation[generation.speculative_equals_plain]}",
        ]
    if comparison.gates:
        lines += ["", *(f"{'passed' if r.passed else 'FAILED'}  {r}" for r in comparison.gates)]
    lines += [f"FAULT   {fault}" for fault in comparison.faults]
    return "\n".join(lines)


def _cells(engine: EngineComparison, tolerance: float) -> list[tuple[str, str]]:
    figures = engine.figures
    cells = [
        ("KL mean", f"{figures.kl_mean:.3g} ± {figures.kl_mean_standard_error:.1g}"),
        ("KL 99th percentile", f"{figures.kl_p99:.3g}"),
        ("KL maximum", f"{figures.kl_max:.3g}"),
        ("top-1 agreement", f"{figures.top1_agreement:.2%}"),
        ("perplexity", f"{figures.perplexity:.4f} ± {figures.perplexity_standard_error:.2g}"),
        (
            "perplexity, reference",
            f"{figures.perplexity_reference:.4f} ± {figures.perplexity_reference_standard_error:.2g}",
        ),
        ("perplexity, change", f"{figures.perplexity_delta:+.2%} ± {figures.perplexity_delta_standard_error:.2%}"),
        (
            "other top id",
            f"{figures.disagreements.count} ({figures.disagreements.ties} ties, {figures.disagreements.faults} surer)",
        ),
    ]
    first = figures.first_divergence
    if first is not None:
        where = f"window {first.window}, position {first.position}, margin {first.margin:.3g}: {first.verdict}"
        cells.append(("first other top id", where))
    else:
        cells.append(("first other top id", "none"))
    cells.append(("paths (prefill, one by one, k+1)", path_verdict(engine, tolerance)))
    return cells


def _layers(name: str, engine: EngineComparison) -> list[str]:
    rows = [[f"{name} layer", "cosine mean", "cosine min", "norm ratio"]]
    rows += [
        [str(found.layer), f"{found.cosine_mean:.6f}", f"{found.cosine_min:.6f}", f"{found.norm_ratio:.5f}"]
        for found in engine.layers or ()
    ]
    return _align(rows)


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
