"""Measures the page in a real browser: frame rate of a large heat map, first paint, and heap growth.

    python -m tests.page.measure [--answers N] >> bench/results/page.jsonl

Frames are counted by the browser while mouse events drag and zoom 512 tokens x 86 sublayers. The heap is read after a
garbage collection between responses, which are streamed one after another with all signals of the panels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from birkhoff.bench.report import facts
from tests.page.browser import ARGUMENTS, CHROMIUM
from tests.page.conftest import Server, Tab

LARGE = """async () => {
    const { Heatmap } = await import('/assets/heatmap.js');
    const map = new Heatmap({ label: 'large', height: 320 });
    const room = document.createElement('div');
    room.style = 'position:fixed;inset:0;z-index:99;background:var(--page, white)';
    room.append(map.node);
    document.body.append(room);
    const rows = Array.from({ length: 86 }, (_, i) => `row ${i}`);
    window.valueReads = 0;
    map.show({ columns: 512, rows, value: (x, y) => { window.valueReads++; return Math.sin(x / 9) + y / 40; } });
    window.large = map;
}"""
COUNT = """() => {
    window.frameTimes = [];
    window.counting = true;
    const next = (now) => { window.frameTimes.push(now); if (window.counting) requestAnimationFrame(next); };
    requestAnimationFrame(next);
}"""


def show_large(tab: Tab) -> None:
    tab.page.wait_for_selector("#model:has-text('layers')")
    tab.page.evaluate(LARGE)
    tab.page.wait_for_timeout(200)


def drag_and_zoom(tab: Tab, turns: int) -> None:
    """Zoom with the wheel and drag sideways."""
    mouse = tab.page.mouse
    mouse.move(700, 150)
    for turn in range(turns):
        mouse.wheel(0, -240 if turn % 4 < 2 else 240)
        mouse.down()
        mouse.move(500 + 40 * (turn % 5), 150, steps=12)
        mouse.up()
        mouse.move(700, 150)


def frames(tab: Tab, turns: int = 12) -> dict:
    show_large(tab)
    tab.page.evaluate(COUNT)
    drag_and_zoom(tab, turns)
    times = tab.page.evaluate("() => { window.counting = false; return window.frameTimes; }")
    gaps = sorted(later - sooner for sooner, later in itertools.pairwise(times))
    return {
        "frames": len(gaps),
        "median_per_second": round(1000 / statistics.median(gaps), 1),
        "p10_per_second": round(1000 / gaps[int(len(gaps) * 0.9)], 1),
    }


def first_paint(tab: Tab) -> float:
    tab.page.wait_for_selector("#model:has-text('layers')")
    return min(tab.page.evaluate("performance.getEntriesByType('paint').map(p => p.startTime)"))


def heap_bytes(tab: Tab) -> int:
    session = tab.context.new_cdp_session(tab.page)
    try:
        session.send("HeapProfiler.collectGarbage")
        return int(session.send("Runtime.getHeapUsage")["usedSize"])
    finally:
        session.detach()


def answers(tab: Tab, count: int, tokens: int = 120) -> list[int]:
    """Heap bytes after each of `count` responses to the same prompt, streamed one after another."""
    tab.page.wait_for_selector("#model:has-text('layers')")
    tab.page.fill("input[type=number][max='4096']", str(tokens))
    tab.page.keyboard.press("Tab")
    tab.ask("Tell me a long story about a fox and a boat.")
    heap = [heap_bytes(tab)]
    for _ in range(count - 1):
        with tab.page.expect_response(lambda answer: "/v1/chat/completions" in answer.url):
            tab.page.click("#retry")
        tab.page.wait_for_timeout(200)  # long enough for the page to show that it is busy
        tab.done()
        heap.append(heap_bytes(tab))
    return heap


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        server = Server(Path(folder)).start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        common = {"bench": "page", "model": "nano", "browser": browser.version, **facts()}
        try:
            paints = []
            for _ in range(5):
                tab = Tab(browser, server.url)
                paints.append(first_paint(tab))
                tab.close()
            print(
                json.dumps(
                    common | {"kind": "first paint", "ms": sorted(round(paint, 1) for paint in paints)}
                )
            )
            tab = Tab(browser, server.url)
            print(json.dumps(common | {"kind": "frames", "cells": [512, 86], **frames(tab)}))
            tab.close()
            tab = Tab(browser, server.url)
            start = time.monotonic()
            heap = answers(tab, arguments.answers)
            sizes = {
                "first": heap[0],
                "most": max(heap),
                "last": heap[-1],
                "grown": heap[-1] - heap[min(2, len(heap) - 1)],
            }
            print(
                json.dumps(
                    common
                    | {
                        "kind": "heap",
                        "answers": len(heap),
                        "tokens_each": 120,
                        "seconds": round(time.monotonic() - start),
                        "mb": {name: round(size / 1e6, 3) for name, size in sizes.items()},
                        "faults": tab.faults,
                    }
                )
            )
            tab.close()
        finally:
            browser.close()
            server.stop()


if __name__ == "__main__":
    main()
