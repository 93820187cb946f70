"""Measures how long the page of `tost explore` takes to answer, in Chromium.

python scripts/measure_explore.py --out results/explore.json

Needs what `make browser` installs. Times are of a person in front of the page: from the command to the first coloured
text, from a keystroke to the new colours on the screen, from a click on a sample to its maps.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import Page, sync_playwright

from tost._io import write_json
from tost._machine import source_revision

TOKENS, REPEATS = 500, 15
PROMISED = {"first_text": 10.0, "keystroke": 0.15, "image_maps": 1.0}
"""Seconds that the documentation promises, on two cores."""

# Types a character, and waits until the page has coloured it and drawn a frame.
KEYSTROKE = """async () => {
  const input = document.getElementById("text-input");
  const count = () => document.querySelectorAll("#view-text .tokens span").length;
  const frame = () => new Promise(requestAnimationFrame);
  const wanted = count() + 1;
  const start = performance.now();
  input.value += "x";
  input.dispatchEvent(new Event("input"));
  while (count() !== wanted) await frame();
  await frame();
  return (performance.now() - start) / 1000;
}"""
# Takes a sample, and waits until its map is another and a frame is drawn.
SAMPLE = """async (name) => {
  const frame = () => new Promise(requestAnimationFrame);
  const before = document.querySelector("#map svg");
  const start = performance.now();
  document.querySelector(`[aria-label="sample ${name}"]`).click();
  while (document.querySelector("#map svg") === before) await frame();
  await frame();
  return (performance.now() - start) / 1000;
}"""


def measure(page: Page, started: float, address: str) -> dict[str, list[float]]:
    """Return the times of everything, in seconds."""
    page.goto(address)
    page.wait_for_selector("#view-text .tokens span")
    found = {"first_text": [time.perf_counter() - started]}
    page.fill("#text-input", ("def f(x):\n    return x + 1\n" * TOKENS)[: TOKENS - REPEATS - 1])
    page.wait_for_function(f"document.querySelectorAll('#view-text .tokens span').length === {TOKENS - REPEATS - 1}")
    page.wait_for_selector("#memory svg")
    page.evaluate(KEYSTROKE)
    found["keystroke"] = []
    for _ in range(REPEATS):
        page.wait_for_timeout(300)  # people type slower than that
        found["keystroke"].append(page.evaluate(KEYSTROKE))
    page.click("#tab-image")
    page.wait_for_selector("#map svg")
    found["image_maps"] = [page.evaluate(SAMPLE, str(digit)) for digit in range(10)]
    return found


def main() -> None:
    """Start the server and the browser, measure, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("needs Chromium: apt install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(bypass_csp=True).new_page()  # the driver waits by evaluating strings
        started = time.perf_counter()
        server = subprocess.Popen([sys.executable, "-m", "tost.cli", "explore"], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            times = measure(page, started, server.stdout.readline().strip())
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
        browser.close()
    found: dict[str, Any] = {
        name: {
            "median_seconds": round(median(values), 4),
            "slowest_seconds": round(max(values), 4),
            "repeats": len(values),
            "promised_seconds": PROMISED[name],
        }
        for name, values in times.items()
    }
    for name, values in found.items():
        print(f"{name}: {values['median_seconds']:.3f} s (promised: {values['promised_seconds']} s)")
    write_json(out, {"tokens": TOKENS, "revision": source_revision(), "times": found})


if __name__ == "__main__":
    main()
