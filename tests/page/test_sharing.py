"""Pictures, links and files: every panel as SVG, PNG and HTML; a file opens without a server."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.page.conftest import Tab, share

INSIDE = ["heatmap", "film", "lineage", "experts", "lens", "memory"]
SVG = "{http://www.w3.org/2000/svg}"


def ask(tab: Tab, tokens: int = 20) -> None:
    tab.page.fill("input[type=number][max='4096']", str(tokens))
    tab.page.keyboard.press("Tab")
    tab.ask("Tell me a story about a fox.")
    filled(tab)


def filled(tab: Tab) -> None:
    """Every picture of the pinned token is there."""
    for name in ("heatmap", "film", "experts", "memory"):
        tab.page.locator(f'[data-panel="{name}"] canvas').first.wait_for()
    tab.page.wait_for_function("() => document.querySelectorAll('[data-panel=lineage] td').length === 16")
    tab.page.wait_for_selector('[data-panel="lens"] table')


@pytest.fixture(scope="module")
def answered(chromium, server):
    tab = Tab(chromium, server.url, width=1280, height=800)
    ask(tab)
    yield tab
    assert not tab.faults
    tab.close()


def saved(tab: Tab, panel: str, item: str, folder: Path) -> Path:
    """The file of an item of a panel's menu. Chromium drops a download after twelve in quick succession, without an
    error of the page: it is asked for once more."""
    from playwright.sync_api import TimeoutError as PlaywrightTimeout

    tab.page.wait_for_function("() => !document.querySelector('[aria-busy=true]')")
    for patience in (30_000, 240_000):
        try:
            with tab.page.expect_download(timeout=patience) as download:
                share(tab, panel, item)
            break
        except PlaywrightTimeout:
            assert patience == 30_000, tab.page.locator("#toast").all_inner_texts()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def test_an_answer_pins_its_last_token_and_fills_every_picture(answered):
    positions = [
        int(p) for p in answered.page.locator(".tok").evaluate_all("n => n.map(x => x.dataset.position)")
    ]
    pinned = answered.page.locator('[data-strip="answer"] .tok.pinned')
    assert pinned.count() == 1
    # the very last token was sampled and never run, so it has no activations
    assert int(pinned.get_attribute("data-position")) >= max(positions) - 1


@pytest.mark.parametrize("panel", INSIDE)
def test_a_picture_is_saved_as_svg_and_png(answered, tmp_path, panel):
    path = saved(answered, panel, "Save SVG", tmp_path)
    root = ElementTree.parse(path).getroot()
    marks = [*root.iter(f"{SVG}rect"), *root.iter(f"{SVG}path")]
    words = [node.text for node in root.iter(f"{SVG}text")]
    title = answered.page.inner_text(f'[data-panel="{panel}"] h2').split()
    assert words[: len(title)] == title and len(marks) > 10 and len(words) > 8
    assert "image" not in {node.tag.removeprefix(SVG) for node in root.iter()}, "not a vector picture"
    picture = saved(answered, panel, "Save PNG", tmp_path).read_bytes()
    width, height = int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")
    assert picture.startswith(b"\x89PNG") and (width, height) == (
        2 * int(root.get("width")),
        2 * int(root.get("height")),
    )
    assert len(picture) > 4000


def open_file(chromium, path: Path, requests: list) -> Tab:
    tab = Tab(chromium, path.as_uri(), init="")
    tab.page.on("request", lambda request: requests.append(request.url))
    tab.page.reload()
    tab.page.wait_for_selector("body[data-ready=true]")
    return tab


def test_a_saved_view_opens_without_a_server(answered, chromium, tmp_path):
    with answered.page.expect_download() as download:
        answered.page.click("#save-view")
    path = tmp_path / "view.html"
    download.value.save_as(path)
    assert path.stat().st_size < 3_000_000
    requests: list[str] = []
    tab = open_file(chromium, path, requests)
    try:
        filled(tab)
        answer = answered.page.inner_text('[data-strip="answer"]')
        assert tab.page.inner_text('[data-strip="answer"]') == answer
        assert tab.page.inner_text("[data-pin]") == answered.page.inner_text("[data-pin]")
        assert tab.page.inner_text('[data-panel="lens"]') == answered.page.inner_text('[data-panel="lens"]')
        tab.page.locator('[data-strip="answer"] .tok').nth(1).click()  # other tokens have their pictures too
        tab.page.wait_for_selector('[data-strip="answer"] .tok.pinned >> nth=0')
        tab.page.locator('[data-panel="film"] canvas').first.wait_for()
        tab.page.wait_for_selector('[data-panel="lens"] .empty')  # was not asked for before it was saved
        assert not tab.page.locator("#send").is_visible()
        assert not tab.faults
        assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    finally:
        tab.close()


@pytest.mark.parametrize("panel", ["film", "memory"])
def test_one_panel_is_saved_with_its_text(answered, chromium, tmp_path, panel):
    path = saved(answered, panel, "Save HTML", tmp_path)
    tab = open_file(chromium, path, [])
    try:
        names = tab.page.locator("[data-panel]").evaluate_all("nodes => nodes.map(n => n.dataset.panel)")
        assert names == ["chat", panel]
        tab.page.locator(f'[data-panel="{panel}"] canvas').first.wait_for()
        picture = saved(tab, panel, "Save PNG", tmp_path)  # pictures can be saved from a file too
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert not tab.faults
    finally:
        tab.close()


def test_features_and_the_bench_are_saved(open_tab, chromium, tmp_path):
    tab = open_tab()
    page = tab.page
    page.fill("input[type=number][max='4096']", "16")
    page.keyboard.press("Tab")
    page.wait_for_selector(".edit", state="attached")
    page.click("#tab-steer")
    page.click("#steer-run")
    page.wait_for_function(
        "() => document.querySelectorAll('[aria-busy=true]').length === 0"
        " && document.querySelectorAll('[data-strip=steered] .tok').length > 5"
    )
    page.click("#tab-features")
    page.locator('[data-panel="features"] .feature').first.click()
    page.wait_for_selector('[data-panel="dashboard"] .context')
    for panel, inside in (
        ("bench", '[data-strip="steered"] .tok'),
        ("features", ".feature"),
        ("dashboard", ".context"),
    ):
        file = open_file(chromium, saved(tab, panel, "Save HTML", tmp_path), [])
        try:
            shown = file.page.locator(f'[data-panel="{panel}"] {inside}')
            shown.first.wait_for()
            assert shown.count() == page.locator(f'[data-panel="{panel}"] {inside}').count()
            assert not file.faults
        finally:
            file.close()
    assert not tab.faults


def test_a_link_of_a_panel_reproduces_the_view(open_tab, chromium):
    """A branched answer, its pin, the value of the heat map and the panel are what the other browser shows."""
    tab = open_tab()
    page = tab.page
    ask(tab, 14)
    page.locator('[data-strip="answer"] .tok').nth(4).click()
    with page.expect_response(lambda answer: "/v1/completions" in answer.url):
        page.locator(".tip button:has-text('branch')").first.click()
    tab.done()
    page.locator('[data-strip="answer"] .tok').nth(3).click()
    page.keyboard.press("Escape")
    page.select_option('[data-panel="heatmap"] select >> nth=0', "keep")
    page.wait_for_function("() => document.querySelectorAll('[data-panel=lineage] td').length === 16")
    page.select_option('[data-panel="lineage"] select >> nth=0', "4")
    share(tab, "experts", "Copy link")
    page.wait_for_function("() => location.hash.startsWith('#r=')")
    other = Tab(chromium, page.url, height=500)
    try:
        other.done()
        other.page.wait_for_function(
            f"() => document.querySelector('[data-pin]')?.textContent === {page.inner_text('[data-pin]')!r}"
        )
        for part in ('[data-strip="answer"]', '[data-panel="lineage"]'):
            other.page.wait_for_function(
                "([part, text]) => document.querySelector(part)?.innerText === text",
                arg=[part, page.inner_text(part)],
            )
        assert other.page.locator('[data-panel="heatmap"] select >> nth=0').input_value() == "keep"
        other.page.wait_for_function(
            "() => { const b = document.querySelector('[data-panel=experts]').getBoundingClientRect();"
            " return b.top < innerHeight && b.bottom > 0; }"
        )
        assert not other.faults
    finally:
        other.close()
