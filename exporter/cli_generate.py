"""`specexport generate`: text from a bundle, streamed."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from specexport.runtime.generate import Output


@click.command()
@click.argument("bundle", type=click.Path(path_type=pathlib.Path))
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Render the prompt as a user message through the chat template.")
@click.option("--system", metavar="TEXT", help="A system message before it; implies --chat.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(min=0), help="Tokens at most.  [default: 256]")
@click.option("--do-sample/--greedy", default=None, help="Sample, or take the likeliest token.")
@click.option("--temperature", type=float, help="Above 0; with --do-sample, like the next three.")
@click.option("--top-k", type=click.IntRange(min=0), help="0: no limit.")
@click.option("--top-p", type=float, help="Above 0, at most 1.")
@click.option("--min-p", type=float, help="From 0 to 1.")
@click.option("--repetition-penalty", type=float, help="Above 1 discourages tokens that were there before.")
@click.option("--seed", type=click.IntRange(min=0), help="Fixes what is sampled.  [default: random]")
@click.option("--num-assistant-tokens", type=click.IntRange(min=0), help="Drafted tokens per step.")
@click.option("--no-speculation", is_flag=True, help="Decode plainly: --num-assistant-tokens 0.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token.")
@click.option("--num-threads", type=click.IntRange(min=1), help="Threads of the kernels.  [default: all allowed]")
@click.option("--no-verify", is_flag=True, help="Do not hash the bundle's files first.")
@click.option("--allow-failed", is_flag=True, help="Run a bundle whose accuracy gate failed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with text, token ids and metrics; no streaming.")
def generate(
    bundle: pathlib.Path,
    prompt: str,
    chat: bool,
    system: str | None,
    no_speculation: bool,
    num_assistant_tokens: int | None,
    stop: Sequence[str],
    num_threads: int | None,
    no_verify: bool,
    allow_failed: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue PROMPT ("-": standard input) with the models of BUNDLE, and print a line of metrics on stderr.

    What is not given comes from the model's generation_config.json.
    """
    from specexport.runtime import load

    if no_speculation:
        if num_assistant_tokens:
            raise click.UsageError("--no-speculation and --num-assistant-tokens contradict each other")
        num_assistant_tokens = 0
    text = sys.stdin.read() if prompt == "-" else prompt
    pair = load(bundle, num_threads=num_threads, verify=not no_verify, allow_failed=allow_failed)
    messages = [{"role": "system", "content": system}] if system is not None else []
    output = pair.generate(
        [*messages, {"role": "user", "content": text}] if chat or messages else text,
        num_assistant_tokens=num_assistant_tokens,
        stop=list(stop),
        stream=None if as_json else _write,
        **options,
    )
    if as_json:
        click.echo(json.dumps(output.to_json(), ensure_ascii=False))
        return
    click.echo()
    click.echo(_summary(output), err=True)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _summary(output: Output) -> str:
    """The metrics that a person wants, in one line."""
    m = output.metrics
    parts = [f"{m.new_tokens} tokens ({output.finish_reason})", f"prefill {m.prompt_tokens} in {m.prefill_s:.2f} s"]
    if m.steps:
        parts.append(f"{m.tokens_per_second:.1f} tok/s")
    if m.drafted:
        parts.append(f"{m.tokens_per_step:.2f} tokens per verify")
        parts.append(f"{m.accepted} of {m.drafted} drafted accepted ({m.acceptance:.0%})")
    return " · ".join(parts)
