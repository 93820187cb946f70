"""What a page says, as a parser sees it."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "path", "circle", "rect"}
OUTSIDE = re.compile(r"(?:https?:)?//", flags=re.IGNORECASE)


class Reading(HTMLParser):
    """Elements, their attributes and all text; complains about what is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.problems: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(f"{piece} " for piece in self.texts).split())

    def named(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def complaints(page: str) -> list[str]:
    """Return everything that makes a page unsafe, dependent on other files, or unreadable to some."""
    reading = Reading(page)
    found = list(reading.problems) + [f"<{tag}> is never closed" for tag in reading.open]
    for tag, attributes in reading.elements:
        if tag in ("script", "iframe", "object", "embed", "form", "base", "audio", "video"):
            found.append(f"<{tag}> is on the page")
        for name, value in attributes.items():
            if name.startswith("on"):
                found.append(f"<{tag} {name}> runs a script")
            if name in ("src", "href") and not value.startswith(("data:", "#")):
                found.append(f"<{tag} {name}={value[:40]}> leads outside")
            if name not in ("aria-label", "alt") and not value.startswith("data:") and OUTSIDE.search(value):
                found.append(f"<{tag} {name}={value[:40]}> names another place")
        if tag == "img":
            if not attributes.get("alt"):
                found.append("a picture has no words")
            content = base64.b64decode(attributes["src"].partition("base64,")[2])
            if not content.endswith((b"</svg>\n", b"IEND\xaeB`\x82")):
                found.append("a picture is cut off")
        if tag == "th" and attributes.get("scope") not in ("row", "col"):
            found.append("a header does not say what it heads")
    if re.search(r"url\(|@import|@font-face", page):
        found.append("the style sheet loads something")
    ids = [attributes["id"] for _, attributes in reading.elements if "id" in attributes]
    found += [f"id {name} is there twice" for name in set(ids) if ids.count(name) > 1]
    found += [f"a link leads to {a['href']}" for a in reading.named("a") if a["href"][1:] not in ids]
    return found
