"""Kernels for many rows compile for an H200 within its shared memory and use its tensor cores; no GPU is needed for it.

The interpreter, which all other tests use, takes programs that the compiler does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sizes import FULL

pytest.importorskip("triton", reason="triton is not installed")
SHARED = 232_448  # bytes a block may use
ALL = ("experts open", "experts close", "product fp8", "streams mix", "attention", "index score")
SOME = ("experts close", "product fp8", "streams mix", "index score")  # the others take several seconds each


def test_kernels_for_many_rows_compile_for_hopper(tmp_path):
    root = Path(__file__).parent.parent.parent
    chosen = ALL if FULL else SOME
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper", *chosen],
        cwd=root,
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row["kernel"] for row in rows] == list(chosen)
    for row in rows:
        assert row["shared"] <= SHARED and row["tensor_cores"], row
        # Streams are multiplied twice and squared: nothing keeps their tile for a product that is still under way.
        assert row["ends_products"] or row["kernel"] != "streams mix", row
        assert row["copies_ahead"] or row["kernel"] == "index score", row  # which loads its keys once


def test_compiled_cuda_sources_are_kept_on_disk(tmp_path, monkeypatch):
    from birkhoff.kernels.cuda import compile as module

    nvrtc = module.find_nvrtc()
    if nvrtc is None:
        pytest.skip("NVRTC is not installed")
    monkeypatch.setenv("BIRKHOFF_CACHE", str(tmp_path))
    source = tmp_path / "one.cu"
    source.write_text('extern "C" __global__ void one(int* x) { *x = 1; }')
    first = module.cached_cubin(nvrtc, source, (9, 0))
    (file,) = (tmp_path / "cubin").iterdir()
    assert file.read_bytes() == first == module.cached_cubin(nvrtc, source, (9, 0))
    source.write_text('extern "C" __global__ void one(int* x) { *x = 2; }')
    assert module.cached_cubin(nvrtc, source, (9, 0)) != first
    monkeypatch.setenv("BIRKHOFF_CACHE", str(source))  # a file: nothing can be kept there
    assert module.cached_cubin(nvrtc, source, (9, 0))
