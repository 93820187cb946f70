"""Measures how long the page of `tost explore` takes to answer, in Chromium.

python scripts/measure_explore.py --out results/explore.json --picture docs/img/explore.png
python scripts/update_explore.py

Needs what `make browser` installs. The picture is the one of README and front page. Times are of a person in front of
the page: from the command to the first coloured text, from a keystroke to the new colours on the screen, from a click
on a sample to its maps. Beside them is the processor time of the server for all that it was asked for, which other jobs
on the machine change little (Linux only).
"""

from __future__ import annotations

import argparse
import os
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
from tost.bench.harness import describe_environment

TOKENS, REPEATS = 500, 15
PROMISED = {"first_text": 10.0, "keystroke": 0.15, "image_maps": 1.0}
"""Seconds that the documentation promises, on two cores."""

SHOWN = '''"""Arithmetic means."""

import math


def mean(values, *, default=math.nan):
    """Return the arithmetic mean of some values."""
    if not values:
        return default
    return math.fsum(values) / len(values)


def weighted(values, weights):
    """Return the mean of values that count differently."""
    return math.sumprod(values, weights) / math.fsum(weights)
'''
"""The text in the picture."""

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


def processor_seconds(process: int) -> float:
    """Return the processor time that a process has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(page: Page, started: float, address: str, server: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the times of everything in seconds, and the processor time of the server for one of each."""
    used = {"first_text": 0.0}
    page.goto(address)
    page.wait_for_selector("#view-text .tokens span")
    found = {"first_text": [time.perf_counter() - started]}
    used["first_text"] = processor_seconds(server)
    page.fill("#text-input", ("def f(x):\n    return x + 1\n" * TOKENS)[: TOKENS - REPEATS - 1])
    page.wait_for_function(f"document.querySelectorAll('#view-text .tokens span').length === {TOKENS - REPEATS - 1}")
    page.wait_for_selector("#memory svg")
    page.evaluate(KEYSTROKE)
    found["keystroke"], before = [], processor_seconds(server)
    for _ in range(REPEATS):
        page.wait_for_timeout(300)  # people type slower than that
        found["keystroke"].append(page.evaluate(KEYSTROKE))
    used["keystroke"] = (processor_seconds(server) - before) / REPEATS
    page.click("#tab-image")
    page.wait_for_selector("#map svg")
    before = processor_seconds(server)
    found["image_maps"] = [page.evaluate(SAMPLE, str(digit)) for digit in range(10)]
    used["image_maps"] = (processor_seconds(server) - before) / 10
    return found, used


def draw(page: Page, address: str, path: Path) -> None:
    """Save a picture of a text with one token chosen, as a newcomer may see it after a minute."""
    page.goto(address)
    page.fill("#text-input", SHOWN)
    page.wait_for_function(f"document.querySelectorAll('#view-text .tokens span').length === {len(SHOWN)}")
    page.click(f"#view-text .tokens span >> nth={SHOWN.index('default=')}")
    page.wait_for_selector("#detail svg")
    page.wait_for_selector("#memory svg")
    page.evaluate("scrollTo(0, 0)")
    page.mouse.move(0, 0)
    page.screenshot(path=path)


def main() -> None:
    """Start the server and the browser, measure, write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the times are stored")
    parser.add_argument("--picture", type=Path, help="where a picture of the page is saved")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("needs Chromium: apt install chromium")
    environment = describe_environment()  # before there is any load of this script's own
    times: dict[str, list[float]] = {}
    used: dict[str, float] = {}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        # The driver waits by evaluating strings, which the page's policy does not allow.
        page = browser.new_context(bypass_csp=True, viewport={"width": 1280, "height": 940}).new_page()
        page.set_default_timeout(120_000)  # milliseconds; a busy machine is slow
        started = time.perf_counter()
        server = subprocess.Popen([sys.executable, "-m", "tost.cli", "explore"], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            if options.out is not None:
                times, used = measure(page, started, address, server.pid)
            if options.picture is not None:
                draw(page, address, options.picture)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
        browser.close()
    found: dict[str, Any] = {
        name: {
            "median_seconds": round(median(values), 4),
            "slowest_seconds": round(max(values), 4),
            "server_seconds": round(used[name], 4),
            "repeats": len(values),
            "promised_seconds": PROMISED[name],
        }
        for name, values in times.items()
    }
    for name, values in found.items():
        print(name, values)
    if options.out is not None:
        write_json(options.out, {"tokens": TOKENS, "environment": environment, "times": found})


if __name__ == "__main__":
    main()
