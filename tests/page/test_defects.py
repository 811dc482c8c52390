"""What went wrong on the page once, each as a user does it: branching, the bench in place of the chat, saving,
capturing, pop-ups, ticks."""

from __future__ import annotations

import pytest
from safetensors import safe_open

from tests.page.conftest import Server, Tab

ANSWER = '[data-strip="answer"] .tok'


def set_length(tab: Tab, tokens: int) -> None:
    tab.page.fill("input[type=number][max='4096']", str(tokens))
    tab.page.keyboard.press("Tab")


def texts(tab: Tab) -> list[str]:
    return tab.page.locator(ANSWER).all_text_contents()


def test_branching_keeps_the_beginning_of_the_answer_and_sends_it(open_tab):
    """The strip and the next request hold the tokens before the branch, the alternative, and what follows."""
    tab = open_tab()
    set_length(tab, 14)
    tab.ask("Tell me a story about a cat.")
    before = texts(tab)
    first_position = tab.page.locator(ANSWER).first.get_attribute("data-position")
    tab.page.locator(ANSWER).nth(6).click()
    other = tab.page.locator(".tip .alternatives span.mono:has(+ span + button)").first.inner_text()
    with tab.page.expect_response(lambda answer: "/v1/completions" in answer.url):
        tab.page.locator(".tip button:has-text('branch')").first.click()
    tab.done()
    after = texts(tab)
    assert after[:6] == before[:6] and after[6] != before[6]
    assert after[6].replace(" ", "·") == other
    assert len(after) > 7, "nothing was generated after the branch"
    assert tab.page.locator(ANSWER).first.get_attribute("data-position") == first_position
    # every token can be pinned, also those that were kept
    tab.page.locator(ANSWER).nth(2).click()
    tab.page.wait_for_selector('[data-panel="film"] canvas')
    tab.page.keyboard.press("Escape")
    with tab.page.expect_request(lambda r: "/v1/chat/completions" in r.url) as asked:
        tab.ask("What happened next?", wait=False)
    sent = asked.value.post_data_json["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert sent[1]["content"] == "".join(after).replace("⏎", "")
    assert not tab.faults


def test_the_bench_leaves_the_chat_alone(open_tab):
    """Each page keeps its run and its pin; the next message goes on from the chat and not from the bench."""
    tab = open_tab()
    page = tab.page
    set_length(tab, 12)
    tab.ask("Tell me a story about a cat.")
    answer = texts(tab)
    page.locator(ANSWER).nth(3).click()
    page.keyboard.press("Escape")
    position = page.locator(ANSWER).nth(3).get_attribute("data-position")
    # not the last token, which an answer pins by itself
    page.wait_for_function(
        f"() => document.querySelector('[data-pin]')?.textContent.includes('position {position}')"
    )
    pinned = page.inner_text("[data-pin]")
    page.wait_for_selector(".edit", state="attached")
    page.click("#tab-steer")
    page.fill("#steer-prompt", "Tell me a story about a boat.")
    page.click("#steer-run")
    page.wait_for_function(
        "() => document.querySelectorAll('[aria-busy=true]').length === 0"
        " && document.querySelectorAll('[data-strip=steered] .tok').length > 5"
    )
    steered = page.locator('[data-strip="steered"] .tok').all_text_contents()
    page.wait_for_function(f"() => document.querySelector('[data-pin]')?.textContent !== {pinned!r}")
    page.click("#tab-chat")
    page.wait_for_function(f"() => document.querySelector('[data-pin]')?.textContent === {pinned!r}")
    assert texts(tab) == answer
    assert page.locator(".conversation .message.user .text").all_inner_texts() == [
        "Tell me a story about a cat."
    ]
    with page.expect_request(lambda r: "/v1/chat/completions" in r.url) as asked:
        tab.ask("What happened next?", wait=False)
    sent = asked.value.post_data_json["messages"]
    assert [message["content"] for message in sent] == [
        "Tell me a story about a cat.",
        "".join(answer).replace("⏎", ""),
        "What happened next?",
    ]
    page.click("#tab-steer")
    page.wait_for_selector("main[data-talk=steer]")
    assert page.locator('[data-strip="steered"] .tok').all_text_contents() == steered
    tab.done()
    assert not tab.faults


def test_a_comparison_is_saved_under_its_default_name_and_an_error_keeps_the_table(open_tab):
    tab = open_tab()
    page = tab.page
    page.wait_for_selector("#add-edit option", state="attached")  # the vectors of the server are known
    page.wait_for_selector("#model:has-text('layers')")  # and its sites, of which one is compared
    page.click("#tab-contrast")
    page.click("#contrast-run")
    page.wait_for_selector('[data-panel="contrast"] td')
    cells = page.locator('[data-panel="contrast"] td').count()
    default = page.input_value('[data-panel="contrast"] input[type=text]')
    page.click("#save-vector")
    page.wait_for_selector(f"#toast:has-text('Saved as {default}')")
    page.fill('[data-panel="contrast"] input[type=text]', "happy")  # ships with the model
    page.click("#save-vector")
    page.wait_for_selector('[data-panel="contrast"] .fault')
    assert page.locator('[data-panel="contrast"] td').count() == cells
    page.fill('[data-panel="contrast"] input[type=text]', default)
    page.click("#save-vector")
    page.click("#replace-vector")
    page.wait_for_selector("#steer-saved")
    page.click("#steer-saved")
    page.wait_for_selector(f"input[aria-label='strength of {default}']")
    assert page.locator("#tab-steer").get_attribute("aria-selected") == "true"
    assert not tab.faults


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory):
    started = Server(tmp_path_factory.mktemp("plain"), capture_root=False).start()
    yield started
    started.stop()


def test_the_last_text_is_captured_on_a_server_without_a_capture_root(chromium, plain_server, tmp_path):
    tab = Tab(chromium, plain_server.url)
    try:
        page = tab.page
        page.wait_for_selector("#model:has-text('layers')")
        page.click("#tab-captures")
        page.click("#capture-now")
        page.wait_for_selector('[data-panel="captures"] td:has-text("in this page")')
        page.click('[data-panel="captures"] td button')
        page.wait_for_selector('[data-panel="captures"] canvas')
        with page.expect_download() as download:
            page.click('[data-panel="captures"] td a')
        download.value.save_as(tmp_path / "rows.safetensors")
        with safe_open(tmp_path / "rows.safetensors", "numpy") as file:
            names = list(file.keys())
            assert "mhc_streams_pre_attn.4" in names
            assert file.get_tensor("mhc_streams_pre_attn.4").shape[1:] == (4, 384)
        assert not tab.faults
    finally:
        tab.close()


def boxes_cross(a: dict, b: dict) -> bool:
    return (
        a["x"] < b["x"] + b["width"]
        and b["x"] < a["x"] + a["width"]
        and a["y"] < b["y"] + b["height"]
        and b["y"] < a["y"] + a["height"]
    )


def test_pop_ups_do_not_cover_the_heat_map(open_tab):
    tab = open_tab(width=1280, height=800)
    set_length(tab, 60)
    tab.ask("Tell me a story about a fox.")
    page = tab.page
    canvas = page.locator('[data-panel="heatmap"] .figure canvas')
    tokens = page.locator(ANSWER)
    rightmost = max(range(tokens.count()), key=lambda n: tokens.nth(n).bounding_box()["x"])
    for index in (0, rightmost):
        tokens.nth(index).click()
        page.wait_for_selector(".tip.held")
        assert not boxes_cross(page.locator(".tip").bounding_box(), canvas.bounding_box()), index
    page.keyboard.press("Escape")
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    page.wait_for_selector('[data-panel="heatmap"] .readout:has-text("position")')
    assert not page.locator(".tip").is_visible()
    assert not tab.faults


def test_ticks_are_round_numbers_and_positions_are_whole(open_tab):
    tab = open_tab()
    ticks = (
        "async ([low, high, most, whole]) => (await import('/assets/chart.js')).ticks(low, high, most, whole)"
    )
    for low, high, most in ((27, 30, 7), (27, 28, 7), (31, 150, 6), (5, 5, 4), (0, 4096, 8)):
        found = tab.page.evaluate(ticks, [low, high, most, True])
        assert found == sorted(set(found)) and all(float(x).is_integer() for x in found), found
        assert 1 <= len(found) <= most + 1 and low <= found[0] and found[-1] <= high
    for low, high, most in ((0, 0.7, 4), (0, 3.1e-4, 4), (-2.5, 11.3, 4), (0, 1, 4)):
        found = tab.page.evaluate(ticks, [low, high, most, False])
        assert 2 <= len(found) <= most + 1 and low <= found[0] + 1e-9 and found[-1] <= high + 1e-9
        step = found[1] - found[0]
        digit = float(f"{step:.0e}".split("e")[0])
        assert digit in (1, 2, 5) and abs(step - float(f"{step:.0e}")) < 1e-9 * step


RECORD_LABELS = """
const draw = CanvasRenderingContext2D.prototype.fillText;
globalThis.labels = [];
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const size = this.measureText(text), at = this.getTransform().transformPoint({ x, y }), scale = this.getTransform().a;
  const over = Math.max(
    size.actualBoundingBoxAscent * scale - at.y,
    at.y + size.actualBoundingBoxDescent * scale - this.canvas.height,
    size.actualBoundingBoxLeft * scale - at.x,
    at.x + size.actualBoundingBoxRight * scale - this.canvas.width,
  );
  labels.push({ text, canvas: this.canvas, over: over / scale });
  return draw.apply(this, arguments);
};
"""


@pytest.mark.parametrize("width", [1280, 390])
def test_no_label_of_a_picture_is_cut_off(open_tab, width):
    """Every text that is drawn into a picture lies within it, up to a pixel."""
    tab = open_tab(width=width, height=844, init=RECORD_LABELS)
    set_length(tab, 30)
    tab.ask("Tell me a story about a fox.")
    tab.page.wait_for_function(
        "() => ['heatmap', 'film', 'memory'].every((name) =>"
        " labels.some((label) => label.canvas.closest(`[data-panel=${name}]`)))"
    )
    cut = tab.page.evaluate(
        "labels.filter((label) => label.over > 1 && label.canvas.isConnected)"
        ".map(({ text, over, canvas }) => [canvas.closest('[data-panel]')?.dataset.panel, text, over])"
    )
    assert not cut, cut[:5]
    assert not tab.faults


def test_a_picture_of_the_token_before_is_marked_until_it_is_drawn_again(open_tab):
    """Lens and attention are asked of the server: until the answer comes they are busy, and then show the new token."""
    tab = open_tab()
    set_length(tab, 20)
    tab.ask("Tell me a story about a fox.")
    lens = tab.page.locator('[data-panel="lens"] table')
    before = lens.inner_text()
    tab.page.route("**/v1/lens", lambda route: held.append(route))
    held: list = []
    with tab.page.expect_request("**/v1/lens"):
        tab.page.locator(ANSWER).nth(4).click()
    tab.page.wait_for_selector('[data-panel="lens"] [aria-busy=true]')
    assert lens.inner_text() == before
    while not held:
        tab.page.wait_for_timeout(20)
    held[0].continue_()
    tab.done()
    assert lens.inner_text() != before
    assert not tab.faults
