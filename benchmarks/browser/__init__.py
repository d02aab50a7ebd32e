"""A real browser that a test or a benchmark drives: headless Chromium by its DevTools protocol."""

import json
import shutil
import subprocess
import tempfile
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
ALONE = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
]
"""A browser without a window that asks nothing of its maker."""
FLAGS = [*ALONE, "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-port=0"]
PATIENCE = 60.0
"""Seconds to wait for anything."""


class Page:
    """An open page."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._number = connection, 0
        self.problems: list[str] = []
        """What the page wrote to its console as an error, and what it did not catch."""
        self.loaded: dict[str, int] = {}
        """Bytes that came over the network, by address."""
        self._addresses: dict[str, str] = {}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=PATIENCE))
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, of = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(of["exceptionDetails"])[:600])
        elif method == "Log.entryAdded" and of["entry"]["level"] == "error":
            self.problems.append(f"{of['entry']['text']} {of['entry'].get('url', '')}")
        elif method == "Network.responseReceived":
            self._addresses[of["requestId"]] = of["response"]["url"]
        elif method == "Network.loadingFinished" and of["requestId"] in self._addresses:
            address = self._addresses[of["requestId"]]
            self.loaded[address] = self.loaded.get(address, 0) + int(of["encodedDataLength"])

    def open(self, address: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Go to an address in a window of this size."""
        phone = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.run(f"Boolean({condition})"):
                return
            time.sleep(0.05)
        raise TimeoutError(f"{condition} is not true after {PATIENCE:g} s; the page said {self.problems}")

    def press(self, key: str, code: int) -> None:
        """A key down and up."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(b64decode(found["data"]))


@contextmanager
def chromium() -> Iterator[Page]:
    """A page of a fresh browser."""
    from websockets.sync.client import connect

    if CHROMIUM is None:
        raise RuntimeError("no chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = _port(Path(folder) / "DevToolsActivePort")
            targets = json.loads(urlopen(f"http://127.0.0.1:{port}/json").read())
            address = next(each["webSocketDebuggerUrl"] for each in targets if each["type"] == "page")
            with connect(address, max_size=None, proxy=None, open_timeout=PATIENCE) as connection:
                yield Page(connection)
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE)


def _port(file: Path) -> int:
    """The port that the browser listens at, from the file that it writes."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if file.exists() and (lines := file.read_text(encoding="utf-8").split()):
            return int(lines[0])
        time.sleep(0.05)
    raise TimeoutError("chromium does not start")
