"""“Copy Python” gives lines that run and compute the numbers of the picture they were copied from."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
from unittest.mock import MagicMock

import pytest
import torch

from tests.page.conftest import Tab, copied, share
from tests.sizes import scaled


@pytest.fixture(scope="module")
def answered(chromium, server):
    tab = Tab(chromium, server.url)
    tab.page.fill("input[type=number][max='4096']", "16")
    tab.page.keyboard.press("Tab")
    tab.ask("Tell me a story about a fox.")
    tab.page.locator('[data-strip="answer"] .tok').nth(5).click()
    tab.page.keyboard.press("Escape")
    tab.page.wait_for_selector('[data-panel="lens"] table')
    tab.page.wait_for_selector('[data-panel="memory"] canvas')
    yield tab
    tab.close()


@pytest.fixture
def run(monkeypatch):
    """Runs copied lines as they are. Only the plotting library, which tests need not have, is replaced."""
    if importlib.util.find_spec("matplotlib") is None:
        plotting = MagicMock()
        plotting.pyplot.subplots.side_effect = lambda *_, **__: (MagicMock(), MagicMock())
        monkeypatch.setitem(sys.modules, "matplotlib", plotting)
        monkeypatch.setitem(sys.modules, "matplotlib.pyplot", plotting.pyplot)
    else:
        import matplotlib.pyplot

        matplotlib.use("agg")
        monkeypatch.setattr(matplotlib.pyplot, "show", lambda: matplotlib.pyplot.close("all"))

    def execute(code: str) -> dict:
        names: dict = {}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "copied", "exec"), names)
        names["engine"].close()
        return names | {"printed": printed.getvalue()}

    return execute


def both(tab: Tab, panel: str) -> tuple[dict, str]:
    """The data and the Python of a panel."""
    tab.page.evaluate("navigator.clipboard.writeText('')")
    share(tab, panel, "Copy data")
    data = json.loads(copied(tab, "{" if panel != "experts" else "["))
    share(tab, panel, "Copy Python")
    return data, copied(tab, "import birkhoff")


def close(values, expected, tolerance: float = 2e-3) -> None:
    found = torch.as_tensor(values).double()
    wanted = torch.tensor([[float("nan") if x is None else x for x in row] for row in expected]).double()
    assert found.shape[0] == wanted.shape[0]
    width = min(found.shape[1], wanted.shape[1])  # the last token of an answer has no signals on the page
    assert width >= wanted.shape[1] - 1
    known = ~wanted[:, :width].isnan()
    assert known.any()
    difference = (found[:, :width][known] - wanted[:, :width][known]).abs()
    assert float(difference.max()) <= tolerance * max(1.0, float(wanted[:, :width][known].abs().max()))


SCALARS = [
    "experts",
    "stream_share",
    "lens",
    "blocks",
    "stream_norm",
    "stochastic",
    "read",
    "write",
    "keep",
    "sink",
]


@pytest.mark.parametrize("scalar", SCALARS[: scaled(len(SCALARS), 4)])
def test_the_heat_map_is_computed_again(answered, run, scalar):
    answered.page.select_option('[data-panel="heatmap"] select >> nth=0', scalar)
    data: dict = {}
    while data.get("scalar") != scalar:  # some are asked of the server first
        answered.page.wait_for_selector('[data-panel="heatmap"] .figure canvas')
        data, code = both(answered, "heatmap")
    close(run(code)["values"], data["values"])


def test_film_strip_lineage_and_experts_are_computed_again(answered, run):
    data, code = both(answered, "film")
    film = torch.tensor(run(code)["values"])
    assert torch.allclose(film, torch.tensor(data["res_mix"]), atol=1e-3)
    data, code = both(answered, "lineage")
    assert torch.allclose(run(code)["values"], torch.tensor(data["product"]), atol=1e-3)
    data, code = both(answered, "experts")
    assert torch.allclose(torch.tensor(run(code)["values"]), torch.tensor(data), atol=1e-3)


def test_lens_and_attention_are_computed_again(answered, run):
    data, code = both(answered, "lens")
    shown = [[view[0]["token_id"] for view in depth] for depth in data["top"]]
    assert [[token for token, _ in depth] for depth in run(code)["values"]] == shown
    data, code = both(answered, "memory")
    sinks = torch.tensor([memory.sink for memory in run(code)["values"]])
    assert torch.allclose(sinks, torch.tensor([layer["sink"] for layer in data["layers"]]), atol=1e-3)


def test_the_answer_is_generated_again(answered, run):
    shown = answered.page.inner_text('[data-strip="answer"]').replace("⏎", "")
    share(answered, "chat", "Copy Python")
    printed = run(copied(answered, "engine.chat("))["printed"]
    assert printed.split() == shown.split()


def test_the_steered_answer_and_its_twin_are_generated_again(answered, run):
    page = answered.page
    page.click("#tab-steer")
    page.click("#steer-run")
    page.wait_for_function(
        "() => document.querySelectorAll('[aria-busy=true]').length === 0"
        " && document.querySelectorAll('[data-strip=steered] .tok').length > 5"
    )
    strips = [page.inner_text(f'[data-strip="{name}"]').replace("⏎", "") for name in ("steered", "plain")]
    share(answered, "bench", "Copy Python")
    printed = run(copied(answered, "baseline=True"))["printed"]
    assert printed.split() == " ".join(strips).split()
    page.click("#tab-chat")


def test_features_are_computed_again(answered, run):
    page = answered.page
    page.click("#tab-features")
    page.wait_for_selector('[data-panel="features"] .feature')
    data, code = both(answered, "features")
    values = run(code)["values"]
    for token, found in zip(data["tokens"], values, strict=True):
        assert [f["feature"] for f in token["features"][:3]] == [f.feature for f in found[:3]]
    page.locator('[data-panel="features"] .feature').first.click()
    page.wait_for_selector('[data-panel="dashboard"] .context')
    data, code = both(answered, "dashboard")
    assert data["label"] in run(code)["printed"]


def test_the_comparison_is_computed_again(answered, run):
    page = answered.page
    page.click("#tab-contrast")
    page.click("#contrast-run")
    page.wait_for_selector('[data-panel="contrast"] td')
    data, code = both(answered, "contrast")
    values = run(code)["values"]
    table = [auc for row in data["table"] for auc in row]
    assert [entry.auc for entry in values] == pytest.approx(table, abs=1e-6)
