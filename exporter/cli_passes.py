"""``specexport passes``: what each graph pass does to a model, from its configuration alone."""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from typing import TYPE_CHECKING

import click

from specexport.plugins.errors import InputError

if TYPE_CHECKING:
    from specexport.graph_passes.infrastructure import PassRecord


@click.command()
@click.argument("model")
@click.option("--explain", metavar="PASS", help="List every refusal of one pass, with the value where it was met.")
@click.option(
    "--dump-passes", type=click.Path(path_type=pathlib.Path), help="Write a diff of the graph for each pass here."
)
@click.option("--context-length", type=int, help="Positions of the graph [default: the model's, at most 8192].")
@click.option(
    "--weights", type=click.Choice(["int4", "int8", "fp32"]), default="int8", show_default=True, help="Scheme shown."
)
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--cache-dir", type=click.Path(path_type=pathlib.Path), help="Where downloads are kept.")
@click.option("--offline", is_flag=True, help="Use what is cached; download nothing.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
def passes(
    model: str,
    explain: str | None,
    dump_passes: pathlib.Path | None,
    context_length: int | None,
    weights: str,
    revision: str | None,
    cache_dir: pathlib.Path | None,
    offline: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Show what the graph passes do to MODEL; its weights are not read.

    For each pass: how many places it rewrote, how many candidates it left and why, the nodes after it, its time.
    """
    from specexport.exporter.loading import load_config
    from specexport.exporter.source import resolve

    if explain is not None and explain.removesuffix("Pass") not in pass_names():
        raise InputError(f"--explain {explain}: there is no such pass; there are {', '.join(pass_names())}")
    source = resolve(
        model, revision=revision, cache_dir=cache_dir, offline=offline, trust_remote_code=trust_remote_code
    )
    records, left = explain_passes(load_config(source), weights, context_length, dump_passes)
    if explain is not None:
        records = [record for record in records if record.name == explain.removesuffix("Pass")]
    if as_json:
        click.echo(
            json.dumps({"nodes": left, "passes": [record.to_json() for record in records]}, indent=2, sort_keys=True)
        )
    elif explain is not None:
        _print_refusals(records)
    else:
        _print_table(records, left)


def explain_passes(
    config: object, weights: str = "int8", context_length: int | None = None, dump_dir: pathlib.Path | None = None
) -> tuple[list[PassRecord], dict[str, int]]:
    """Capture the model of ``config`` and run all passes, without weights.

    Returns:
        The passes' records, and how many nodes of each op are left.
    """
    from specexport.exporter.capture import capture, skeleton
    from specexport.exporter.compile import choose_context_length
    from specexport.graph_passes.infrastructure import run_passes
    from specexport.graph_passes.pipeline import cpu_passes, portable_passes
    from specexport.graph_passes.plan import NoWeights, PassPlan
    from specexport.plugins.quantized_linear.format import QuantizationScheme

    scheme = None if weights == "fp32" else QuantizationScheme(4 if weights == "int4" else 8, 32, weights == "int4")
    plan = PassPlan(
        weights=NoWeights(),
        scheme=lambda name, shape: scheme,
        activation_bits=lambda name: 8,
        key_bits=8,
        value_bits=8,
    )
    graph = capture(skeleton(config), context_length=choose_context_length(context_length, config))
    records = run_passes(graph, portable_passes(plan) + cpu_passes(), dump_dir)
    names = (f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in graph.graph)
    return records, dict(sorted(Counter(names).items(), key=lambda item: -item[1]))


def pass_names() -> list[str]:
    """The names of all passes in order, each once."""
    from specexport.graph_passes.pipeline import cpu_passes, portable_passes
    from specexport.graph_passes.plan import NoWeights, PassPlan

    passes = portable_passes(PassPlan(weights=NoWeights())) + cpu_passes()
    return list(dict.fromkeys(graph_pass.title for graph_pass in passes))


def _print_table(records: list[PassRecord], left: dict[str, int]) -> None:
    width = max(len(record.name) for record in records)
    click.echo(f"{'pass':<{width}}  matched  refused  nodes  seconds")
    for record in records:
        click.echo(
            f"{record.name:<{width}}  {record.matched:>7}  {len(record.refused):>7}  {record.nodes_after:>5}  "
            f"{record.seconds:>7.2f}"
        )
        for reason, count in Counter(refusal.reason for refusal in record.refused).most_common():
            click.echo(f"{'':<{width}}  {count} x {reason}")
    click.echo("\nleft: " + ", ".join(f"{count} {name}" for name, count in left.items()))


def _print_refusals(records: list[PassRecord]) -> None:
    for record in records:
        click.echo(f"{record.name}: matched {record.matched}, refused {len(record.refused)}")
        for refusal in record.refused:
            click.echo(f"  {refusal.where}: {refusal.reason}")
