"""What notebooks show: HTML of results, with text escaped, and progress bars."""

from __future__ import annotations

import re
import sys
import types
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import birkhoff
from birkhoff import Capture, notebook
from birkhoff.analysis.harvest import harvest
from birkhoff.capture.store.reader import read_request
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError, PackageMissing

VOID = {"br", "hr", "img", "progress"}


class Reader(HTMLParser):
    """Collects text and checks that tags are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.styles, self.titles = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.styles.append(dict(attrs).get("style", ""))
        if "title" in dict(attrs):
            self.titles.append(dict(attrs)["title"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(source: str) -> Reader:
    reader = Reader()
    reader.feed(source)
    reader.close()
    assert not reader.open and "<script" not in source
    return reader


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("notebook") / "tiny"
    synth(path, "tiny", seed=1)
    with birkhoff.load(path, cache_bytes=2**26, max_context=128, capture_root=path.parent / "kept") as engine:
        yield engine


@given(st.lists(st.tuples(st.text(max_size=8), st.none() | st.floats(-5, 5)), min_size=1, max_size=6))
def test_any_text_is_shown_as_text(pairs):
    texts, values = [text for text, _ in pairs], [value for _, value in pairs]
    shown = read(notebook.tokens(texts, values, "a <signal>"))
    assert len(shown.titles) == len(texts) and shown.texts[0] == "a <signal>"
    read(notebook.heat([values], texts[:1], texts, [texts]))
    read(notebook.table(texts, [values]))
    read(notebook.facts(texts[0], dict(pairs)))


def test_colours_say_sign_and_size():
    up, down, none, zero = notebook.colours([2.0, -1.0, None, 0.0])
    assert notebook.POSITIVE in up and "0.750" in up and notebook.NEGATIVE in down and "0.375" in down
    assert none == "" and "0.000" in zero
    assert notebook.colours([3.0, 3.0]) == ["", ""] and notebook.colours([]) == []
    assert notebook.colours([1.0, 3.0])[0].endswith(
        "0.000)"
    )  # without a sign, from the smallest to the largest


def test_every_result_has_a_picture(engine, tmp_path):
    trace = engine.trace("a <b> text")
    batch = engine.trace(["a", "b c"], "mlp_out")
    output = engine.generate("once", max_tokens=4, capture=Capture({"mlp_out": [1]}), logprobs=0)
    filed = engine.generate(
        "once",
        max_tokens=2,
        capture={"filesystem": {"hooks": {"mlp_out": [1]}, "request_id": "r", "tag": "t"}},
    )
    result = filed.capture_results["filesystem"]
    stored = read_request(engine.capture_roots["filesystem"] / "t" / "r")
    sae = birkhoff.Sae(
        torch.eye(64),
        torch.zeros(64),
        torch.eye(64),
        torch.zeros(64),
        hook="mlp_out",
        layer=2,
        labels={3: "<cats>"},
    )
    sweep = engine.patch_sweep("abc", "abd", "x", "mlp_out", layers=[1, 2])
    attribution = engine.logit_attribution("abc")
    for value, says in [
        (engine, "4 residual streams"),
        (trace, "mhc_streams_pre_attn"),
        (batch, "b c"),
        (output, "finished"),
        (output.acts, "mlp_out[1]"),
        (result, "ok"),
        (stored, "mlp_out[1]"),
        (sae, "<cats>"),
        (engine.lens("abc"), "depth"),
        (sweep, "layer 1"),
        (attribution, "experts[5]"),
        (engine.attribute("abc", "x"), "nodes by gradient"),
        (engine.attribute(["abc", "abd"], "x"), "Mean of 2 texts"),
        (engine.attention("abc")[2], "AttentionReadout(layer 2"),
        (engine.attention_patterns("abc", 2)[2], "token before"),
        (output.acts["mlp_out", 1], "Rows of mlp_out[1]"),
    ]:
        shown = read(value._repr_html_())
        text = " ".join(" ".join(shown.texts).split())
        assert says.replace("4 residual streams", "residual streams 4") in text, (type(value), text)
    assert repr(engine).startswith("Engine(") and "layers, float32 on cpu" in repr(engine)


def results_of(engine) -> dict:
    """One of every kind of result."""
    output = engine.generate("once", max_tokens=4, capture=Capture({"mlp_out": [1]}), logprobs=0)
    scores = engine.attribute("abc", "x")
    with engine.grad("mlp_out") as gradients:
        gradients.backward(engine.logits("abc")[-1, 5])
    batches = engine.stream_acts(["abc"], Capture({"mlp_out": [1]}))
    return {
        "output": output,
        "acts": output.acts,
        "rows": output.acts["mlp_out", 1],
        "trace": engine.trace("abc", "mlp_out"),
        "traces": engine.trace(["abc", "ab"], "mlp_out"),
        "lens": engine.lens("abc"),
        "attention": engine.attention("abc")[2],
        "pattern": engine.attention_patterns("abc", 2)[2],
        "sweep": engine.patch_sweep("abc", "abd", "x", "mlp_out", layers=[1, 2]),
        "sweeps": engine.patch_sweep(["abc", "abd"], ["abd", "abc"], "x", "mlp_out", layers=1),
        "scores": scores,
        "several scores": engine.attribute(["abc", "abd"], "x"),
        "node": scores.top(1)[0],
        "circuit": engine.circuit("abc", "x", baseline="abd"),
        "terms": engine.logit_attribution("abc"),
        "gradients": gradients,
        "batches": batches,
        "batch": next(batches),
        "stream": engine.stream("abc", max_tokens=1),
        "modules": engine.modules,
        "dictionaries": engine.saes,
        "tokenizer": engine.tokenizer,
    }


def test_every_result_says_in_a_line_what_it_is(engine):
    for name, value in results_of(engine).items():
        line = repr(value)
        assert line.startswith(f"{type(value).__name__}(") and line.endswith(")"), name
        assert " at 0x" not in line and "tensor(" not in line and "\n" not in line and len(line) < 300, (
            name,
            line,
        )


def test_results_are_tables_for_other_libraries(engine):
    results = results_of(engine)
    columns = {
        "output": ["position", "token_id", "token", "logprob"],
        "lens": ["depth", "position", "token", "prediction", "probability", "surprise"],
        "attention": ["from", "to", "text", "weight"],
        "sweep": ["layer", "position", "token", "value", "recovered"],
        "sweeps": ["pair", "layer", "position", "token", "value", "recovered"],
        "scores": ["hook", "layer", "position", "token", "score"],
        "several scores": ["text", "hook", "layer", "position", "token", "score"],
        "circuit": ["hook", "layer", "position", "score", "token"],
        "terms": ["term", "value"],
    }
    for name, names in columns.items():
        result = results[name]
        rows = result.records()
        assert rows and all(list(row) == names for row in rows), name
        frame = result.to_pandas()
        assert list(frame.columns) == names and len(frame) == len(rows)
    sweep = results["sweep"]
    best, value = sweep.top(1)[0]
    frame = sweep.to_pandas().set_index(["layer", "position"])
    assert frame.loc[(best["layer"], best["position"]), "value"] == pytest.approx(value)
    assert sum(row["value"] for row in results["terms"].records()) == pytest.approx(results["terms"].logit)
    assert sum(row["weight"] for row in results["attention"].records()) == pytest.approx(1, abs=1e-5)
    by_stream = engine.attribute("abc", "x", ["mlp_out", "streams"], layers=1).records()
    assert {row["stream"] for row in by_stream if row["hook"] == "mlp_out"} == {None}
    assert {row["stream"] for row in by_stream if row["hook"] == "mhc_streams_pre_attn"} == {0, 1, 2, 3}


def test_a_missing_library_of_frames_is_named(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(PackageMissing, match=r"to_polars needs the package polars.*pip install polars"):
        engine.logit_attribution("abc").to_polars()


def test_keys_complete_in_a_notebook(engine):
    results = results_of(engine)
    for name in ("acts", "trace", "traces", "scores", "several scores", "gradients", "batch"):
        keys = results[name]._ipython_key_completions_()
        assert keys and all(results[name][key] is not None for key in keys), name
    engine.modules["mine"] = torch.ones(64)
    assert "mine" in engine.modules._ipython_key_completions_() and "mine" in repr(engine.modules)
    del engine.modules["mine"]


def test_tokens_of_an_output_are_coloured_by_a_chosen_signal(engine):
    output = engine.generate("once", max_tokens=5, ignore_eos=True, signals="all", logprobs=0, seed=1)
    assert len(output.tokens) == 5
    for signal in ("res_mix", "pre_mix", "post_mix", "head_mix", "stream_norm", "experts", "logprob"):
        values = output.values(signal)
        assert len(values) == 5 and all(isinstance(value, float) for value in values[:4])
        shown = read(str(output.show(signal)))
        assert shown.texts[0] == signal and len([s for s in shown.styles if "rgba" in s]) >= 4
        assert any(f"{signal} {values[0]:.4g}" in title for title in shown.titles)
    assert output.values("stream_norm")[4] is None  # the last token of an answer is never computed
    frame = output.signals[len(output.prompt_token_ids)]
    norms = torch.tensor(frame["stream_norm"])[-1]
    assert output.values("stream_norm")[0] == pytest.approx(float(norms.mean()))
    mix = torch.tensor(frame["res_mix"])
    kept = mix.diagonal(dim1=-2, dim2=-1).sum(-1).mean() / 4
    assert output.values("res_mix")[0] == pytest.approx(1 - float(kept), abs=1e-6)
    assert output.values("logprob") == [entry.logprob for entry in output.logprobs]
    assert read(str(output.show([1, 2, 3, 4, 5]))).titles[0].endswith("value 1")
    assert read(output._repr_html_()).texts[0] in (
        "res_mix",
        "pre_mix",
        "post_mix",
        "head_mix",
        "stream_norm",
        "experts",
    )
    with pytest.raises(OptionError, match="3 numbers for 5 tokens"):
        output.show([1, 2, 3])
    with pytest.raises(OptionError, match="signal is 'entropy', this output has experts"):
        output.show("entropy")
    plain = engine.generate("once", max_tokens=2)
    assert "rgba" not in plain._repr_html_()
    with pytest.raises(OptionError, match="there are no logprobs"):
        plain.show("logprob")


class Kernel:
    """The part of IPython that a notebook kernel provides: display with handles that can be updated."""

    def __init__(self):
        self.pictures: list[str] = []
        self.kernel = object()

    def display(self, value, display_id=False):
        self.pictures.append(value._repr_html_())
        return self

    def update(self, value):
        self.pictures.append(value._repr_html_())


@pytest.fixture
def kernel(monkeypatch):
    kernel = Kernel()
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: kernel
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", kernel)
    return kernel


def test_a_notebook_shows_progress(kernel, engine, tmp_path):
    synth(tmp_path / "tiny", "tiny")
    with birkhoff.load(tmp_path / "tiny", cache_bytes=2**26):
        pass
    assert "loading" in kernel.pictures[0] and re.search(r"([\d,]+) of \1", kernel.pictures[-1])
    kernel.pictures.clear()
    engine.patch_sweep("abc", "abd", "x", "mlp_out", layers=[1])
    assert "patching cells" in kernel.pictures[0] and "5 of 5" in kernel.pictures[-1]
    kernel.pictures.clear()
    harvest(engine, ["abc", "de"], Capture({"mlp_out": [1]}), tmp_path / "rows")
    assert "capturing texts" in kernel.pictures[0] and "2 of 2" in kernel.pictures[-1]


def test_without_a_notebook_there_is_no_bar():
    assert notebook.progress("x") is None
