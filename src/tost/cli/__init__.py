"""The `tost` command.

Each command lives in its own file, is listed in `COMMANDS`, and is imported when it is called, so that help and
mistakes answer at once.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import tost
from tost._env import NUM_THREADS
from tost._lazy import load, naming_extras
from tost._machine import is_out_of_memory, limit_threads
from tost.cli import _console
from tost.errors import CheckpointError, ConfigError, TostError

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "ls": ("tost.cli._ls:ls", "List configurations, models, data sets and more."),
    "cat": ("tost.cli._configs:cat", "Show a configuration, complete and explained."),
    "cp": ("tost.cli._configs:cp", "Copy a configuration to a file of your own."),
    "validate": ("tost.cli._configs:validate", "Check a configuration; list all problems, exit 2 if any."),
    "train": ("tost.cli._train:train", "Train a recipe."),
    "eval": ("tost.cli._eval:evaluate", "Measure a trained model on its validation set."),
    "generate": ("tost.cli._generate:generate", "Continue a text with a trained language model."),
    "analyze": ("tost.cli._analyze:analyze", "Measure and draw what the layers of a trained model do."),
    "report": ("tost.cli._look:report", "Write one HTML page about runs."),
    "explore": ("tost.cli._look:explore", "Look inside models in the browser, on this machine only."),
    "compare": ("tost.cli._look:compare", "Show runs side by side, with the settings that differ."),
    "export": ("tost.cli._export:export", "Write a model for ONNX Runtime or OpenVINO, with a runner."),
    "convert": ("tost.cli._convert:convert", "Convert weights between the authors' code and this package."),
    "info": ("tost.cli._info:info", "Show what is installed, what can run here and why not."),
    "bench": ("tost.cli._bench:app", "Measure speed and memory, if all results are right."),
    "data": ("tost.cli._data:app", "Make data sets and check them."),
}
"""By name: target and summary. A function is one command, a typer application may be several."""


def main() -> NoReturn:
    """Run the command line of this process and exit.

    The exit code is 0 for done, 1 for a failure, 2 for a mistake in the command or its configuration, and 130 for an
    interrupt.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whatever the locale is
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        limit_threads(NUM_THREADS.get())
        with naming_extras():
            typer.Typer(
                cls=_Commands,
                callback=_global_options,
                help="Token Statistics Transformers: attention from token statistics, in linear time.",
                no_args_is_help=True,
                add_completion=False,
                pretty_exceptions_enable=False,
                rich_markup_mode=None,  # boxes leave no room for the text, and help reads the same in a pipe
                context_settings={"help_option_names": ["-h", "--help"]},
            )(_plugins_first(sys.argv[1:]), prog_name="tost")
    except KeyboardInterrupt:
        _console.log("stopped at once; what was saved before is intact")
        sys.exit(130)
    except TostError as error:
        _console.log(f"{type(error).__name__}: {error}")
        sys.exit(2 if isinstance(error, ConfigError | CheckpointError) else 1)
    except (MemoryError, RuntimeError, OSError) as error:
        if is_out_of_memory(error):
            reason = str(error).partition("\n")[0] or type(error).__name__
            _console.log(f"not enough memory ({reason}); take a smaller model, shorter inputs or fewer at a time")
        elif isinstance(error, OSError):
            _console.log(f"the system refused: {error}")
        else:
            raise
        sys.exit(1)
    sys.exit(0)


class _Commands(TyperGroup):
    """Imports a command when it is called; the list of commands in the help needs none of them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # names to suggest for a mistyped one

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        found = load(COMMANDS[cmd_name][0])
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=cmd_name)
        else:
            app.command(cmd_name)(found)
        return typer.main.get_group(app).commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _plugins_first(arguments: list[str]) -> list[str]:
    """Return the arguments with every ``--plugin PACKAGE`` in front, where global options belong."""
    plugins, others = [], []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            others += [argument, *remaining]
        elif argument == "--plugin":
            plugins += [argument, *([package] if (package := next(remaining, None)) is not None else [])]
        else:
            (plugins if argument.startswith("--plugin=") else others).append(argument)
    return plugins + others


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE",
            help="Allow code of a package to be imported by name; can be repeated, also after the command.",
        ),
    ] = None,
) -> None:
    if plugin:
        from tost._plugins import allow

        allow(*plugin)


def _show_version(asked: bool) -> None:
    if asked:
        _console.show(f"tost {tost.__version__}")
        raise typer.Exit
