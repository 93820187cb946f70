"""`tost explore`: look inside models in the browser."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from tost.cli import _console


def explore(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|CKPT|MODEL",
            help="Run folders, checkpoints, model folders, or names of `tost ls pretrained`.",
            show_default="all models in the box",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.", show_default="a free one")] = 0,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Look inside models: type a text, drop a picture, compare. Ctrl-C ends it.

    The page is served to this machine only, at a random address, and needs no network.
    """
    from tost.explore import open_models, serve

    def ready(address: str) -> None:
        _console.log(f"{', '.join(models)}; Ctrl-C ends it")
        _console.show(address)
        if open_page:
            webbrowser.open(address)

    models = open_models(sources or [])
    try:
        serve(models, port=port, ready=ready)
    except KeyboardInterrupt:
        _console.log("ended")
