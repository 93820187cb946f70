"""The `tost` command.

Each command lives in its own file and imports torch only when it runs, so that help and mistakes answer at once.
`_build` holds the one list of commands.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

import tost
from tost.cli import (
    _analyze,
    _bench,
    _cat,
    _console,
    _convert,
    _cp,
    _data,
    _eval,
    _generate,
    _info,
    _ls,
    _report,
    _sweep,
    _train,
    _validate,
)
from tost.errors import CheckpointError, ConfigError, TostError

__all__ = ["main"]

# Packages that only some commands need, with the extra that installs them.
_EXTRAS = {
    "accelerate": "train",
    "torchdata": "train",
    "sklearn": "train",
    "datasets": "train",
    "matplotlib": "analysis",
    "timm": "vision",
    "torchvision": "vision",
    "PIL": "vision",
    "pyarrow": "vision",
    "scipy": "train",
    "transformers": "language",
    "tokenizers": "language",
}


def main() -> NoReturn:
    """Run the command line of this process and exit.

    The exit code is 0 for done, 1 for a failure, 2 for a mistake in the command or its configuration, and 130 for an
    interrupt.
    """
    try:
        _build()(prog_name="tost")
    except KeyboardInterrupt:
        _console.log("stopped at once; what was saved before is intact")
        sys.exit(130)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        extra = _EXTRAS[package]
        _console.log(f"this needs the package {package}, which is not installed; run: pip install 'tost[{extra}]'")
        sys.exit(1)
    except TostError as error:
        _console.log(f"{type(error).__name__}: {error}")
        sys.exit(2 if isinstance(error, ConfigError | CheckpointError) else 1)
    sys.exit(0)


def _build() -> typer.Typer:
    app = typer.Typer(
        help="Token Statistics Transformers: attention from token statistics, in linear time.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # boxes leave no room for the text, and help reads the same in a pipe
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    app.command("ls")(_ls.ls)
    app.command("cat")(_cat.cat)
    app.command("cp")(_cp.cp)
    app.command("validate")(_validate.validate)
    app.command("train")(_train.train)
    app.command("sweep")(_sweep.sweep)
    app.command("eval")(_eval.evaluate)
    app.command("generate")(_generate.generate)
    app.command("analyze")(_analyze.analyze)
    app.command("report")(_report.report)
    app.command("convert")(_convert.convert)
    app.command("info")(_info.info)
    app.add_typer(_bench.app, name="bench")
    app.add_typer(_data.app, name="data")
    return app


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _show_version(asked: bool) -> None:
    if asked:
        _console.show(f"tost {tost.__version__}")
        raise typer.Exit
