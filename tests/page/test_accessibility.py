"""Accessibility: an axe scan of every view in both themes, and the Steer page by keyboard alone."""

import pytest

SERIOUS = {"serious", "critical"}


def scan(tab, where):
    from axe_playwright_python.sync_playwright import Axe

    # what is still being computed is dimmed
    tab.page.wait_for_function("() => !document.querySelector('[aria-busy=true]')")
    tab.page.wait_for_timeout(300)
    violations = [v for v in Axe().run(tab.page).response["violations"] if v["impact"] in SERIOUS]
    details = [
        (v["id"], v["nodes"][0]["html"][:160], v["nodes"][0].get("failureSummary", "")[:200])
        for v in violations
    ]
    assert not details, f"{where}: {details}"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_serious_finding_in_any_view(open_tab, theme):
    tab = open_tab(theme=theme)
    tab.page.fill("input[type=number][max='4096']", "12")
    tab.page.keyboard.press("Tab")
    tab.ask("Tell me a story.")
    tab.page.locator('[data-strip="answer"] .tok').nth(3).click()
    tab.page.wait_for_selector('[data-panel="lens"] table')
    tab.page.keyboard.press("Escape")
    for look in ("inside", "features", "contrast", "circuit", "requests", "captures"):
        tab.page.click(f"#tab-{look}")
        tab.page.wait_for_timeout(200)
        scan(tab, f"{theme} {look}")
    tab.page.click("#tab-steer")
    scan(tab, f"{theme} steer")


def walk_to(tab, name: str) -> None:
    """Select an option of the focused list with arrow keys."""
    tab.page.keyboard.press("Home")
    for _ in range(60):
        if tab.page.evaluate("document.activeElement.value") == name:
            return
        tab.page.keyboard.press("ArrowDown")
    raise AssertionError(f"{name} is not in the list")


def test_the_steer_view_can_be_used_by_keyboard(open_tab, server):
    rows = {"mhc_streams_pre_attn": {"3": [0.5] * (4 * 384)}}
    server.post("v1/steering/modules/register", {"name": "keys", "replace": True, "vectors": rows})
    tab = open_tab()
    tab.page.wait_for_selector("#add-edit option[value='keys']", state="attached")
    tab.page.focus("#tab-chat")
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.evaluate("document.activeElement.id") == "tab-steer"
    reached = []
    for _ in range(40):
        tab.page.keyboard.press("Tab")
        here = tab.page.evaluate(
            "document.activeElement.id || document.activeElement.getAttribute('aria-label') || ''"
        )
        reached.append(here)
        if here == "add-edit":
            walk_to(tab, "keys")
        if here == "add-button":
            tab.page.keyboard.press("Enter")
            break
    assert "steer-run" in reached and "add-edit" in reached and reached[-1] == "add-button", reached
    tab.page.wait_for_selector("input[aria-label='strength of keys']")
    for _ in range(40):  # the cards of the edits stand before this button
        tab.page.keyboard.press("Shift+Tab")
        if tab.page.evaluate("document.activeElement.getAttribute('aria-label')") == "strength of keys":
            break
    before = tab.page.evaluate("document.activeElement.value")
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.evaluate("document.activeElement.value") != before
    assert not tab.faults
