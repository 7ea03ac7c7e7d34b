"""``specexport bench``."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import click

_PATH = click.Path(path_type=pathlib.Path)
_COUNT = click.IntRange(min=1)
PARTS = ("memory", "prefill", "steps", "generation")
AGAINST = {"eager": ("eager-fp32", "eager-bf16"), "eager-fp32": ("eager-fp32",), "eager-bf16": ("eager-bf16",)}


@click.command()
@click.argument("bundle", type=_PATH)
@click.option("--context", "contexts", type=_COUNT, multiple=True, default=(128,), show_default=True,
              help="Tokens in the cache behind which steps are timed; repeatable.")  # fmt: skip
@click.option("--prompt-length", "prompt_lengths", type=_COUNT, multiple=True, default=(16, 64, 256, 1024),
              show_default=True, help="Tokens of a prompt whose prefill is timed; repeatable.")  # fmt: skip
@click.option("--prompts", type=_PATH, metavar="FILE.jsonl",
              help="One object a line: prompt, turns, messages or text, and maybe category.  [default: 12 that ship]",
              )  # fmt: skip
@click.option("--num-prompts", type=_COUNT, help="Take so many, spread over the file.  [default: all]")
@click.option("--max-prompt-tokens", type=_COUNT, default=1024, show_default=True, help="Of a longer one the last.")
@click.option("-n", "--tokens", type=click.IntRange(min=2), default=64, show_default=True, help="New tokens a prompt.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True,
              help="Rounds of prefills and generations; one more warms up.")  # fmt: skip
@click.option("--step-rounds", type=click.IntRange(min=2), default=40, show_default=True, help="Rounds of steps.")
@click.option("--num-assistant-tokens", type=click.IntRange(min=1), multiple=True,
              help="Drafted tokens a round; repeatable.  [default: the bundle's]")  # fmt: skip
@click.option("--threads", type=_COUNT, help="Threads of the kernels.  [default: all allowed]")
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="Measure this part alone; repeatable.")
@click.option("--against", type=click.Choice(tuple(AGAINST)), multiple=True,
              help="Race Transformers, eager, in the same run; eager is fp32 and bf16. Needs the extra [export].",
              )  # fmt: skip
@click.option("--cache-dir", type=_PATH, help="Where downloads of the eager model are kept.")
@click.option("--offline", is_flag=True, help="Download nothing.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the eager model.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; docs/bench.md lists the keys.")
@click.option("--report", type=_PATH, metavar="PATH", help="Write an HTML page with plots, and the JSON beside it.")
def bench(
    bundle: pathlib.Path,
    prompts: pathlib.Path | None,
    num_prompts: int | None,
    max_prompt_tokens: int,
    threads: int | None,
    only: tuple[str, ...],
    against: tuple[str, ...],
    cache_dir: pathlib.Path | None,
    offline: bool,
    trust_remote_code: bool,
    as_json: bool,
    report: pathlib.Path | None,
    **options: Any,
) -> None:
    """Measure BUNDLE on this machine: memory, prefill, steps by width and context, speculation by category.

    Whatever is compared runs in turn, and ratios are taken pair by pair. Exits 1 when speculation changes an id.
    """
    from specexport.exporter.bench import BenchOptions
    from specexport.exporter.bench import bench as run
    from specexport.exporter.bench_prompts import load_prompts
    from specexport.exporter.bench_table import render_table
    from specexport.exporter.progress import console_progress
    from specexport.runtime import load
    from specexport.runtime.native import num_threads

    chosen = BenchOptions(parts=only or PARTS, **options)
    progress = console_progress()
    pair = load(bundle, num_threads=threads, allow_failed=True)
    texts = []
    if "generation" in chosen.parts and pair.tokenizer is None:
        progress.note("this bundle has no tokenizer: nothing is generated from prompts")
    elif "generation" in chosen.parts:
        texts = load_prompts(pair.tokenizer, prompts, count=num_prompts, longest=max_prompt_tokens)
    contestants: dict[str, Any] = {}
    if against:
        from specexport.exporter.bench_eager import eager_contestants

        names = tuple(dict.fromkeys(name for choice in against for name in AGAINST[choice]))
        fetch = {"cache_dir": cache_dir, "offline": offline, "trust_remote_code": trust_remote_code}
        with progress.stage("Loading the eager model"):
            contestants = dict(eager_contestants(pair, names, num_threads(), **fetch))
    result = run(pair, bundle, texts, chosen, progress, contestants)
    if report is not None:
        from specexport.exporter.bench_report import write_report

        write_report(result, report)
    click.echo(json.dumps(result, indent=2) if as_json else render_table(result))
    different = (result["generation"] or {"different_prompts": {}})["different_prompts"]
    broken = {name: found for name, found in different.items() if found}
    if broken:
        click.echo(f"Error: speculation changes what is generated: {broken} differ from plain decoding", err=True)
        raise click.exceptions.Exit(1)
