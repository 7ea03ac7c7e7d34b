"""``specexport build``."""

from __future__ import annotations

import json
import pathlib
import signal
import types

import click

from specexport.exporter.config import CACHE_DTYPES, WEIGHT_GROUPS, WEIGHTS, BuildConfig


@click.command()
@click.argument("model")
@click.option(
    "-o", "--output", type=click.Path(path_type=pathlib.Path), help="Bundle directory [default: MODEL's name]."
)
@click.option("--draft", help="none, ngram, layers:N, or another model [default: the recipe's, else ngram].")
@click.option("--weights", type=click.Choice(WEIGHTS), default="auto", show_default=True,
              help="auto: exactly as the source holds them where it is quantized, int8 elsewhere.")  # fmt: skip
@click.option("--group-size", type=click.Choice(list(map(str, WEIGHT_GROUPS))), default="32", show_default=True,
              help="Input channels that share one scale, where weights are quantized here.")  # fmt: skip
@click.option("--activations", default="int8", show_default=True, metavar="int8|int16|fp32|auto[:KL]",
              help="Inside the kernels. int16: about 15 bits, as fast for single tokens. auto:KL: int16 where int8 is "
              "measured to cost accuracy, so that its mean KL stays under KL [0.0005].")  # fmt: skip
@click.option("--kv-cache-dtype", type=click.Choice(CACHE_DTYPES),
              help="Keys and values alike; auto (default): int8 with int8 activations, else f16.")  # fmt: skip
@click.option("--key-cache-dtype", type=click.Choice(CACHE_DTYPES), help="Keys alone.")
@click.option("--value-cache-dtype", type=click.Choice(CACHE_DTYPES), help="Values alone.")
@click.option("--kv-group-size", type=int, help="Channels that share one cache scale [default: 64 if the head allows].")
@click.option("--context-length", type=int, help="Hard maximum of positions [default: the model's, at most 8192].")
@click.option("--num-assistant-tokens", type=int, default=4, show_default=True, help="Tokens to draft a round.")
@click.option(
    "--compare-tokens", type=int, default=1024, show_default=True, help="Tokens of the closing comparison; 0: none."
)
@click.option(
    "--fail-if", multiple=True, metavar="GATE", help="A gate of that comparison, as 'kl_mean>0.004'; repeatable."
)
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--cache-dir", type=click.Path(path_type=pathlib.Path), help="Where downloads are kept.")
@click.option("--offline", is_flag=True, help="Use what is cached; download nothing.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there.")
@click.option(
    "--dump-passes", type=click.Path(path_type=pathlib.Path), help="Write a diff of the graph for each pass here."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def build(
    model: str,
    output: pathlib.Path | None,
    group_size: str,
    kv_cache_dtype: str | None,
    key_cache_dtype: str | None,
    value_cache_dtype: str | None,
    as_json: bool,
    **options: object,
) -> None:
    """Make a pair bundle from MODEL: a hub id, a local directory, a GGUF file or a recipe name.

    Exits 1 when the closing comparison fails a gate; the bundle is then kept, marked, and refused by the runtime
    unless told otherwise.
    """
    config = BuildConfig(
        model=model,
        output=output or pathlib.Path(pathlib.PurePath(model).stem + "-pair"),
        group_size=int(group_size),
        key_cache_dtype=key_cache_dtype or kv_cache_dtype,
        value_cache_dtype=value_cache_dtype or kv_cache_dtype,
        **options,  # type: ignore[arg-type]
    )
    signal.signal(signal.SIGTERM, _interrupt)
    from specexport.exporter.pipeline import build as run
    from specexport.exporter.progress import console_progress

    result = run(config, console_progress())
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, sort_keys=True))
    else:
        click.echo(result.summary())
    if not result.passed:
        raise click.exceptions.Exit(1)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    """End on SIGTERM as on Ctrl-C, so that the half-written bundle is removed."""
    raise KeyboardInterrupt
