"""Pictures: the numbers drawn are those of the result, and any text can be a label."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import birkhoff
from birkhoff import plot
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError, SiteError

TEXT = "abc $x$ \n é"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("plot") / "tiny"
    synth(path, "tiny", seed=1)
    with birkhoff.load(path, cache_bytes=2**26, max_context=256) as engine:
        yield engine


def labels(axis) -> list[str]:
    return [tick.get_text() for tick in axis.get_ticklabels()]


def saved(figure, tmp_path) -> bytes:
    figure.savefig(tmp_path / "picture.png")
    return (tmp_path / "picture.png").read_bytes()


def test_the_film_strip_has_the_mixers_of_every_sublayer(engine, tmp_path):
    trace = engine.trace(TEXT)
    figure = plot.film_strip(trace, position=3)
    pictures = [axes.images[0].get_array() for axes in figure.axes if axes.images][:12]
    for row, hook in enumerate(plot.MIXERS):
        for layer in range(6):
            assert np.allclose(pictures[row * 6 + layer], trace[hook, layer][3].numpy())
    assert saved(figure, tmp_path).startswith(b"\x89PNG")
    with pytest.raises(SiteError, match="the trace has no mhc_attn_res_mix, mhc_ffn_res_mix"):
        plot.film_strip(engine.trace(TEXT, "mlp_out"))


def test_the_lens_has_the_best_token_at_every_depth(engine, tmp_path):
    lens = engine.lens(TEXT)
    figure = plot.lens(lens, positions=5)
    drawn = figure.axes[0].images[0].get_array()
    assert drawn.shape == (7, 5)
    best = lens.logits(2)[-5:].softmax(-1).max(-1)
    assert np.allclose(drawn[7 - 1 - 2], best.values.numpy()) and len(figure.axes[0].texts) == 35
    assert labels(figure.axes[0].yaxis) == [str(depth) for depth in range(6, -1, -1)]
    assert saved(figure, tmp_path)


def test_attention_is_spread_over_the_tokens_of_a_block(engine, tmp_path):
    ids = list(range(5, 45))
    readouts = engine.attention(ids)
    drawn = plot.attention(readouts).axes[0].images[0].get_array()
    assert drawn.shape == (6, 41) and np.allclose(drawn.sum(1), 1, atol=1e-5)
    compressed = next(layer for layer, readout in enumerate(readouts) if len(readout.entries))
    readout = readouts[compressed]
    first = float(readout.entries[0]) / readout.ratio
    assert np.allclose(drawn[compressed, : readout.ratio], first + 0, atol=1e-6)  # outside the window
    assert np.allclose(drawn[:, -1], [each.sink for each in readouts])
    names = engine.token_texts(ids)
    figure = plot.attention(readouts, names)
    assert labels(figure.axes[0].xaxis)[-1] == "sink" and saved(figure, tmp_path)
    with pytest.raises(OptionError, match="3 tokens for 40 positions"):
        plot.attention(readouts, names[:3])


def test_patterns_have_a_panel_for_each_head(engine, tmp_path):
    text = "a rather long text"
    patterns = engine.attention_patterns(text, [1, 3])
    heads = patterns[1].sink.shape[0]
    figure = plot.attention_patterns(patterns)
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == [f"{l}.{h}" for l in (1, 3) for h in range(heads)]
    assert saved(figure, tmp_path).startswith(b"\x89PNG")
    weights = np.asarray(panels[heads].images[0].get_array())
    expected = torch.cat((patterns[3].by_token()[0], patterns[3].sink[0].unsqueeze(-1)), -1)
    assert np.allclose(weights, expected.numpy()) and np.allclose(weights.sum(-1), 1, atol=1e-4)
    one = plot.attention_patterns(patterns[3], heads=1)
    names = engine.token_texts(engine.prompt_ids(text))
    assert labels(one.axes[0].yaxis) == labels(one.axes[0].xaxis)[:-1] and len(names) + 1 == weights.shape[1]
    assert labels(one.axes[0].xaxis)[-1] == "sink" and labels(one.axes[0].yaxis)[-1] == names[-1]
    axes = one.axes[0]
    assert plot.attention_patterns(patterns[1], 0, axes=axes) is one and axes.get_title() == "1.0"
    for wrong, says in [
        (lambda: plot.attention_patterns(patterns, heads=[99]), "this model has heads 0.."),
        (lambda: plot.attention_patterns({}), "there are no patterns"),
        (lambda: plot.attention_patterns(patterns, heads=[]), "these are 0 heads"),
        (
            lambda: plot.attention_patterns(patterns, heads=0, axes=axes),
            "expected one, which is drawn into axes",
        ),
        (lambda: plot.attention_patterns(patterns, tokens=["a"]), "there are 1 tokens for"),
    ]:
        with pytest.raises(OptionError, match=says):
            wrong()


@pytest.mark.parametrize(
    ("ending", "start"),
    [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("html", b"<!doctype html>")],
)
def test_pictures_are_saved_by_the_ending_of_the_file(tmp_path, ending, start):
    figure = plot.steering_sweep({0.0: 1.3, 1.0: 2.4}, label="logit of happy")
    plot.save(figure, tmp_path / f"sweep.{ending}")
    content = (tmp_path / f"sweep.{ending}").read_bytes()
    assert content.startswith(start)
    if ending == "html":
        assert (
            content.count(b"<svg") == 1
            and content.rstrip().endswith(b"</html>")
            and b"http-equiv" not in content
        )
    with pytest.raises(OptionError, match=r"has the ending 'xyz', expected one of .*html.*png"):
        plot.save(figure, tmp_path / "sweep.xyz")


def test_sweeps_and_attributions(engine, tmp_path):
    sweep = engine.patch_sweep("abc", "abd", "x", ["mlp_out", "post_attn"], layers=[1, 2])
    for recovered, values in ((True, sweep.recovered), (False, sweep.values)):
        figure = plot.patch_sweep(sweep, recovered)
        assert np.allclose(figure.axes[0].images[0].get_array(), values.reshape(4, -1).numpy())
    assert labels(figure.axes[0].yaxis)[0] == "hook mlp_out, layer 1" and saved(figure, tmp_path)
    terms = engine.logit_attribution("abc")
    figure = plot.attribution(terms, "head", k=5)
    assert sorted(bar.get_width() for bar in figure.axes[0].patches) == sorted(
        v for _, v in terms.top("head", 5)
    )
    assert saved(figure, tmp_path)


def test_a_steering_sweep_is_a_line_for_each_name(tmp_path):
    figure = plot.steering_sweep({1.0: {"a": 2, "$b": 3}, 0.0: {"a": 1, "$b": 0}})
    (a, b) = figure.axes[0].lines[:2]
    assert a.get_xydata().tolist() == [[0, 1], [1, 2]] and b.get_xydata().tolist() == [[0, 0], [1, 3]]
    assert saved(figure, tmp_path)
    single = plot.steering_sweep({0: torch.tensor(1.0), 2: 5}, label="loss")
    assert single.axes[0].get_ylabel() == "loss"
    for bad, says in (({}, "expected numbers by scale"), ({0: {"a": 1}, 1: {"b": 2}}, "different names")):
        with pytest.raises(OptionError, match=says):
            plot.steering_sweep(bad)


def test_a_picture_can_be_drawn_into_axes_of_the_caller():
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert plot.steering_sweep({0: 1, 1: 2}, axes=right) is figure
    assert len(right.lines) == 2 and not left.lines


def test_the_package_imports_without_matplotlib():
    """Importing `birkhoff.plot` needs nothing; drawing says what to install."""
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from birkhoff import plot\nfrom birkhoff.errors import OptionError\n"
        "try:\n    plot.steering_sweep({0: 1})\nexcept OptionError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "birkhoff-v4[plot]" in done.stdout, done.stderr
