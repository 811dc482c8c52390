"""The page on an ordinary model: chat, heat map and lens work, views of V4's parts say why they are empty."""

from __future__ import annotations

import pytest

from birkhoff.steering.vector_file import SteeringVector
from tests.hf.models import D, make
from tests.hf.test_loading import TEMPLATE, byte_level, own
from tests.page.conftest import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ordinary")
    tokenizer = own(byte_level(), TEMPLATE)
    make("llama", folder / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder / "model")
    SteeringVector({1: [3.0] * D}, "add", "post_mlp").save(folder / "mine.safetensors")
    flags = ("--backend", "transformers", "--steering-modules", f"mine={folder / 'mine.safetensors'}")
    started = Server(folder, "--model", str(folder / "model"), *flags).start()
    yield started
    started.stop()


def test_views_that_make_sense_work_and_the_others_say_why_not(open_tab):
    tab = open_tab()
    page = tab.page
    page.wait_for_selector("#model:has-text('3 layers · one residual stream of 32')")
    page.fill("input[type=number][max='4096']", "6")
    page.keyboard.press("Tab")
    tab.ask("the quick brown fox")
    page.locator('[data-strip="answer"] .tok').first.click()
    page.wait_for_selector('[data-panel="heatmap"] canvas')  # surprisal under the logit lens
    page.wait_for_selector('[data-panel="lens"] table')
    assert page.locator('[data-panel="lens"] thead th').all_inner_texts() == ["depth", "head"]
    for panel in ("film", "lineage", "experts", "memory"):
        page.wait_for_selector(f'[data-panel="{panel}"] :text("one residual stream")')
    enabled = page.locator('select[aria-label="heat map value"] option:not([disabled])').all_inner_texts()
    assert enabled == ["surprisal under the logit lens"]
    for look in ("features", "contrast", "requests", "captures"):
        page.click(f"#tab-{look}")
        page.wait_for_timeout(100)
    assert page.locator('select[aria-label="site"]').input_value() == "post_mlp"
    page.click("#tab-circuit")
    fields = page.locator('[data-panel="circuit"] form input').all()
    for field, text in zip(fields, ("the quick brown", "zero", " fox", ""), strict=True):
        field.fill(text)
    page.click("button:has-text('Find the circuit')")
    alt = page.wait_for_selector('[data-panel="circuit"] img').get_attribute("alt")
    assert "attn_out[" in alt or "mlp_out[" in alt
    assert page.locator('[data-panel="circuit"] .legend.streams span').count() == 0
    assert not tab.faults


def test_steering_side_by_side_claims_nothing_about_streams(open_tab):
    tab = open_tab()
    page = tab.page
    page.wait_for_selector("#model:has-text('one residual stream')")
    page.click("#tab-steer")
    page.fill("#steer-prompt", "the quick brown")
    page.click("#steer-run")
    tab.done()
    page.wait_for_selector('[data-strip="steered"] .tok')
    page.wait_for_selector("text=repetition")
    shown = page.inner_text("main")
    assert "repetition" in shown and "doubly stochastic within" not in shown and "norm growth" not in shown
    assert not tab.faults
