"""Compiled CPU twins compared with the reference twins: any row count, odd widths, any memory layout, both dtypes.

The other files of this folder compare each twin with its definition. This one compares the twins with each other where
they could differ while both are close to the definition: strides, dtypes, row counts at which an implementation changes
its method, memory ownership, and machines without a compiler or without a writable cache.
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
# Covers the row count at which `linear` changes its method, and its loop over four rows.
rows = st.integers(1, 17)
layouts = st.sampled_from(LAYOUTS)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
seeds = st.integers(0, 9999)


def with_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory layout."""
    if layout == "every other column":
        return torch.stack((x, torch.full_like(x, torch.nan)), dim=-1).flatten(-2)[..., ::2]
    if layout == "part of wider rows":
        return torch.cat((torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)), -1)[
            ..., x.shape[-1] : 2 * x.shape[-1]
        ]
    return x.transpose(0, -1).contiguous().transpose(0, -1) if layout == "columns first" else x


def run_twins(name: str, *arguments, **options):
    """Results of the reference and the fast twin, each a tuple. Checks that the arguments are unchanged."""
    before = [a.clone() for a in arguments if isinstance(a, torch.Tensor)]
    results = []
    with torch.no_grad():
        for twin in TWINS[name]:
            out = twin(*arguments, **options)
            results.append(out if isinstance(out, tuple) else (out,))
    after = [a for a in arguments if isinstance(a, torch.Tensor)]
    assert all(a.equal(b) or a.isnan().any() for a, b in zip(before, after)), f"{name} changed its arguments"
    input_storages = {a.untyped_storage().data_ptr() for a in after}
    assert not any(out.untyped_storage().data_ptr() in input_storages for out in results[1]), (
        f"{name} returned its input"
    )
    return results


def assert_close(plain, fast, tolerance: float) -> None:
    """Float32 within `tolerance` of the scale of the result; bfloat16 within one rounding step of it, for ties."""
    for expected, actual in zip(plain, fast, strict=True):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        step = 2.0**-8 if expected.dtype is torch.bfloat16 else tolerance
        assert (
            actual.double() - expected.double()
        ).abs().max() <= step * expected.double().abs().max().clamp_min(1.0)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    rows=rows,
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 40),
    x_layout=layouts,
    weight_layout=layouts,
    dtype=dtypes,
    seed=seeds,
)
def test_linear(rows, inputs, outputs, x_layout, weight_layout, dtype, seed):
    x = with_layout(normal(seed, rows, inputs).to(dtype), x_layout)
    weight = with_layout((normal(seed + 1, outputs, inputs) * inputs**-0.5).to(dtype), weight_layout)
    assert_close(*run_twins("linear", x, weight), 1e-5)


@given(rows=rows, width=st.integers(1, 70), layout=layouts, dtype=dtypes, weighted=st.booleans(), seed=seeds)
def test_rms_norm(rows, width, layout, dtype, weighted, seed):
    x = with_layout(normal(seed, rows, width).to(dtype), layout)
    assert_close(*run_twins("rms_norm", x, normal(seed + 1, width) if weighted else None, 1e-6), 1e-5)


@given(
    shape=st.sampled_from([("p",), ("p", 3), ("b", "t"), ("b", "t", 5)]),
    rows=st.integers(1, 17),
    unrotated=st.integers(0, 9),
    pairs=st.integers(1, 9),
    inverse=st.booleans(),
    layout=layouts,
    dtype=dtypes,
    seed=seeds,
)
def test_rotate(shape, rows, unrotated, pairs, inverse, layout, dtype, seed):
    """Phases with one axis or two, followed by an axis of heads or not."""
    sizes = [{"p": rows, "b": 2, "t": rows}.get(s, s) for s in shape]
    x = with_layout(normal(seed, *sizes, unrotated + 2 * pairs).to(dtype), layout)
    rotation = phases(torch.arange(rows) + seed, frequencies(2 * pairs, 10000.0))
    if "b" in shape:
        rotation = Phases(
            torch.stack((rotation.cos, rotation.sin)), torch.stack((rotation.sin, rotation.cos))
        )
    plain, fast = run_twins("rotate", x, rotation, inverse=inverse)
    assert_close(plain, fast, 1e-6)
    assert torch.equal(fast[0][..., :unrotated], x[..., :unrotated])


@given(
    rows=rows,
    streams=st.integers(1, 5),
    width=st.integers(1, 33),
    iters=st.sampled_from([1, 2, 20]),
    layout=layouts,
    dtype=dtypes,
    seed=seeds,
)
def test_mhc_read_and_write(rows, streams, width, iters, layout, dtype, seed):
    m, size = streams, (2 + streams) * streams
    x = with_layout(normal(seed, rows, m, width).to(dtype), layout)
    fn, base = normal(seed + 1, size, m * width) * (m * width) ** -0.5, normal(seed + 2, size)
    plain, fast = run_twins("mhc_read", x, fn, base, normal(seed + 3, 3) + 1, iters, 1e-6, 1e-6)
    assert_close(plain, fast, 1e-5)
    _, _, post, mix = plain
    y = with_layout(normal(seed + 4, rows, width).to(dtype), layout)
    assert_close(*run_twins("mhc_write", x, y, with_layout(post, layout), with_layout(mix, layout)), 1e-5)


def test_expanded_streams():
    """The streams of the first layer are an expanded embedding, so all of them share one row of memory."""
    x = normal(1, 3, 1, 8).expand(-1, 4, -1)
    plain, fast = run_twins("mhc_read", x, normal(2, 24, 32), normal(3, 24), normal(4, 3), 20, 1e-6, 1e-6)
    assert_close(plain, fast, 1e-5)
    assert_close(*run_twins("mhc_write", x, normal(5, 3, 8), plain[2], plain[3]), 1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_stay_in_their_row(value):
    """Sums are reassociated by the compiler, but NaN is respected: the same rows are non-finite in both twins."""
    x, streams = normal(1, 9, 16), normal(2, 9, 4, 4)
    x[4, 3] = streams[4, 1, 2] = value
    rotation = phases(torch.arange(9), frequencies(16, 10000.0))
    runs = [
        run_twins("linear", x, normal(3, 7, 16)),
        run_twins("rms_norm", x, None, 1e-6),
        run_twins("rotate", x, rotation),
        run_twins("mhc_read", streams, normal(4, 24, 16), normal(5, 24), normal(6, 3), 20, 1e-6, 1e-6),
    ]
    for plain, fast in runs:
        for expected, actual in zip(plain, fast):
            finite = actual.flatten(1).isfinite().all(-1)
            assert (
                torch.equal(finite, expected.flatten(1).isfinite().all(-1))
                and finite.sum() == 8
                and not finite[4]
            )


HIDE_NUMBA = """
import sys
class Hidden:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == "numba" else self.finder.find_spec(name, path, target)
sys.meta_path = [Hidden(finder) for finder in sys.meta_path]
"""
ROTATE = """
import torch
from birkhoff.kernels.select import select
from birkhoff.kernels.rope import Phases
kernels = select("cpu")
with torch.no_grad():
    phases = Phases(torch.tensor([[0.6]]), torch.tensor([[0.8]]))
    print(kernels.name, kernels.rotate(torch.tensor([[3.0, 4.0]]), phases).tolist())
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


def run_script(body: str, folder: Path, **environment: str) -> str:
    """Run a script on a copy of the package, so that the cache in its folder is separate. Returns its output."""
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
        "BIRKHOFF_CACHE": str(folder / "cache"),
        **environment,
    }
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", body],
        capture_output=True,
        text=True,
        cwd=folder,
        env=settings,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def parse_numbers(printed: str) -> list[float]:
    return [float(item) for item in printed[printed.index("[") :].strip("[]").split(",")]


def test_without_a_compiler_the_reference_kernels_run(tmp_path):
    printed = run_script(HIDE_NUMBA + DECODE.format(root=str(Path(__file__).parents[2])), tmp_path)
    with torch.no_grad():
        expected = random_model()(random_tokens(TINY, 12))[-1, :4].tolist()
    assert printed.startswith("reference None") and parse_numbers(printed) == pytest.approx(
        expected, abs=1e-5
    )


def test_compiled_code_is_cached_and_reused(tmp_path):
    first = run_script(ROTATE, tmp_path)
    cached = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nbc")}
    assert cached and run_script(ROTATE, tmp_path) == first
    assert cached == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nbc")}


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


def test_a_second_installation_of_the_same_version_compiles_nothing(tmp_path):
    """Code is keyed by the text of the kernels, so reinstalling or another environment does not compile again."""
    shared = {"BIRKHOFF_CACHE": str(tmp_path / "shared")}
    (tmp_path / "second").mkdir()
    first = run_script(ROTATE, tmp_path, **shared)
    cached = {file: file.stat().st_mtime_ns for file in (tmp_path / "shared").rglob("*.nbc")}
    assert cached and run_script(ROTATE, tmp_path / "second", **shared) == first
    assert cached == {file: file.stat().st_mtime_ns for file in (tmp_path / "shared").rglob("*.nbc")}


def test_code_that_calls_changed_code_is_recompiled(tmp_path):
    """Numba checks only the file of the caller, so it would reuse code compiled before an upgrade of the callee."""
    run = "from birkhoff.kernels.probe import main\nmain()\n"
    run_script("", tmp_path)
    (tmp_path / "birkhoff/kernels/probe.py").write_text(PROBE)
    first = parse_numbers(run_script(run, tmp_path))
    callee = tmp_path / "birkhoff/kernels/norm/cpu.py"
    text = callee.read_text()
    assert "source[k] * rho\n" in text
    callee.write_text(text.replace("source[k] * rho\n", "source[k] * rho * 2\n"))
    assert parse_numbers(run_script(run, tmp_path)) == pytest.approx([2 * x for x in first])
    callee.write_text(text)
    assert parse_numbers(run_script(run, tmp_path)) == pytest.approx(first)


def test_without_a_writable_cache_code_is_compiled_every_time(tmp_path):
    """Neither the folder of the package nor the cache of the user is writable: files are in place of the folders."""
    kernels = tmp_path / "birkhoff" / "kernels"
    shutil.copytree(
        Path(birkhoff.__file__).parent, kernels.parent, ignore=shutil.ignore_patterns("__pycache__", "models")
    )
    for folder in [kernels, *(path for path in kernels.iterdir() if path.is_dir())]:
        (folder / "__pycache__").touch()
    environment = {"BIRKHOFF_CACHE": "/dev/null", "PYTHONDONTWRITEBYTECODE": "1"}
    printed = run_script(ROTATE, tmp_path, **environment)
    assert printed.startswith("cpu") and parse_numbers(printed) == pytest.approx([-1.4, 4.8])
    assert not list(tmp_path.rglob("*.nb?"))


def test_a_compiled_function_matches_its_python_source():
    """The same function run by the Python interpreter gives the same result."""
    from birkhoff.kernels.mhc.cpu import mix_streams

    g = np.random.default_rng(1)
    streams, y = g.standard_normal((2, 3, 5), np.float32), g.standard_normal((2, 5), np.float32)
    post, mix = g.standard_normal((2, 3), np.float32), g.standard_normal((2, 3, 3), np.float32)
    compiled, interpreted = np.empty_like(streams), np.empty_like(streams)
    mix_streams(streams, y, post, mix, compiled)
    mix_streams.py_func(streams, y, post, mix, interpreted)
    assert np.abs(compiled - interpreted).max() < 1e-6
