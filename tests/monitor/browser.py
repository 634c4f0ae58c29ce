"""Chromium without a window, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Browser:
    """One page in Chromium; what it says on its console is kept.

    Attributes:
        errors: What went wrong in the page: exceptions, errors on the console, dialogs.
    """

    def __init__(self) -> None:
        assert CHROMIUM is not None, "there is no Chromium: apt-get install chromium"
        self.errors: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="dp-browser")
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # Its numbers are fixed: it reads from 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *_OPTIONS, f"--user-data-dir={self._profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(timeout=10)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and wait for its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 30
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "Chromium has gone"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._keep_errors(message)
        return message

    def _keep_errors(self, message: dict[str, Any]) -> None:
        event, data = message.get("method"), message.get("params", {})
        if event == "Runtime.exceptionThrown":
            self.errors.append(str(data["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and data["type"] in ("error", "warning"):
            self.errors.append(str(data["args"]))
        elif event == "Log.entryAdded" and data["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{data['entry']['text']} {data['entry'].get('url', '')}")
        elif event == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {data['message']}")

    def open(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)

    def tell(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, (expression, answer)
        return answer["result"].get("value")

    def wait(self, expression: str, timeout: float = 15.0) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + timeout
        while not self.tell(expression):
            if time.monotonic() > deadline:
                shown = self.tell("document.body?.innerText ?? ''")
                raise AssertionError(f"never true: {expression}; the page:\n{shown}")
            # Lets the page go on; also reads what it has to say.
            self.tell("new Promise((done) => setTimeout(done, 20))")

    def resize(self, width: int, height: int, theme: str = "dark", scale: float = 1.0) -> None:
        """Give the page another size and theme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        """Write the whole page to a PNG file."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        picture = self.call(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
        )
        path.write_bytes(base64.b64decode(picture["data"]))
