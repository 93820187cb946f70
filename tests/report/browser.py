"""A real browser without a window, asked over a pipe what it makes of a page. No package is needed for it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["Browser", "find_browser"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may run as root, where the sandbox cannot start; the page is our own
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
MOST_SECONDS = 60


def find_browser() -> str | None:
    """Return the program of a browser of the Chromium family; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser: `open` it, look at it, and read in `complaints` and `requests` what happened."""

    def __init__(self, program: str) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        inward, to_browser = os.pipe()
        from_browser, outward = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4; the shell puts ours there.
        script = f'exec 3<&{inward} 4>&{outward}; exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(inward, outward),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(inward)
        os.close(outward)
        self._to, self._from = os.fdopen(to_browser, "wb", buffering=0), os.fdopen(from_browser, "rb", buffering=0)
        self._rest, self._number, self._session, self._loaded = b"", 0, "", False

    def __enter__(self) -> Browser:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *unused: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._to.close()
        self._from.close()
        self._folder.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, page: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Open a file in a window of a size, in a light or a dark surrounding."""
        self.complaints, self.requests = [], []
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded = False
        self.ask("Page.navigate", url=page.absolute().as_uri())
        while not self._loaded:
            self._next()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, *, whole: bool = True) -> bytes:
        """Return the page, or what of it is in the window, as PNG."""
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(taken["data"])

    def pdf(self) -> bytes:
        """Return the page as it would be printed."""
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._from.fileno(), 1 << 20)
            if not piece:
                raise RuntimeError(f"the browser ended with code {self._process.poll()}")
            self._rest += piece
        raw, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, content: dict[str, Any]) -> None:
        if method == "Log.entryAdded":
            self.complaints.append(f"{content['entry']['level']}: {content['entry']['text']}")
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(f"{method}: {json.dumps(content)[:500]}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(content["request"]["url"][:200])
        elif method == "Page.loadEventFired":
            self._loaded = True
