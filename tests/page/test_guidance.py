"""What helps a newcomer: examples, explanations, the tour, a ready bench, search, clamps that lead to the bench."""

from __future__ import annotations

from tests.page.conftest import Tab


def short_answers(tab: Tab) -> None:
    tab.page.fill("input[type=number][max='4096']", "12")
    tab.page.keyboard.press("Tab")


def test_an_example_prompt_is_one_click(open_tab):
    tab = open_tab()
    tab.page.wait_for_selector("#model:has-text('layers')")
    short_answers(tab)
    assert tab.page.locator(".example").count() >= 3
    text = tab.page.locator(".example").first.inner_text()
    tab.page.locator(".example").first.click()
    tab.done()
    assert tab.page.inner_text(".message.user .text") == text
    assert not tab.faults


def test_every_panel_says_what_it_shows(open_tab):
    tab = open_tab()
    without = tab.page.evaluate(
        "() => [...document.querySelectorAll('[data-panel]')].filter(n => !n.querySelector(':scope > .about p'))"
        ".map(n => n.dataset.panel)"
    )
    assert set(without) <= {"circuits"}, without
    about = tab.page.locator('[data-panel="film"] .about')
    assert not about.locator("p").first.is_visible()
    about.locator("summary").click()
    assert "streams" in about.locator("p").first.inner_text()


def test_the_tour_walks_through_the_page(open_tab):
    tab = open_tab()
    page = tab.page
    page.wait_for_selector("#model:has-text('layers')")
    page.click("#tour")
    seen = []
    for _ in range(12):
        seen.append(page.inner_text("#tour-card p"))
        page.wait_for_selector(".toured")
        page.click("#tour-next")
        if not page.locator("#tour-card").count():
            break
    assert 5 <= len(seen) == len(set(seen))
    assert page.locator(".toured").count() == 0
    assert page.locator("#page-chat").is_visible() and page.locator("#page-inside").is_visible()
    page.click("#tour")
    page.keyboard.press("Escape")
    assert page.locator("#tour-card").count() == 0
    assert not tab.faults


def test_the_bench_is_ready_wide_and_tells_about_its_vector(open_tab):
    tab = open_tab(width=1280, height=800)
    page = tab.page
    short_answers(tab)
    page.wait_for_selector(".edit", state="attached")
    page.click("#tab-steer")
    page.wait_for_selector("main[data-talk=steer]")  # the page draws its state in the next frame
    assert page.locator("#talk").bounding_box()["width"] > 1100
    assert page.inner_text("[data-note]")
    page.click("#steer-run")  # nothing else is needed
    page.wait_for_function(
        "() => document.querySelectorAll('[aria-busy=true]').length === 0"
        " && document.querySelectorAll('[data-strip=steered] .tok').length > 5"
    )
    page.click("#tab-chat")
    page.wait_for_selector("main[data-talk=chat]")
    assert page.locator("#talk").bounding_box()["width"] < 700
    assert not tab.faults


def test_streams_experts_and_layer_kinds_are_named(open_tab):
    tab = open_tab()
    short_answers(tab)
    tab.ask("Tell me a story.")
    tab.page.wait_for_selector('[data-panel="memory"] .kinds')
    assert "indexer" in tab.page.inner_text('[data-panel="memory"] .kinds')
    legend = tab.page.inner_text('[data-panel="film"] .streams').split()
    assert legend == ["stream", "0", "stream", "1", "stream", "2", "stream", "3"]


def test_a_word_finds_features_and_a_clamp_leads_to_the_bench(open_tab):
    tab = open_tab()
    page = tab.page
    short_answers(tab)
    page.click("#tab-features")
    page.fill("#feature-search", "sea")
    page.press("#feature-search", "Enter")
    first = page.locator("[data-found] .feature").first
    first.wait_for()
    assert "sea" in first.inner_text()
    number = first.locator(".mono").first.inner_text().removeprefix("#")
    first.click()
    page.wait_for_selector('[data-panel="dashboard"] .context')
    assert "correlates" in page.inner_text('[data-panel="dashboard"]')
    assert "drawn at random" in page.inner_text('[data-panel="dashboard"]')
    page.click("#clamp")
    page.wait_for_selector(f".edit strong:has-text('feature {number}')")
    assert page.locator("#page-steer").is_visible()
    assert page.locator(".edit").count() == 1, "the suggested vector gives way"
    page.click("#steer-run")
    page.wait_for_function(
        "() => document.querySelectorAll('[aria-busy=true]').length === 0"
        " && document.querySelectorAll('[data-strip=steered] .tok').length > 5"
    )
    page.fill("#feature-search", "zzqx")
    page.press("#feature-search", "Enter")
    page.wait_for_selector("[data-found] .empty")
    assert not tab.faults


def test_features_are_ordered_by_how_specific_they_are(open_tab, server):
    """Features of most tokens lead by strength on every token; the page asks for the other order and says so."""
    tab = open_tab()
    page = tab.page
    short_answers(tab)

    def asks(request) -> bool:
        return request.method == "POST" and request.url.endswith("/v1/interp/features")

    with page.expect_request(asks) as asked:
        tab.ask("Tell me about the sea.")
        page.click("#tab-features")
    assert asked.value.post_data_json["order"] == "specific"
    page.wait_for_selector('[data-panel="features"] .feature')
    assert "features of most tokens come last" in page.inner_text('[data-panel="features"]')
    with page.expect_request(asks) as asked:
        page.select_option("[aria-label='order of features']", "strength")
    body = asked.value.post_data_json
    assert body["order"] == "strength"
    density = {
        order: [
            token["features"][0]["density"]
            for token in server.post("v1/interp/features", {**body, "order": order})["tokens"]
        ]
        for order in ("specific", "strength")
    }
    assert sum(density["specific"]) < sum(density["strength"]) / 2
    assert not tab.faults


def test_every_active_feature_of_a_text_has_a_label(open_tab, server):
    ids = server.post("tokenize", {"prompt": "The little dog ran to the sea and found a boat."})["tokens"]
    answer = server.post("v1/interp/features", {"sae": "nano", "token_ids": ids, "k": 32})
    active = [feature for token in answer["tokens"] for feature in token["features"]]
    assert len(active) > 100 and all(feature.get("label") for feature in active)
