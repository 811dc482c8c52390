"""One server on nano and one browser for all page tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.free_port import free_port
from tests.page.browser import ARGUMENTS, CHROMIUM, REQUIRED, missing


def pytest_collection_modifyitems(items):
    why = missing()
    if why is not None and not REQUIRED:
        for item in items:
            if "tests/page/" in str(item.fspath).replace(os.sep, "/"):
                item.add_marker(pytest.mark.skip(reason=why))


class Server:
    """`birkhoff serve` as a subprocess, on a port that stays the same over restarts."""

    def __init__(self, folder, *flags: str, capture_root: bool = True):
        self.port = free_port()
        self.url, self._folder, self._flags, self.process = (
            f"http://127.0.0.1:{self.port}/",
            folder,
            (*(("--capture-root", str(folder / "captures")) if capture_root else ()), *flags),
            None,
        )

    def start(self) -> Server:
        command = [sys.executable, "-m", "birkhoff", "serve", "--port", str(self.port)]
        command += self._flags
        with open(self._folder / f"server-{self.port}.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        while True:
            try:
                with urllib.request.urlopen(self.url + "health", timeout=300):
                    return self
            except OSError:
                assert self.process.poll() is None, (self._folder / f"server-{self.port}.log").read_text()
                time.sleep(0.2)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def post(self, path: str, body: dict, key: str = "") -> dict:
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    started = Server(tmp_path_factory.mktemp("page")).start()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def chromium():
    """One browser per test file: while it is open the process has an event loop, which would affect other tests."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Tab:
    """A page in a fresh browser context that records script errors and policy violations in `faults`."""

    def __init__(
        self, browser, url: str, width: int = 1400, height: int = 1000, theme: str = "light", init: str = ""
    ):
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        if not url.startswith("file:"):
            self.context.grant_permissions(
                ["clipboard-read", "clipboard-write"], origin=url.rstrip("/").split("#")[0].rstrip("/")
            )
        self.page = self.context.new_page()
        self.page.set_default_timeout(300_000)  # a busy machine is slow, not wrong
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("console", self._console)
        self.page.add_init_script(
            "addEventListener('securitypolicyviolation',"
            " e => console.error('policy: ' + e.violatedDirective + ' ' + e.blockedURI));" + init
        )
        self.page.goto(url)

    def _console(self, message) -> None:
        # The page shows failed requests itself; the browser's message about them is not a script error.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def ask(self, text: str, wait: bool = True):
        self.page.fill("#ask", text)
        self.page.click("#send")
        if wait:
            self.done()

    def done(self, seconds: float = 300) -> None:
        self.page.wait_for_function(
            "() => document.querySelectorAll('[aria-busy=true]').length === 0 && document.querySelector('.strip .tok')",
            timeout=seconds * 1000,
        )

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def open_tab(chromium, server):
    tabs = []

    def open_url(url: str | None = None, **options) -> Tab:
        tabs.append(Tab(chromium, url or server.url, **options))
        return tabs[-1]

    yield open_url
    for tab in tabs:
        tab.close()


def share(tab: Tab, panel: str, item: str) -> None:
    """Choose an item of a panel's Share menu."""
    section = tab.page.locator(f'[data-panel="{panel}"]')
    section.locator(".menu summary").click()
    section.locator(".menu-items button", has_text=item).click()


def copied(tab: Tab, words: str) -> str:
    """The clipboard's text, once it contains `words`."""
    text = ""
    for _ in range(2400):
        text = tab.page.evaluate("navigator.clipboard.readText()")
        if words in text:
            return text
        tab.page.wait_for_timeout(50)
    raise AssertionError(f"{words} never appeared; the clipboard contains {text[:200]!r}")
