"""The command line: a group whose commands are imported only when they run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import click

from specexport.plugins.errors import SpecexportError

COMMANDS = {
    "build": ("specexport.exporter.cli_build:build", "Make a pair bundle from a model."),
    "compare": ("specexport.exporter.cli_compare:compare", "Measure a bundle against the eager model."),
    "bench": ("specexport.exporter.cli_bench:bench", "Measure a bundle's speed and memory on this machine."),
    "generate": ("specexport.exporter.cli_generate:generate", "Generate text from a bundle."),
    "inspect": ("specexport.exporter.cli_inspect:inspect", "Show what a bundle holds."),
    "passes": ("specexport.exporter.cli_passes:passes", "Show what the graph passes do to a model."),
}

# What the extra [export] brings; the base install runs bundles without them.
EXPORT_LIBRARIES = frozenset(
    ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "gguf", "huggingface_hub", "safetensors", "rich")
)


class LazyGroup(click.Group):
    """Lists commands from a table, so that --help and completion import none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table's own help lines."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Our errors become one line on stderr and an exit code: 2 for bad input, 1 otherwise."""
        try:
            return super().invoke(ctx)
        except SpecexportError as error:
            click.echo(f"Error: {' '.join(str(error).split())}", err=True)
            ctx.exit(error.exit_code)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in EXPORT_LIBRARIES:
                raise
            click.echo(
                f"Error: {ctx.invoked_subcommand} needs {error.name}, which is not installed; "
                "pip install 'specexport[export]'",
                err=True,
            )
            ctx.exit(2)


def _print_version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        import importlib.metadata

        try:
            version = importlib.metadata.version("specexport")
        except importlib.metadata.PackageNotFoundError:
            version = "of a source tree that is not installed"
        click.echo(f"specexport {version}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Shell completion: add 'eval \"$(_SPECEXPORT_COMPLETE=bash_source specexport)\"' to ~/.bashrc "
    "(zsh_source and fish_source for those shells).",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """Compile a Hugging Face causal language model into a matched pair of engines that decode speculatively."""


def main(arguments: Sequence[str] | None = None, *, standalone_mode: bool = True) -> None:
    """Entry point of the `specexport` script; ``arguments`` default to the process's own."""
    cli.main(arguments, prog_name="specexport", standalone_mode=standalone_mode)


if __name__ == "__main__":
    main()
