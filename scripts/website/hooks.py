"""What the site has that is not a file in docs: executed tutorials, and the explorer with recorded answers.

mkdocs.yml names this file; see https://www.mkdocs.org/user-guide/configuration/#hooks.
"""

from __future__ import annotations

import re

import recording
import tutorials
from kept import ROOT
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_markdown"]

ICON = ROOT / "src" / "tost" / "explore" / "static" / "icon.svg"
# On GitHub a tutorial is its script; here it is the page that was made from it.
LINK = re.compile(r"(\]\((?:(?:\.\./)?tutorials/)?\w+)\.py(?=[)#])")
MARKER = "<!-- recorded explorer -->"
EXPLORER = """\
## Try a recording

This is the page of `tost explore` without its server: the answers were recorded from the models in the box when this
site was built. Choose a layer, point at a token, let it write, look at the digits; or open it
[in a window of its own](explore-demo/index.html).

<iframe class="explore" src="explore-demo/index.html" title="Recorded page of tost explore" loading="lazy"></iframe>
"""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what is made while the site is built."""
    made: dict[str, bytes] = {"img/logo.svg": ICON.read_bytes()}
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.py")):
        made |= {f"tutorials/{name}": content for name, content in tutorials.pages(path).items()}
    made |= {f"explore-demo/{name}": content for name, content in recording.page().items()}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the script of a tutorial to its page, and put the recorded explorer where it belongs."""
    return LINK.sub(r"\1.md", markdown).replace(MARKER, EXPLORER)
