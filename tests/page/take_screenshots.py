"""Takes the screenshots of docs/images: every view, light and dark, desktop and phone size.

python -m tests.page.take_screenshots docs/images
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.page.browser import ARGUMENTS, CHROMIUM
from tests.page.conftest import Server, Tab

SIZES = {"desk": (1280, 800), "phone": (390, 844)}
LOOKS = ("inside", "features", "contrast", "requests", "captures")


def take(tab: Tab, folder: Path, name: str, whole: bool = False) -> None:
    tab.page.wait_for_timeout(500)
    tab.done()  # pictures of the pinned token are asked of the server
    tab.page.screenshot(path=folder / f"{name}.jpg", type="jpeg", quality=72, full_page=whole)


def walk(browser, server: Server, folder: Path, size: str, theme: str) -> None:
    width, height = SIZES[size]
    tab = Tab(browser, server.url, width, height, theme)
    mark = f"{size}-{theme}"
    tab.page.wait_for_selector("#model:has-text('layers')")
    tab.page.wait_for_timeout(800)
    tab.page.fill("input[type=number][max='4096']", "110")
    tab.page.keyboard.press("Tab")
    tab.ask("Tell me a story about a fox and a boat.")
    tab.page.wait_for_selector('[data-panel="memory"] canvas')
    tab.page.wait_for_selector('[data-panel="lens"] table')
    take(tab, folder, f"chat-{mark}")
    tokens = tab.page.locator('[data-strip="answer"] .tok')
    tokens.nth(min(40, tokens.count() - 1)).click()
    take(tab, folder, f"token-{mark}")
    tab.page.keyboard.press("Escape")
    if size == "phone":
        tab.page.locator("#look").scroll_into_view_if_needed()
    for look in LOOKS:
        tab.page.click(f"#tab-{look}")
        if look == "contrast":
            tab.page.click("#contrast-run")
            tab.page.wait_for_selector('[data-panel="contrast"] td', timeout=30000)
        if look == "captures":
            tab.page.click("#capture-now")
            tab.page.wait_for_selector('[data-panel="captures"] td', timeout=30000)
            tab.page.locator('[data-panel="captures"] td button').first.click()
        if look == "features":
            tab.page.fill("#feature-search", "sea")
            tab.page.press("#feature-search", "Enter")
            tab.page.locator("[data-found] .feature").first.click()
            tab.page.wait_for_selector('[data-panel="dashboard"] .context')
        tab.page.wait_for_timeout(700)
        if size == "phone":
            tab.page.locator("#look").evaluate("node => node.scrollIntoView()")
        take(tab, folder, f"{look}-{mark}", whole=size == "desk" and look == "inside")
    tab.page.click("#tab-inside")
    tab.page.click("#tab-steer")
    tab.page.click("#steer-run")
    tab.page.wait_for_function(
        "() => document.querySelectorAll('[aria-busy=true]').length === 0"
        " && document.querySelectorAll('[data-strip=steered] .tok').length > 5",
        timeout=60000,
    )
    tab.page.evaluate("scrollTo(0, 0)")
    take(tab, folder, f"steer-{mark}")
    tab.page.click("#sweep-run")
    tab.page.wait_for_selector('[data-panel="sweep"] p.note', timeout=120000)
    tab.page.locator('[data-panel="sweep"]').scroll_into_view_if_needed()
    take(tab, folder, f"sweep-{mark}")
    tab.page.click("#tab-chat")
    tab.page.click("#tour")
    for _ in range(3):
        tab.page.click("#tour-next")
    take(tab, folder, f"tour-{mark}")
    if tab.faults:
        raise SystemExit(f"{mark}: {tab.faults}")
    tab.close()


def main(folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        server = Server(Path(scratch)).start()
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            for size in SIZES:
                for theme in ("light", "dark"):
                    walk(browser, server, folder, size, theme)
            browser.close()
        finally:
            server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
