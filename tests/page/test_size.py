"""Page size and speed: bytes of scripts, cost of a frame, heap growth, and layout at all window widths."""

from pathlib import Path

import pytest

import birkhoff
from tests.page.measure import answers, drag_and_zoom, first_paint, frames, show_large
from tests.sizes import scaled

WEB = Path(birkhoff.__file__).parent / "web"


def test_all_scripts_together_are_small_and_load_nothing_from_elsewhere():
    scripts = sorted(WEB.glob("*.js"))
    assert sum(file.stat().st_size for file in scripts) < 200_000
    for file in [*scripts, *WEB.glob("*.html"), *WEB.glob("*.css")]:
        text = file.read_text()
        assert "innerHTML" not in text and "eval(" not in text, file.name
        assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text, file.name


@pytest.mark.parametrize("width", [360, 820, 1400, 2200])
def test_nothing_is_wider_than_the_window(open_tab, width):
    tab = open_tab(width=width, height=900)
    tab.page.wait_for_selector("#model:has-text('layers')")
    tab.page.fill("input[type=number][max='4096']", "12")
    tab.page.keyboard.press("Tab")
    tab.ask("Tell me a story.")
    tab.page.locator('[data-strip="answer"] .tok').nth(2).click()
    tab.page.wait_for_selector('[data-panel="memory"] canvas')
    for look in ("inside", "features", "contrast", "circuit", "requests", "captures"):
        tab.page.click(f"#tab-{look}")
        tab.page.wait_for_timeout(150)
        assert tab.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, look
    tab.page.click("#tab-steer")
    tab.page.wait_for_selector("main[data-talk=steer]")
    assert tab.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert not tab.faults


def test_panning_a_large_heat_map_does_not_read_its_values_again(open_tab):
    """The cost of a frame does not depend on the number of cells: panning redraws a bitmap and reads no values."""
    tab = open_tab()
    show_large(tab)
    painted = tab.page.evaluate("window.valueReads")
    before = tab.page.evaluate("JSON.stringify(window.large.view)")
    drag_and_zoom(tab, 2)
    assert painted == 512 * 86 == tab.page.evaluate("window.valueReads")
    assert tab.page.evaluate("JSON.stringify(window.large.view)") != before, "the heat map has moved"
    print("frames a second:", frames(open_tab(), 2), "first paint, ms:", first_paint(open_tab()))
    assert not tab.faults


def test_consecutive_responses_do_not_grow_the_heap(open_tab):
    tab = open_tab()
    heap = answers(tab, scaled(200, 4), scaled(120, 24))
    print("heap after each answer, MB:", [round(size / 1e6, 2) for size in heap])
    # Scripts are compiled during the first responses, which takes a few hundred kB each.
    assert heap[-1] - heap[1] < max(20e6 * len(heap) / 200, 2e6), "200 responses may add 20 MB"
    assert not tab.faults
