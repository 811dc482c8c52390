"""Small, quick, usable on a phone: bytes of script, first paint, frames a second, nothing wider than the window."""

from pathlib import Path

import pytest

import birkhoff

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
    for look in ("inside", "features", "contrast", "requests", "captures"):
        tab.page.click(f"#tab-{look}")
        tab.page.wait_for_timeout(150)
        assert tab.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, look
    tab.page.click("#tab-steer")
    assert tab.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert not tab.faults


def test_a_large_picture_moves_smoothly(open_tab):
    """Reported, not judged by the clock alone: a frame must not do work that grows with the picture."""
    tab = open_tab()
    tab.page.wait_for_selector("#model:has-text('layers')")
    rate = tab.page.evaluate(
        """async () => {
            const { Heatmap } = await import('/assets/heatmap.js');
            const map = new Heatmap({ label: 'large', height: 320 });
            document.querySelector('#page-inside').prepend(map.node);
            const rows = Array.from({ length: 86 }, (_, i) => `row ${i}`);
            map.show({ columns: 512, rows, value: (x, y) => Math.sin(x / 9) + y / 40 });
            const times = [];
            for (let i = 0; i < 90; i++) {
                const began = performance.now();
                map.view.x += 1.5; map.view.zoom = 1 + (i % 30) / 10; map._paint();
                times.push(performance.now() - began);
                await new Promise(requestAnimationFrame);
            }
            times.sort((a, b) => a - b);
            return { median_ms: times[45], worst_ms: times[89] };
        }"""
    )
    print("painting 512 x 86 cells:", rate)
    assert rate["median_ms"] < 20, "one frame takes longer than 50 frames a second allow"
    assert not tab.faults


def test_first_paint_is_soon(open_tab):
    tab = open_tab()
    tab.page.wait_for_selector("#model:has-text('layers')")
    paint = tab.page.evaluate("performance.getEntriesByType('paint').map(p => p.startTime)")
    print("first paint:", paint)
    assert paint and min(paint) < 5000
