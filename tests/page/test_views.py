"""Every view in a real browser against a real server: empty, live and in error; pinning; no script errors."""

import json
import time

import pytest

from tests.page.conftest import copied, share

PANELS = ["heatmap", "film", "lineage", "experts", "lens", "memory"]
LOOKS = ["inside", "features", "contrast", "requests", "captures"]


def panel(tab, name):
    return tab.page.locator(f'[data-panel="{name}"]')


@pytest.fixture(scope="module")
def answered(chromium, server):
    """A page with one response, shared by read-only tests."""
    from tests.page.conftest import Tab

    tab = Tab(chromium, server.url)
    tab.page.fill("input[type=number][max='4096']", "24")
    tab.page.keyboard.press("Tab")
    tab.ask("Tell me a story about a fox.")
    yield tab
    tab.close()


def test_empty_views_say_what_to_do(open_tab):
    tab = open_tab()
    tab.page.wait_for_selector("#model:has-text('layers')")
    for name in PANELS:
        assert panel(tab, name).locator(".empty").inner_text()
    for look in LOOKS:
        tab.page.click(f"#tab-{look}")
        tab.page.locator(f"#page-{look}").wait_for()
        tab.page.locator(f"#page-{look} .empty, #page-{look} .fault, #page-{look} table").first.wait_for()
    assert not tab.faults


def test_a_live_answer_fills_every_panel(answered):
    tab = answered
    tokens = tab.page.locator('[data-strip="answer"] .tok')
    assert tokens.count() > 3
    tokens.nth(2).click()
    tab.page.wait_for_selector('[data-panel="lens"] table')
    tab.page.wait_for_selector('[data-panel="memory"] canvas')
    for name in ("heatmap", "film", "experts"):
        panel(tab, name).locator("canvas").first.wait_for()
    tab.page.wait_for_function("() => document.querySelectorAll('[data-panel=lineage] td').length === 16")
    assert not tab.faults


def test_the_pinned_token_is_the_same_in_every_panel(answered):
    tab = answered
    tokens = tab.page.locator('[data-strip="answer"] .tok')
    shown = ""
    for index in (1, 5):
        tokens.nth(index).click()
        position = tokens.nth(index).get_attribute("data-position")
        tab.page.wait_for_function(
            f"() => document.querySelector('[data-pin]')?.textContent.includes('position {position}')"
        )
        tab.page.wait_for_selector(f'[data-strip="answer"] .tok.pinned[data-position="{position}"]')
        shown = tab.page.wait_for_function(
            """before => {
                const panels = [...document.querySelectorAll('[data-panel="lineage"], [data-panel="lens"]')];
                const text = panels.map(panel => panel.innerText).join(" ");
                return !panels.some(panel => panel.querySelector("[aria-busy=true]")) && text !== before && text;
            }""",
            arg=shown,
        ).json_value()  # another text for another token
    assert not tab.faults


def test_a_click_in_the_heat_map_pins_that_column(answered):
    tab = answered
    canvas = panel(tab, "heatmap").locator("canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    tab.page.mouse.click(box["x"] + 60, box["y"] + 40)
    tab.page.wait_for_function(
        "() => document.querySelector('[data-pin]')?.textContent.includes('position 0')"
    )
    canvas.focus()
    tab.page.keyboard.press("ArrowRight")
    tab.page.wait_for_function(
        "() => document.querySelector('[data-pin]')?.textContent.includes('position 1')"
    )


@pytest.mark.parametrize(
    "scalar", ["stream_share", "read", "write", "keep", "stochastic", "experts", "lens", "blocks", "sink"]
)
def test_every_scalar_can_be_shown(answered, scalar):
    tab = answered
    tab.page.select_option('[data-panel="heatmap"] select >> nth=0', scalar)
    tab.page.wait_for_function(  # more than eight colours, once the values have come and are painted
        "() => { const node = document.querySelector('[data-panel=heatmap] .figure canvas');"
        " if (!node?.width) return false;"
        " const d = node.getContext('2d').getImageData(0, 0, node.width, node.height).data, seen = new Set();"
        " for (let i = 0; i < d.length; i += 4) seen.add(d[i] * 65536 + d[i + 1] * 256 + d[i + 2]);"
        " return seen.size > 8; }"
    )
    assert not tab.faults


def test_copied_data_and_python_match_the_panels(answered):
    tab = answered
    tab.page.locator('[data-strip="answer"] .tok').nth(3).click()
    share(tab, "film", "Copy data")
    copied(tab, '"res_mix"')
    share(tab, "heatmap", "Copy Python")
    compile(copied(tab, "engine = birkhoff.load"), "copied", "exec")


def test_an_error_is_shown_with_its_message(open_tab):
    tab = open_tab()
    tab.page.fill("input[type=number][max='4096']", "99999")
    tab.page.keyboard.press("Tab")
    tab.ask("Hello.", wait=False)
    tab.page.wait_for_selector("#page-chat .fault")
    assert "99999" in tab.page.inner_text("#page-chat .fault") or "context" in tab.page.inner_text(
        "#page-chat .fault"
    )
    tab.page.fill("input[type=number][max='4096']", "8")
    tab.page.keyboard.press("Tab")
    tab.ask("Hello again.")
    assert not tab.faults


def test_the_steer_view_steers_and_marks_differing_tokens(open_tab, server):
    """A vector made on the page changes the output; moving the slider runs one pair at a time and the last wins."""
    tab = open_tab()
    tab.page.fill("input[type=number][max='4096']", "20")
    tab.page.keyboard.press("Tab")
    tab.page.click("#tab-contrast")
    tab.page.click("#contrast-run")
    tab.page.wait_for_selector('[data-panel="contrast"] td')
    name = f"test-{server.port}"
    tab.page.fill('[data-panel="contrast"] input[type=text]', name)
    tab.page.click("#save-vector")
    tab.page.wait_for_selector(f"#toast:has-text('Saved as {name}')")
    tab.page.click("#steer-saved")
    slider = tab.page.locator(f"input[type=range][aria-label='strength of {name}']")
    requests = []
    tab.page.on("request", lambda r: requests.append(r) if "/v1/chat/completions" in r.url else None)
    slider.evaluate("node => { node.value = 8; node.dispatchEvent(new Event('input')); }")
    tab.page.click("#steer-run")
    tab.page.wait_for_function(
        "() => document.querySelectorAll('[aria-busy=true]').length === 0"
        " && document.querySelectorAll('[data-strip=steered] .tok').length > 5",
        timeout=300_000,
    )
    plain, steered = (
        tab.page.inner_text('[data-strip="plain"]'),
        tab.page.inner_text('[data-strip="steered"]'),
    )
    assert plain != steered
    assert tab.page.locator(".tok.differs").count() > 0
    assert "norm growth" in tab.page.inner_text(".health")
    requests.clear()
    slider.focus()
    start = time.monotonic()
    for _ in range(12):  # a drag: a run starts only when the slider pauses, and cancels the previous one
        tab.page.keyboard.press("ArrowLeft")
        tab.page.wait_for_timeout(60)
    last = float(slider.input_value())

    def last_value_was_requested():
        return requests and abs(requests[-1].post_data_json["interventions"][0]["scale"] - last) < 1e-9

    for _ in range(600):
        if last_value_was_requested():
            break
        tab.page.wait_for_timeout(100)
    assert last_value_was_requested()
    pauses = (time.monotonic() - start) / 0.18  # upper bound on the number of pauses
    assert len(requests) <= pauses + 1, "requests were sent while the slider was moving"
    tab.page.wait_for_function(
        "() => document.querySelectorAll('[aria-busy=true]').length === 0", timeout=300_000
    )
    assert not tab.faults


def test_an_empty_steer_view_states_what_is_missing(open_tab):
    tab = open_tab()
    tab.page.click("#tab-steer")
    tab.page.click("#page-steer .edit button:has-text('Remove')")
    tab.page.click("#steer-run")
    assert "are no edits" in tab.page.inner_text("#page-steer .fault")
    assert not tab.faults


def test_the_sweep_answers_at_nine_strengths(open_tab):
    """Each strength is answered once and scored once; only the first, which is 0, has no edit."""
    tab = open_tab()
    tab.page.click("#tab-steer")
    tab.page.wait_for_selector("#page-steer .edit")
    bodies = []
    tab.page.on(
        "request", lambda r: bodies.append(r.post_data_json) if "/v1/chat/completions" in r.url else None
    )
    tab.page.click("#sweep-run")
    tab.page.wait_for_selector('[data-panel="sweep"] p.note')
    cells = tab.page.locator('[data-panel="sweep"] tbody td.number').all_inner_texts()
    strengths = [float(text.replace("\N{MINUS SIGN}", "-")) for text in cells[::2]]
    assert len(strengths) == 9 and strengths == sorted(strengths) and strengths[0] == 0
    assert len(bodies) == 9 and sum("interventions" not in body for body in bodies) == 1
    assert not tab.faults


def test_retry_samples_again(open_tab):
    tab = open_tab()
    tab.page.fill("input[type=number][max='4096']", "14")
    tab.page.keyboard.press("Tab")
    tab.ask("Tell me a story about a cat.")
    first = tab.page.inner_text('[data-strip="answer"]')
    with tab.page.expect_response(lambda answer: "/v1/chat/completions" in answer.url):
        tab.page.click("#retry")
    tab.done()
    assert tab.page.inner_text('[data-strip="answer"]') != first, "another seed gave the same output"
    assert not tab.faults


def test_the_bench_edits_mixers_routers_and_attention_and_gates_vectors(open_tab):
    tab = open_tab()
    tab.page.wait_for_selector("#model:has-text('layers')")
    tab.page.fill("input[type=number][max='4096']", "8")
    tab.page.keyboard.press("Tab")
    tab.page.click("#tab-steer")
    for kind in ("mixer", "experts", "attention"):
        tab.page.select_option("#add-edit", f":{kind}")
        tab.page.click("#add-button")
    for label, text in (("never these", "1"), ("hidden tokens: 0,1 or a text", "fox"), ("sink times", "0.5")):
        tab.page.get_by_label(label).fill(text)
        tab.page.keyboard.press("Tab")
    tab.page.click('#page-steer .edit[data-kind="vector"] summary')
    tab.page.get_by_label("only tokens").select_option(":letters")
    with tab.page.expect_request(lambda sent: "interventions" in (sent.post_data or "")) as sent:
        tab.page.click("#steer-run")
    vector, *others = json.loads(sent.value.post_data)["interventions"]
    assert vector["op"] == "add" and vector["when"] == {"tokens": "letters"}
    assert others == [
        {"op": "patch", "at": {"hook": "mhc_res_mix", "layers": "all"}, "source": "identity"},
        {"op": "experts", "at": {"layers": "all"}, "force": [0], "ban": [1]},
        {"op": "attention", "at": {"layers": "all"}, "mask": {"text": "fox"}, "sink": 0.5},
    ]
    tab.page.wait_for_function(
        "() => document.querySelectorAll('[data-strip=plain] .tok').length > 5"
        " && document.querySelectorAll('[data-strip=steered] .tok').length > 1",
        timeout=300_000,
    )
    tab.page.get_by_label("never these").fill("many")
    tab.page.keyboard.press("Tab")
    tab.page.click("#steer-run")
    assert "is no number from 0" in tab.page.inner_text("#page-steer .fault")
    assert not tab.faults


def test_a_circuit_is_found_and_drawn(open_tab):
    tab = open_tab()
    tab.page.wait_for_selector("#model:has-text('layers')")
    tab.page.click("#tab-circuit")
    tab.page.click("#page-circuit button:has-text('Find the circuit')")
    tab.page.wait_for_selector("#page-circuit img", timeout=600_000)
    said = tab.page.inner_text("#page-circuit p:has-text('nodes keep')")
    assert "Random sets" in said and "is left" in said
    tab.page.wait_for_function("() => document.querySelector('#page-circuit img')?.naturalWidth > 100")
    assert "post_attn[" in tab.page.get_attribute("#page-circuit img", "alt")
    assert not tab.faults
