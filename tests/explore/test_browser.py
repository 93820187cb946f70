"""The page in a real browser: every view by hand, no error in the console, nothing serious for axe.

`make browser` runs this: it installs Playwright and axe-core, and needs Chromium. Pictures of what was seen are in
``build/browser``.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.explore.test_answers import picture

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: run `make browser`")

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "browser"
AXE = BUILD / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VIEWS = ("text", "image", "inside", "compare")
PATIENCE = 60  # seconds; a busy machine is slow, a broken page is slower
PHONE = {"width": 390, "height": 844}
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`tost explore` as a user starts it."""
    command = [sys.executable, "-m", "tost.cli", "explore"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    yield address, process
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def address(server) -> str:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", server[0])
    return server[0]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, address):
    """The page in a fresh browser; at the end there is nothing in its console."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    opened = context.new_page()
    complaints: list[str] = []
    opened.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(address)
    opened.wait_for_selector("html[data-ready]")
    opened.complaints = complaints
    yield opened
    context.close()
    assert not complaints


def until(page, condition):
    """Wait for a condition in JavaScript; Playwright's own way needs eval, which the page does not allow."""
    end = time.monotonic() + PATIENCE
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never came: {condition}; the page says {page.inner_text('#message')!r}"
        page.wait_for_timeout(50)


def open_view(page, name):
    page.click(f"#tab-{name}")
    ready = {"text": "#view-text .tokens span", "image": "#map svg", "inside": "#view-inside .charts svg"}
    page.wait_for_selector(ready.get(name, "#view-compare .halves .tokens span"))


def photograph(page, name):
    """Keep a picture, and make sure that it is not blank."""
    BUILD.mkdir(parents=True, exist_ok=True)
    content = page.screenshot(path=BUILD / f"{name}.png", full_page=True)
    assert len(content) > 10_000
    return content


def count_tokens(page) -> int:
    return page.locator("#view-text .tokens span").count()


def test_typing_colours_the_text(page):
    page.fill("#text-input", "import os\n" * 20)
    until(page, "document.querySelectorAll('#view-text .tokens span').length === 200")
    shares = page.eval_on_selector_all(
        "#view-text .tokens span", "all => all.map(one => one.style.getPropertyValue('--a'))"
    )
    assert all(0 < float(share) <= 1 for share in shares)
    page.check("#text-layer input[value='3']")
    page.check("#text-by input[value='surprise']")
    page.hover("#view-text .tokens span >> nth=5")
    assert "bits" in page.inner_text("#detail")
    photograph(page, "text")


def test_layers_are_watched_one_after_the_other(page):
    until(page, "document.querySelectorAll('#text-layer input').length === 4")
    page.click("#view-text >> text=Watch the groups form")
    until(page, "document.querySelector('#text-layer input:checked').value === '3'")
    assert "layer=3" in page.url


def test_generate_stop_go_back_and_go_on(page):
    page.fill("#text-input", "def main(")
    until(page, "document.querySelectorAll('#view-text .tokens span').length === 9")
    page.fill("#view-text input[type=number]", "2000")
    page.click("#generate")
    until(page, "document.querySelectorAll('#view-text .tokens span').length > 40")
    page.click("#stop")
    page.wait_for_selector("#generate:not([disabled])")
    until(page, "document.getElementById('message').textContent.includes('bits per token')")  # nothing moves any more
    stopped = count_tokens(page)
    assert 40 < stopped < 2009
    assert page.inner_text("#generate") == "Continue"
    page.click("#view-text .tokens span >> nth=29")
    page.wait_for_selector("#back:not([disabled])")
    page.wait_for_selector("#detail svg")
    page.click("#back")
    until(page, "document.querySelectorAll('#view-text .tokens span').length === 30")
    assert "saved state" in page.inner_text("#message") or "tokens" in page.inner_text("#message")
    page.fill("#view-text input[type=number]", "25")
    page.click("#generate")
    until(page, "document.querySelectorAll('#view-text .tokens span').length === 55")
    until(page, "document.getElementById('speed').textContent.includes('saved state')")
    assert "per second" in page.inner_text("#speed")
    photograph(page, "generated")


def test_generation_lays_the_text_out_once_per_frame(page):
    page.evaluate(
        """() => {
             Object.assign(window, { reads: 0, frames: 0 });
             const { get } = Object.getOwnPropertyDescriptor(Element.prototype, "scrollHeight");
             Object.defineProperty(Element.prototype, "scrollHeight",
               { get() { reads += this.className === "tokens"; return get.call(this); } });
             const next = () => { frames += 1; requestAnimationFrame(next); };
             next();
           }"""
    )
    page.fill("#view-text input[type=number]", "500")
    page.click("#generate")
    page.wait_for_selector("#speed .tiles")
    assert 0 < page.evaluate("reads") <= page.evaluate("frames")


def test_a_picture_is_dropped_and_layers_are_switched(page):
    open_view(page, "image")
    page.set_input_files("#drop input", {"name": "noise.png", "mimeType": "image/png", "buffer": picture(120, 60)})
    until(page, "document.getElementById('message').textContent.startsWith('32 x 16')")
    page.click("[aria-label='sample 3']")
    until(page, "document.getElementById('message').textContent.includes('pixels: 3')")
    before = page.inner_html("#map")
    page.check("#image-layer input[value='5']")
    assert page.inner_html("#map") != before
    for by in ("soft", "class0", "0"):
        before = page.inner_html("#map")
        page.check(f"#image-by input[value='{by}']")
        assert page.inner_html("#map") != before
    page.focus("#map svg")
    page.keyboard.press("ArrowRight")
    assert "column 1" in page.inner_text("#patch")
    photograph(page, "image")


@pytest.mark.parametrize("place", ["#drop", "footer"])
def test_a_file_is_dropped_with_the_mouse(page, place):
    if place == "#drop":  # elsewhere a picture leads to its view
        open_view(page, "image")
    data = page.evaluate_handle(
        """(bytes) => {
             const transfer = new DataTransfer();
             transfer.items.add(new File([new Uint8Array(bytes)], "wide.png", { type: "image/png" }));
             return transfer;
           }""",
        list(picture(80, 40)),
    )
    page.dispatch_event(place, "drop", {"dataTransfer": data})
    until(page, "document.getElementById('message').textContent.startsWith('32 x 16')")


def test_inside_and_compare(page):
    open_view(page, "inside")
    assert "steps from one layer to the next" in page.inner_text("#verdict")
    assert page.locator("#verdict sup").first.inner_text() == "var"
    assert page.locator("#view-inside .matrices svg").count() == 8
    photograph(page, "inside")
    open_view(page, "compare")
    assert page.locator("#view-compare .halves h3").all_inner_texts() == ["bytes-tiny", "bytes-gpt-tiny"]
    page.fill("#compare-input", "class Thing:\n    pass\n")
    until(page, "document.querySelectorAll('#view-compare .tokens span').length === 2 * 22")
    photograph(page, "compare")


def test_the_other_model_reads_the_same(page):
    open_view(page, "compare")
    left, right = (page.locator("#view-compare select").nth(i) for i in range(2))
    assert right.locator("option").all_inner_texts() == ["bytes-gpt-tiny", "bytes-tiny"]
    left.select_option("digits-tiny")
    page.wait_for_selector("#view-compare .map svg")
    assert right.locator("option").all_inner_texts() == ["digits-tiny"]
    assert page.is_hidden("#compare-input")


def test_another_text_leaves_nothing_of_the_last(page):
    page.hover("#view-text .tokens span >> nth=5")
    page.wait_for_selector("#detail svg")
    page.select_option("#view-text select", "bytes-gpt-tiny")
    until(page, "document.querySelector('#view-text .choice').closest('.row').hidden")
    assert "How surprising is each token?" in page.inner_text("#view-text .intro")
    assert "groups, one for each head" not in page.inner_text("#view-text")
    assert page.locator("#detail svg").count() == 0
    page.fill("#text-input", "")
    until(page, "document.getElementById('message').textContent === 'Type something.'")
    assert count_tokens(page) == page.locator("#memory svg").count() == 0


def test_a_link_restores_a_view(page, browser):
    page.fill("#text-input", "x = 1")
    until(page, "document.querySelectorAll('#view-text .tokens span').length === 5")
    page.check("#text-layer input[value='2']")
    page.click("#view-text >> text=Copy link")
    link = page.evaluate("navigator.clipboard.readText()")
    other = page.context.new_page()
    other.goto(link)
    other.wait_for_selector("#view-text .tokens span")
    assert other.input_value("#text-input") == "x = 1"
    assert other.is_checked("#text-layer input[value='2']")
    other.close()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ["SVG", "PNG"])
def test_pictures_are_saved(page, view, kind):
    open_view(page, view)
    with page.expect_download() as download:
        page.click(f"#view-{view} >> text=Save {kind}")
    content = Path(download.value.path()).read_bytes()
    assert content.startswith(b"<svg" if kind == "SVG" else b"\x89PNG")
    assert len(content) > 1000


@pytest.mark.parametrize("view", VIEWS)
def test_the_lines_of_python_run(page, view):
    open_view(page, view)
    page.click(f"#view-{view} summary")
    code = page.inner_text(f"#view-{view} pre")
    assert len(code.splitlines()) == 3
    exec(compile(code, view, "exec"), {})


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(page, view, theme):
    if page.get_attribute("html", "data-theme") != theme:
        page.click("#theme")
    open_view(page, view)
    check_with_axe(page)
    photograph(page, f"{view}-{theme}")


def check_with_axe(page):
    if not AXE.is_file():
        pytest.skip("needs axe-core: run `make browser`")
    # The page allows no scripts but its own, so axe comes in through the debugger.
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")
    serious = [
        f"{entry['id']} ({entry['impact']}): {entry['nodes'][0]['html'][:120]}"
        for entry in found["violations"]
        if entry["impact"] in ("serious", "critical")
    ]
    assert not serious, "\n".join(serious)


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_needs_no_scrolling_to_the_side(page, view):
    page.set_viewport_size(PHONE)
    open_view(page, view)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    photograph(page, f"{view}-phone")
    check_with_axe(page)


def test_tabs_and_tokens_answer_to_the_keyboard(page):
    page.focus("#tab-text")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#view-image:not([hidden])")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#view-text .tokens span")
    page.focus("#view-text .tokens")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#detail").startswith("Token 2")


def test_script_tags_stay_text(page):
    page.fill("#text-input", "<img src=x onerror=alert(1)><script>alert(1)</script>")
    page.on("dialog", lambda dialog: pytest.fail("a script ran"))
    until(page, "document.querySelectorAll('#view-text .tokens span').length === 53")
    assert page.locator("#view-text .tokens img, #view-text .tokens script").count() == 0


def test_mistakes_are_explained(page):
    page.fill("#text-input", "a" * 1_000_000)
    page.wait_for_selector("#message.error")
    assert "1,000,000 characters" in page.inner_text("#message")
    page.fill("#text-input", "x")
    page.wait_for_selector("#message:not(.error)")
    page.fill("#text-input", "a" * 6000)
    page.wait_for_selector("#message.error")
    assert "6,000 tokens" in page.inner_text("#message")
    open_view(page, "image")
    page.set_input_files("#drop input", {"name": "broken.png", "mimeType": "image/png", "buffer": b"no picture"})
    page.wait_for_selector("#message.error")
    assert "cannot be read as an image" in page.inner_text("#message")
    page.click("#view-image summary")
    assert "broken.png" not in page.inner_text("#view-image pre")
    page.complaints[:] = [line for line in page.complaints if "400" not in line]  # the browser logs refused requests


def test_another_site_cannot_call_it(browser, address):
    context = browser.new_context()
    stranger = context.new_page()
    stranger.goto("data:text/html,<p>another site")
    reached = stranger.evaluate("(at) => fetch(at + 'api/models').then(() => true, () => false)", address)
    assert not reached
    context.close()
    base = address.rsplit("/", 2)[0]
    for wrong in (f"{base}/", f"{base}/wrong/", f"{address[:-1]}x/"):
        with pytest.raises(HTTPError, match="403"):
            urlopen(wrong)
    with pytest.raises(HTTPError, match="403"):
        urlopen(Request(f"{address}api/models", headers={"Origin": "https://example.org"}))


def test_the_recorded_page_needs_no_server(browser, tmp_path, monkeypatch):
    """The page in the documentation, read from the disk: every view, before and after a text was generated."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "website"))
    import recording

    for name, content in recording.page().items():
        (tmp_path / name).write_bytes(content)
    context = browser.new_context()
    page = context.new_page()
    page.goto((tmp_path / "index.html").as_uri())
    page.wait_for_selector("html[data-ready]")
    for _ in range(2):
        for view in ("image", "inside", "compare", "text"):
            open_view(page, view)
            page.wait_for_timeout(500)  # what was there before may be answered anew
            assert page.locator("#message.error").count() == 0
        page.hover("#view-text .tokens span >> nth=5")
        page.wait_for_selector("#detail svg")
        if page.is_enabled("#generate") and page.inner_text("#generate") == "Generate":
            page.click("#generate")
            page.wait_for_selector("#speed .tiles")
            page.wait_for_selector("#generate:not([disabled])")
            until(page, "document.getElementById('message').textContent.includes('bits per token')")
    photograph(page, "recorded")
    context.close()


def test_ctrl_c_ends_it(server):
    """The last test: it ends the server."""
    address, process = server
    assert urlopen(address).status == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=2 * PATIENCE) == 0
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
