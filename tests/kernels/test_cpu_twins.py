"""The compiled twins against the plain ones: any row count, odd widths, any memory layout, both dtypes.

The files beside this one hold every twin against its definition; here they are held against each other where they could
part company without either being far from the definition: strides, dtypes, the borders between methods, who owns the
memory, and a machine that has no compiler or nowhere to keep what it compiled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import birkhoff
from birkhoff.kernels import jit
from birkhoff.kernels.rope import Phases, frequencies, phases
from birkhoff.kernels.select import TWINS
from tests.models import TINY, random_model, random_tokens

pytestmark = pytest.mark.skipif(not jit.AVAILABLE, reason="no compiler for the CPU twins")

LAYOUTS = ("whole", "every other column", "part of wider rows", "columns first")
rows = st.integers(
    1, 17
)  # across the border where the product changes its method, and the four rows of its loop
layouts = st.sampled_from(LAYOUTS)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
seeds = st.integers(0, 9999)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers, lying differently in memory."""
    if layout == "every other column":
        return torch.stack((x, torch.full_like(x, torch.nan)), dim=-1).flatten(-2)[..., ::2]
    if layout == "part of wider rows":
        return torch.cat((torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)), -1)[
            ..., x.shape[-1] : 2 * x.shape[-1]
        ]
    return x.transpose(0, -1).contiguous().transpose(0, -1) if layout == "columns first" else x


def both(name: str, *arguments, **options):
    """Plain and fast result, each a tuple; the arguments must come out as they went in."""
    before = [a.clone() for a in arguments if isinstance(a, torch.Tensor)]
    results = []
    with torch.no_grad():
        for twin in TWINS[name]:
            out = twin(*arguments, **options)
            results.append(out if isinstance(out, tuple) else (out,))
    after = [a for a in arguments if isinstance(a, torch.Tensor)]
    assert all(a.equal(b) or a.isnan().any() for a, b in zip(before, after)), (
        f"{name} changed what it was given"
    )
    held = {a.untyped_storage().data_ptr() for a in after}
    assert not any(out.untyped_storage().data_ptr() in held for out in results[1]), (
        f"{name} hands back its input"
    )
    return results


def agree(plain, fast, tolerance: float) -> None:
    """Float32 within `tolerance` of the result's scale; bfloat16 within one step of it, which is where ties fall."""
    for true, mine in zip(plain, fast, strict=True):
        assert mine.shape == true.shape and mine.dtype == true.dtype
        step = 2.0**-8 if true.dtype is torch.bfloat16 else tolerance
        assert (mine.double() - true.double()).abs().max() <= step * true.double().abs().max().clamp_min(1.0)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    rows=rows,
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 40),
    x_lies=layouts,
    w_lies=layouts,
    dtype=dtypes,
    seed=seeds,
)
def test_linear(rows, inputs, outputs, x_lies, w_lies, dtype, seed):
    x = laid_out(normal(seed, rows, inputs).to(dtype), x_lies)
    weight = laid_out((normal(seed + 1, outputs, inputs) * inputs**-0.5).to(dtype), w_lies)
    agree(*both("linear", x, weight), 1e-5)


@given(rows=rows, width=st.integers(1, 70), lies=layouts, dtype=dtypes, weighted=st.booleans(), seed=seeds)
def test_rms_norm(rows, width, lies, dtype, weighted, seed):
    x = laid_out(normal(seed, rows, width).to(dtype), lies)
    agree(*both("rms_norm", x, normal(seed + 1, width) if weighted else None, 1e-6), 1e-5)


@given(
    shape=st.sampled_from([("p",), ("p", 3), ("b", "t"), ("b", "t", 5)]),
    rows=st.integers(1, 17),
    still=st.integers(0, 9),
    pairs=st.integers(1, 9),
    inverse=st.booleans(),
    lies=layouts,
    dtype=dtypes,
    seed=seeds,
)
def test_rotate(shape, rows, still, pairs, inverse, lies, dtype, seed):
    """Phases of one axis or two, with heads behind them or without."""
    sizes = [{"p": rows, "b": 2, "t": rows}.get(s, s) for s in shape]
    x = laid_out(normal(seed, *sizes, still + 2 * pairs).to(dtype), lies)
    turn = phases(torch.arange(rows) + seed, frequencies(2 * pairs, 10000.0))
    if "b" in shape:
        turn = Phases(torch.stack((turn.cos, turn.sin)), torch.stack((turn.sin, turn.cos)))
    plain, fast = both("rotate", x, turn, inverse=inverse)
    agree(plain, fast, 1e-6)
    assert torch.equal(fast[0][..., :still], x[..., :still])


@given(
    rows=rows,
    streams=st.integers(1, 5),
    width=st.integers(1, 33),
    iters=st.sampled_from([1, 2, 20]),
    lies=layouts,
    dtype=dtypes,
    seed=seeds,
)
def test_mhc_read_and_write(rows, streams, width, iters, lies, dtype, seed):
    m, size = streams, (2 + streams) * streams
    x = laid_out(normal(seed, rows, m, width).to(dtype), lies)
    fn, base = normal(seed + 1, size, m * width) * (m * width) ** -0.5, normal(seed + 2, size)
    plain, fast = both("mhc_read", x, fn, base, normal(seed + 3, 3) + 1, iters, 1e-6, 1e-6)
    agree(plain, fast, 1e-5)
    _, _, post, mix = plain
    y = laid_out(normal(seed + 4, rows, width).to(dtype), lies)
    agree(*both("mhc_write", x, y, laid_out(post, lies), laid_out(mix, lies)), 1e-5)


def test_streams_that_are_one_row_seen_many_times():
    """The first layer's streams are an expanded embedding: no memory of their own."""
    x = normal(1, 3, 1, 8).expand(-1, 4, -1)
    plain, fast = both("mhc_read", x, normal(2, 24, 32), normal(3, 24), normal(4, 3), 20, 1e-6, 1e-6)
    agree(plain, fast, 1e-5)
    agree(*both("mhc_write", x, normal(5, 3, 8), plain[2], plain[3]), 1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_a_number_stays_in_its_row(value):
    """Compiled with reassociated sums, but NaN keeps its meaning: both twins spoil the same rows and no others."""
    x, streams = normal(1, 9, 16), normal(2, 9, 4, 4)
    x[4, 3] = streams[4, 1, 2] = value
    turn = phases(torch.arange(9), frequencies(16, 10000.0))
    runs = [
        both("linear", x, normal(3, 7, 16)),
        both("rms_norm", x, None, 1e-6),
        both("rotate", x, turn),
        both("mhc_read", streams, normal(4, 24, 16), normal(5, 24), normal(6, 3), 20, 1e-6, 1e-6),
    ]
    for plain, fast in runs:
        for true, mine in zip(plain, fast):
            finite = mine.flatten(1).isfinite().all(-1)
            assert (
                torch.equal(finite, true.flatten(1).isfinite().all(-1))
                and finite.sum() == 8
                and not finite[4]
            )


HIDE_THE_COMPILER = """
import sys
class Hidden:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == "numba" else self.finder.find_spec(name, path, target)
sys.meta_path = [Hidden(finder) for finder in sys.meta_path]
"""
NORMALISE = """
import torch
from birkhoff.kernels.select import select
kernels = select("cpu")
with torch.no_grad():
    print(kernels.name, kernels.rms_norm(torch.tensor([[3.0, 4.0]]), None, 1e-6).tolist())
"""
DECODE = """
import sys, torch
sys.path.append({root!r})
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from tests.models import TINY, fused_model, random_tokens
model, tokens, state = fused_model(kernels="cpu"), random_tokens(TINY, 12), State.contiguous(TINY, 1, 12)
with torch.inference_mode():
    for at in range(12):
        hidden, _ = model.run(Batch.of([SequenceChunk(0, at, tokens[at : at + 1])]), state, NoTap())
    print(model.numerics.kernels.name, model.layers[0].attn.compiled, model.logits(hidden)[0, :4].tolist())
"""


def script(body: str, folder: Path, **environment: str) -> str:
    """What Python prints, run on a copy of the package: what it does to its folder, or fails to do, is its own."""
    package = folder / "birkhoff"
    if not package.exists():
        shutil.copytree(
            Path(birkhoff.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "models")
        )
    body += f"import birkhoff\nassert birkhoff.__file__.startswith({str(folder)!r}), birkhoff.__file__\n"
    settings = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "NUMBA_CACHE_DIR": "",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", body],
        capture_output=True,
        text=True,
        cwd=folder,
        env=settings,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def numbers(printed: str) -> list[float]:
    return [float(number) for number in printed[printed.index("[") :].strip("[]").split(",")]


def test_without_a_compiler_everything_works_and_nothing_is_fast(tmp_path):
    printed = script(HIDE_THE_COMPILER + DECODE.format(root=str(Path(__file__).parents[2])), tmp_path)
    with torch.no_grad():
        true = random_model()(random_tokens(TINY, 12))[-1, :4].tolist()
    assert printed.startswith("reference None") and numbers(printed) == pytest.approx(true, abs=1e-5)


def test_compiled_code_is_kept_and_used_again(tmp_path):
    first = script(NORMALISE, tmp_path)
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nbc")}
    assert kept and script(NORMALISE, tmp_path) == first
    assert kept == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nbc")}


PROBE = """
import numpy as np
from birkhoff.kernels.jit import compiled
from birkhoff.kernels.norm.cpu import NO_WEIGHT, rms_norm_rows
@compiled
def probe(x, out):
    rms_norm_rows(x, NO_WEIGHT, np.float32(1e-6), out)
def main():
    out = np.empty((1, 2), np.float32)
    probe(np.array([[3.0, 4.0]], np.float32), out)
    print(out[0].tolist())
"""


def test_code_that_calls_changed_code_is_compiled_again(tmp_path):
    """The compiler looks at the caller's file alone and would go on with what was there before an upgrade."""
    run = "from birkhoff.kernels.probe import main\nmain()\n"
    script("", tmp_path)
    (tmp_path / "birkhoff/kernels/probe.py").write_text(PROBE)
    first = numbers(script(run, tmp_path))
    callee = tmp_path / "birkhoff/kernels/norm/cpu.py"
    text = callee.read_text()
    assert "source[k] * rho\n" in text
    callee.write_text(text.replace("source[k] * rho\n", "source[k] * rho * 2\n"))
    assert numbers(script(run, tmp_path)) == pytest.approx([2 * x for x in first])
    callee.write_text(text)
    assert numbers(script(run, tmp_path)) == pytest.approx(first)


def test_with_nowhere_to_keep_it_it_is_compiled_every_time(tmp_path):
    """Neither the package's folder nor the user's cache can be written: files stand where folders would have to be."""
    kernels = tmp_path / "birkhoff" / "kernels"
    shutil.copytree(
        Path(birkhoff.__file__).parent, kernels.parent, ignore=shutil.ignore_patterns("__pycache__", "models")
    )
    for folder in [kernels, *(path for path in kernels.iterdir() if path.is_dir())]:
        (folder / "__pycache__").touch()
    nowhere = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "PYTHONDONTWRITEBYTECODE": "1"}
    printed = script(NORMALISE, tmp_path, **nowhere)
    assert printed.startswith("cpu") and numbers(printed) == pytest.approx([0.8485281, 1.1313708], abs=1e-6)
    assert not list(tmp_path.rglob("*.nb?"))


def test_a_compiled_function_is_what_its_source_says():
    """Python runs the very same loops, slowly."""
    from birkhoff.kernels.mhc.cpu import mix_streams

    g = np.random.default_rng(1)
    streams, y = g.standard_normal((2, 3, 5), np.float32), g.standard_normal((2, 5), np.float32)
    post, mix = g.standard_normal((2, 3), np.float32), g.standard_normal((2, 3, 3), np.float32)
    compiled, interpreted = np.empty_like(streams), np.empty_like(streams)
    mix_streams(streams, y, post, mix, compiled)
    mix_streams.py_func(streams, y, post, mix, interpreted)
    assert np.abs(compiled - interpreted).max() < 1e-6
