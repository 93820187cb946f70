"""Executes the tutorials in docs/tutorials and sets them as pages.

A tutorial is a Python file in the percent format, which Jupyter opens as a notebook. Building the site runs it; what it
printed and drew is in the page, and the page offers the notebook.
"""

from __future__ import annotations

import base64
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from kept import kept
from latex2mathml.converter import convert
from nbclient import NotebookClient

__all__ = ["execute", "page", "pages", "read", "with_mathml"]

SECONDS = 300
ALT = "What the cell above draws"
INLINE = re.compile(r'<img src="data:image/png;base64,([^"]+)">')
MATH = re.compile(r"\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+)\$", re.DOTALL)


def read(path: Path) -> Any:
    """Return a tutorial as a notebook that has not run."""
    return jupytext.read(path, fmt="py:percent")


def execute(path: Path) -> Any:
    """Run a tutorial in an empty folder and return it as a notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed; the message has the cell and the traceback.
    """
    notebook = read(path)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # where `tost` is
        environment = {**os.environ, "PATH": path, "IPYTHONDIR": f"{folder}/.ipython", "OMP_NUM_THREADS": "1"}
        environment |= {"TERM": "dumb", "NO_COLOR": "1"}  # commands print lines, not bars
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            startup_timeout=SECONDS,
            extra_arguments=["--log-level=ERROR"],
        )
        started = time.perf_counter()
        client.execute(env=environment)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["seconds"] = round(time.perf_counter() - started)
    return notebook


def pages(path: Path) -> dict[str, bytes]:
    """Return the files of the site that one tutorial makes, by name: page, pictures, notebook.

    Args:
        path: The script.
    """
    notebook = nbformat.reads(kept(path, lambda: nbformat.writes(execute(path))), as_version=4)
    text, pictures = page(notebook, path.stem)
    return {f"{path.stem}.md": text.encode(), f"{path.stem}.ipynb": nbformat.writes(notebook).encode(), **pictures}


def page(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by the name of their file.

    Args:
        notebook: The executed notebook.
        name: Beginning of the names of the files.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(with_mathml(cell.source))
            if len(parts) == 1:
                parts.append(
                    f"*This page is a notebook, run in {notebook.metadata['seconds']} s on one core when the site was "
                    f"built. [Download it]({name}.ipynb).*{{ .tutorial-note }}"
                )
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in _joined(cell.outputs):
            parts.append(_shown(output, name, pictures))
    return "\n\n".join(part for part in parts if part) + "\n", pictures


def _joined(outputs: list[Any]) -> list[Any]:
    """Return outputs with what was printed in pieces as one."""
    found: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and found and found[-1].output_type == "stream":
            found[-1] = nbformat.v4.new_output("stream", name="stdout", text=found[-1].text + output.text)
        else:
            found.append(output)
    return found


def _shown(output: Any, name: str, pictures: dict[str, bytes]) -> str:
    """Return one output of a cell as Markdown; a picture is added to the others."""
    if output.output_type == "stream":
        return _as_text(output.text)

    def add(picture: str) -> str:
        file = f"{name}-{len(pictures) + 1}.png"
        pictures[file] = base64.b64decode(picture)
        return file

    data = output.data
    if "image/png" in data:
        return f"![{ALT}]({add(data['image/png'])}){{ .tutorial-picture }}"
    if "text/html" in data:
        shown = INLINE.sub(lambda found: f'<img alt="{ALT}" src="{add(found[1])}">', data["text/html"])
        return f'<div class="tutorial-output">{shown}</div>'
    return _as_text(data["text/plain"])


def _as_text(text: str) -> str:
    return f"```{{ .text .tutorial-text }}\n{text.rstrip()}\n```"


def with_mathml(text: str) -> str:
    """Return Markdown with its equations, LaTeX between dollars, as MathML, which browsers draw themselves."""

    def drawn(found: re.Match[str]) -> str:
        block = found["block"]
        return convert((block or found["inline"]).strip(), display="block" if block else "inline")

    return MATH.sub(drawn, text)
