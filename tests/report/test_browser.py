"""The page in a real browser: nothing blank, nothing outside, nothing complained about, nothing cut off."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests.report.browser import Browser, find_browser
from tests.report.folders import write_bench, write_run
from tost.report import Content, Finding, Insight, Passage, read_bench, read_runs, render

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(
    PROGRAM is None,
    reason="no browser: install Chromium (Debian: apt-get install chromium) to see the page as a reader does",
)
SIZES = {"desktop": (1280, "light"), "dark": (1280, "dark"), "phone": (360, "light")}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    runs = read_runs([write_run(folder / "tost-of-a-rather-long-name"), write_run(folder / "vit", accuracy=0.8)])
    buffer = io.BytesIO()
    Image.new("RGB", (1400, 300), "purple").save(buffer, format="PNG")
    finding = Finding(
        "heads", {"usage": "0.5"}, [{"layer": 0, "usage": 0.5}], buffer.getvalue(), "png", "All are used."
    )
    bench = read_bench(write_bench(folder / "bench.json"))
    texts = {runs[0].name: [Passage("def ", "f(x):\n    return x" + "y" * 300, 18, 0.5, "seed 0")]}
    file = folder / "page.html"
    file.write_text(render(Content(runs, [bench], [Insight(runs[0].name, "", (finding,))], texts)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser():
    with Browser(PROGRAM) as browser:
        yield browser


def colours(picture: bytes) -> np.ndarray:
    """One number per pixel: 0xRRGGBB."""
    seen = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(np.int32)
    return seen[..., 0] << 16 | seen[..., 1] << 8 | seen[..., 2]


@pytest.mark.parametrize("size", SIZES)
def test_page_is_whole_in_a_browser(browser, page, size):
    width, scheme = SIZES[size]
    browser.open(page, width=width, scheme=scheme)
    seen = colours(browser.screenshot())
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.as_uri()]
    # Everything is there: the picture in its colour, much text, and no more paper than there should be.
    assert (seen == 0x800080).mean() > 0.005
    assert len(np.unique(seen)) > 50
    paper = seen[5, 5]
    assert (paper < 0x404040) == (scheme == "dark")
    assert 0.02 < (seen != paper).mean() < 0.9
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
    assert browser.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")


def test_text_can_be_read_against_its_background(browser, page):
    """Contrast of every text by the formula of WCAG 2; 4.5 is what it asks for."""
    for scheme in ("light", "dark"):
        browser.open(page, scheme=scheme)
        assert browser.evaluate(CONTRAST) == [], scheme


def test_page_prints(browser, page):
    browser.open(page)
    assert browser.pdf().startswith(b"%PDF")


def test_the_policy_of_the_page_forbids_scripts_and_the_network(browser, page, tmp_path):
    """Even if something slipped into the page, the browser would not obey it."""
    spoilt = tmp_path / "spoilt.html"
    extra = '<script>document.title = "taken over"</script><img src="http://localhost:9/x.png" alt="x">'
    spoilt.write_text(page.read_text(encoding="utf-8").replace("</main>", f"{extra}</main>"), encoding="utf-8")
    browser.open(spoilt)
    assert browser.evaluate("document.title").startswith("Report on")
    assert browser.complaints, "the browser says that it refused"


CONTRAST = """(() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const e = node.parentElement, style = getComputedStyle(e);
    if (!node.data.trim() || !e.checkVisibility()) continue;
    const ink = parse(e instanceof SVGElement ? style.fill : style.color), paper = behind(e);
    const [a, b] = [light(ink), light(paper)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push(e.tagName + ': ' + node.data.slice(0, 40));
  }
  return found; })()"""
