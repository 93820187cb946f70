"""Checks a built site: every link leads to a file and an anchor that exist, and nothing is loaded from elsewhere.

python scripts/website/links.py site
"""

from __future__ import annotations

import argparse
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["Html", "main", "problems"]

# Attributes that make a browser load something, by element.
LOADED = {("img", "src"), ("script", "src"), ("iframe", "src"), ("link", "href"), ("source", "src")}


class Html(HTMLParser):
    """The links and anchors of a page.

    Attributes:
        anchors: Identifiers that a link can lead to.
        links: What links lead to, and whether the browser loads it with the page.
    """

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element refers to, and what it is called."""
        for name, value in attrs:
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value or "")
            elif value is not None and ((tag, name) in LOADED or (tag, name) == ("a", "href")):
                self.links.append((value, (tag, name) in LOADED))


def problems(site: Path) -> list[str]:
    """Return what is wrong with the links of a site, one line each.

    Args:
        site: The folder that it was built into.
    """
    pages: dict[Path, Html] = {}
    for path in sorted(set(site.rglob("*.html")) - {site / "404.html"}):  # that one names everything from the root
        pages[path.resolve()] = page = Html()
        page.feed(path.read_text(encoding="utf-8"))
    found = []
    for path, page in pages.items():
        for link, is_loaded in page.links:
            reason = _problem(path, link, is_loaded, pages)
            if reason:
                found.append(f"{path.relative_to(site.resolve())}: {link}: {reason}")
    return found


def _problem(path: Path, link: str, is_loaded: bool, pages: dict[Path, Html]) -> str | None:
    parts = urlsplit(link)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        return "loaded from another site" if is_loaded else None
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "there is no such file"
    fragment = unquote(parts.fragment)
    if fragment and target in pages and fragment not in pages[target].anchors and not fragment.startswith("__"):
        return "there is no such anchor"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="folder of the built site")
    site = parser.parse_args(arguments).site
    found = problems(site)
    for line in found:
        sys.stdout.write(f"{line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
