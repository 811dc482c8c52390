"""Hostile output stays text, a lost server or missing key is reported, and links restore state."""

import json

import pytest

from tests.page.conftest import Server, Tab

HOSTILE = [
    "<script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 2'>",
    "\u202eesrever\u202c",
    "a\u200bb",
    "</div></main><h1>gone</h1>",
    "x" * 1_000_000,
]


def fake_answer(route, pieces):
    """A chat completion stream with hostile tokens."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "nano"}
    frames = []
    for piece in pieces:
        token = {
            "token": piece,
            "logprob": -0.5,
            "bytes": [],
            "top_logprobs": [{"token": piece, "logprob": -0.5, "bytes": []}],
        }
        frames.append(
            {
                **head,
                "choices": [
                    {
                        "index": 0,
                        "delta": {"content": piece},
                        "logprobs": {"content": [token]},
                        "token_ids": [5],
                        "finish_reason": None,
                    }
                ],
            }
        )
    frames.append({**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + "data: [DONE]\n\n"
    route.fulfill(status=200, content_type="text/event-stream", body=body)


def test_hostile_output_stays_text(open_tab):
    tab = open_tab()
    tab.page.route("**/v1/chat/completions", lambda route: fake_answer(route, HOSTILE))
    tab.ask("Be evil.")
    shown = tab.page.inner_text('[data-strip="answer"]')
    assert "<script>window.broken = 1</script>" in shown
    assert "⟨U+202E⟩" in shown and "⟨U+200B⟩" in shown
    assert tab.page.evaluate("window.broken") is None
    assert tab.page.locator("main h1").count() == 0
    width = tab.page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert width <= 0, "a long line made the page wider than the window"
    assert not tab.faults, "the policy was violated or a script failed"


def test_tokens_of_the_reasoning_are_part_of_the_answer_s_strip(open_tab):
    """Their numbers come in a list of their own, and every token keeps its position."""
    tab = open_tab()

    def with_reasoning(route):
        request_body = {**route.request.post_data_json, "reasoning_effort": "low", "max_tokens": 12}
        route.continue_(post_data=json.dumps(request_body | {"ignore_eos": True}))

    tab.page.route("**/v1/chat/completions", with_reasoning)
    tab.ask("Tell me a story.")
    assert tab.page.locator('[data-strip="answer"] .tok').count() == 12
    assert not tab.faults


def test_a_recipe_restores_a_finding_in_another_browser(open_tab, chromium):
    tab = open_tab()
    tab.page.fill("input[type=number][max='4096']", "16")
    tab.page.keyboard.press("Tab")
    tab.ask("Tell me about a duck.")
    output = tab.page.inner_text('[data-strip="answer"]')
    tab.page.locator('[data-strip="answer"] .tok').nth(4).click()
    # not the token that is pinned when an answer ends
    chosen = '[data-strip="answer"] .tok:nth-child(5).pinned'
    tab.page.wait_for_selector(chosen, state="attached")
    pinned = tab.page.inner_text("[data-pin]")
    tab.page.click("#tab-contrast")
    tab.page.click("#recipe")
    tab.page.wait_for_function("() => location.hash.startsWith('#r=')")
    link = tab.page.url
    other = Tab(chromium, link)
    try:
        other.done()
        other.page.wait_for_selector(chosen, state="attached")
        assert other.page.inner_text('[data-strip="answer"]') == output
        assert other.page.inner_text("[data-pin]") == pinned
        other.page.locator("#page-contrast").wait_for()
        assert not other.faults
    finally:
        other.close()


def test_a_truncated_link_is_reported(open_tab, server):
    tab = open_tab(server.url + "#r=eyJhIjo")
    tab.page.wait_for_selector("#banner:has-text('cannot be read')")
    assert not tab.faults


def test_stopping_keeps_the_partial_output(open_tab):
    tab = open_tab()

    def without_end(route):
        """A response that runs until it is stopped, however slow the browser is."""
        request_body = {**route.request.post_data_json, "ignore_eos": True, "max_tokens": 4000}
        route.continue_(post_data=json.dumps(request_body))

    tab.page.route("**/v1/chat/completions", without_end)
    tab.ask("Tell me a long story.", wait=False)
    tab.page.wait_for_function("() => document.querySelectorAll('[data-strip=answer] .tok').length > 3")
    tab.page.click("#stop")
    tab.page.wait_for_selector("#page-chat .who:has-text('stopped')")
    assert tab.page.locator('[data-strip="answer"] .tok').count() > 3
    tab.page.wait_for_selector("#stop[disabled]")


@pytest.fixture
def locked(tmp_path):
    server = Server(tmp_path, "--api-key", "open-sesame").start()
    yield server
    server.stop()


def test_a_missing_key_is_requested_and_the_page_survives_a_restart(chromium, locked):
    tab = Tab(chromium, locked.url)
    try:
        tab.page.wait_for_selector("#banner:has-text('requires an API key')")
        tab.page.fill("#banner input >> nth=0", "wrong")
        tab.page.press("#banner input >> nth=0", "Enter")
        tab.page.wait_for_selector("#banner:has-text('was not accepted')")
        tab.page.fill("#banner input >> nth=0", "open-sesame")
        tab.page.click("#banner button")
        tab.page.wait_for_selector("#model:has-text('layers')")
        locked.stop()
        tab.page.wait_for_selector("#banner:has-text('No response from the server')")
        locked.start()
        tab.page.wait_for_selector("#banner", state="hidden")
        tab.page.fill("input[type=number][max='4096']", "8")
        tab.page.keyboard.press("Tab")
        tab.ask("Hello.")
        assert not tab.faults
    finally:
        tab.close()
