"""``specexport compare``."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from specexport.exporter.compare import Comparison
    from specexport.runtime.pair import Pair

_PATH = click.Path(path_type=pathlib.Path)


@click.command()
@click.argument("bundle", type=_PATH)
@click.option("--reference", metavar="MODEL", help="Compare with this model.  [default: what it was built from]")
@click.option("--draft-reference", metavar="MODEL", help="The same for a draft that is another model.")
@click.option("--text", type=_PATH, metavar="FILE", help="A text file.  [default: a text that ships]")
@click.option(
    "--prompts",
    type=_PATH,
    metavar="FILE.jsonl",
    help="Prompts, one JSON object a line with prompt, turns, messages or text.",
)
@click.option("--tokens", type=click.IntRange(min=2), help="Tokens in all.  [default: the whole text]")
@click.option("--window", type=click.IntRange(min=2), help="Tokens a window.  [default: 1024, or the context]")
@click.option(
    "--fail-if", multiple=True, metavar="GATE", help="A gate, as 'kl_mean>0.004' or 'draft.top1_agreement<95%'."
)
@click.option("--per-layer", is_flag=True, help="Compare the output of every decoder layer as well.")
@click.option("--full", is_flag=True, help="Every token through all three paths, not only a part.")
@click.option("--path-tokens", type=click.IntRange(min=1), default=256, show_default=True,
              help="Tokens through the other two paths, without --full.")  # fmt: skip
@click.option("--generate-prompts", type=click.IntRange(min=0), default=4, show_default=True,
              help="Prompts to continue greedily.")  # fmt: skip
@click.option("-n", "--max-new-tokens", type=click.IntRange(min=0), default=64, show_default=True,
              help="Ids to generate for each.")  # fmt: skip
@click.option("--tie-margin", type=click.FloatRange(min=0), default=0.5, show_default=True,
              help="Another top id is a tie where the reference's two best logits are closer than this.")  # fmt: skip
@click.option("--num-threads", type=click.IntRange(min=1), help="Threads of both sides.  [default: all allowed]")
@click.option("--cache-dir", type=_PATH, help="Where downloads are kept.")
@click.option("--offline", is_flag=True, help="Use what is cached; download nothing.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the reference.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--report", type=_PATH, metavar="PATH", help="HTML page, JSON beside it.  [default: in BUNDLE/report]")
@click.option("--no-report", is_flag=True, help="Write no files.")
def compare(
    bundle: pathlib.Path,
    reference: str | None,
    draft_reference: str | None,
    text: pathlib.Path | None,
    prompts: pathlib.Path | None,
    tokens: int | None,
    window: int | None,
    fail_if: tuple[str, ...],
    generate_prompts: int,
    num_threads: int | None,
    as_json: bool,
    report: pathlib.Path | None,
    no_report: bool,
    cache_dir: pathlib.Path | None,
    offline: bool,
    trust_remote_code: bool,
    **options: Any,
) -> None:
    """Measure the exported models of BUNDLE against fp32 eager: distributions, paths, and generated ids.

    Exits 1 when a gate fails, or when logits are not finite, paths disagree, or speculation changes what is generated.
    """
    from specexport.exporter.compare import CompareOptions, compare_pair
    from specexport.exporter.compare_table import render_table
    from specexport.exporter.compare_text import load_text
    from specexport.exporter.gates import check_gates, parse_gate
    from specexport.exporter.progress import console_progress
    from specexport.runtime import load

    if report is not None and no_report:
        raise click.UsageError("--report and --no-report contradict each other")
    gates = [parse_gate(gate) for gate in fail_if]
    chosen = CompareOptions(**options)
    pair = load(bundle, num_threads=num_threads, allow_failed=True)
    assert pair.manifest is not None
    engine = pair.manifest.draft.engine if pair.manifest.draft is not None else None
    check_gates(gates, has_draft=engine is not None)
    content = load_text(
        pair.tokenizer,
        text=text,
        prompts=prompts,
        window=window or min(1024, pair.target.context_length),
        tokens=tokens,
        bos_token_id=pair.manifest.tokens.bos_token_id,
        generation_prompts=generate_prompts,
    )
    progress = console_progress()
    fetch = {"cache_dir": cache_dir, "offline": offline, "trust_remote_code": trust_remote_code}
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)
    with progress.stage("Loading the reference"):
        model, name = _reference(pair, "target", reference, fetch)
        draft_model = None
        if pair.manifest.draft is not None and pair.manifest.draft.kind == "model":
            draft_model, _ = _reference(pair, "draft", draft_reference, fetch)
    comparison = compare_pair(
        pair, model, content, chosen, draft_reference=draft_model, reference_name=name, progress=progress
    ).with_gates(gates)
    if not no_report:
        _write_report(comparison, bundle, report, pair)
    click.echo(json.dumps(comparison.to_json(), indent=2) if as_json else render_table(comparison))
    if not comparison.passed:
        for problem in (*comparison.faults, *map(str, comparison.failed_gates)):
            click.echo(f"Error: {problem}", err=True)
        raise click.exceptions.Exit(1)


def _reference(pair: Pair, role: str, asked: str | None, fetch: dict[str, Any]) -> tuple[Any, str]:
    """The loaded reference of target or draft, and its name."""
    from specexport.exporter.compare_source import built_from, load
    from specexport.exporter.source import resolve

    manifest = pair.manifest
    assert manifest is not None
    if asked is not None:
        source = resolve(asked, **fetch)
    elif role == "target":
        source = built_from(manifest.target.model, manifest.build.get("model"), **fetch)
    else:
        assert manifest.draft is not None and manifest.draft.engine is not None
        source = built_from(manifest.draft.engine.model, manifest.build.get("draft"), **fetch)
    return load(source), str(source)


def _write_report(comparison: Comparison, bundle: pathlib.Path, report: pathlib.Path | None, pair: Pair) -> None:
    """Write the page and its JSON, into the bundle unless told otherwise."""
    from specexport.exporter.report import write_report
    from specexport.plugins.errors import InputError

    page = report if report is not None else bundle / "report" / "compare.html"
    assert pair.manifest is not None
    hashed = {(bundle / name).absolute() for name in pair.manifest.files}
    if not hashed.isdisjoint((page.absolute(), page.with_suffix(".json").absolute())):
        click.echo(f"{page} is among the files that the manifest vouches for; --report PATH writes elsewhere", err=True)
        return
    try:
        write_report(comparison.to_json(), page, title=f"{bundle.absolute().name} against eager")
    except OSError as error:
        raise InputError(f"{page} cannot be written: {error.strerror}; give another --report or --no-report") from error
    click.echo(f"report: {page}", err=True)
