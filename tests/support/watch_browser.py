"""The command ``deltawire watch``, and a headless Chromium to look at it with.

Tests that need it skip where Debian's Chromium or Playwright is missing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
SOURCE = Path(__file__).parents[2] / "src"
PATIENCE_MS = 90_000


@contextlib.contextmanager
def served(runs: Sequence[Path], cache: Path) -> Iterator[str]:
    """Run ``deltawire watch`` for these buckets; yields the link that it prints."""
    command = [sys.executable, "-m", "deltawire", "watch", *map(str, runs), "--no-browser"]
    process = subprocess.Popen(
        [*command, "--cache", str(cache)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)},
    )
    assert process.stdout is not None
    try:
        link = process.stdout.readline().strip()
        assert "#token=" in link, "the server did not start"
        yield link
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=120)
        process.stdout.close()
    assert code == 0


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip("Chromium is missing")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A tab of the page, which notes every error and every request to another place."""

    def __init__(
        self, browser: Any, link: str, *, width: int = 1600, dark: bool = False, **more: Any
    ) -> None:
        self.address = link.partition("/#")[0]
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            **more,
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("request", self._check)
        self.page.goto(link)
        self.wait()

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} {message.location}")

    def _check(self, request: Any) -> None:
        if not request.url.startswith((self.address, "blob:", "data:")):
            self.elsewhere.append(request.url)

    def open(self, path: str) -> None:
        """Open a path of the page, as a link from elsewhere would."""
        self.page.goto(f"{self.address}{path}")
        self.wait()

    def until(self, selector: str, words: str) -> None:
        """Wait until a part of the page contains some words."""
        self.page.locator(selector).filter(has_text=words).first.wait_for()

    def wait(self) -> None:
        """Wait until the view has drawn what it asked for."""
        self.page.wait_for_selector("main[data-ready]")

    def text(self, selector: str = "main") -> str:
        """The text of a part of the page."""
        return str(self.page.inner_text(selector))

    def sound(self) -> None:
        """Check what must hold of every view: no error, no foreign request, nothing too wide."""
        width = self.page.evaluate("innerWidth")
        wide = self.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{self.page.url} is {wide} px wide in a window of {width}"
        assert not self.errors, self.errors
        assert not self.elsewhere, self.elsewhere
