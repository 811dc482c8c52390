"""Prefill kernels compile for an H200, fit its shared memory and use its tensor cores. No GPU is needed.

The interpreter, which all other tests use, accepts programs that the compiler rejects.
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
SHARED = 232_448  # bytes available to one thread block
ALL = ("experts gate_up", "experts down", "linear fp8", "mhc mix", "attention", "index score")
SOME = ("experts down", "linear fp8", "mhc mix", "index score")  # the others take several seconds each


def test_prefill_kernels_compile_for_hopper(tmp_path):
    root = Path(__file__).parent.parent.parent
    kernel_names = ALL if FULL else SOME
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper", *kernel_names],
        cwd=root,
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    assert [row["kernel"] for row in rows] == list(kernel_names)
    for row in rows:
        assert row["shared"] <= SHARED and row["tensor_cores"], row
        # `mhc mix` uses a tile of streams in two products and a sum of squares, so its products must have finished
        # before the tile is overwritten.
        assert row["waits_for_products"] or row["kernel"] != "mhc mix", row
        assert row["async_copies"] or row["kernel"] == "index score", row  # `index score` loads its keys once


def test_compiled_cuda_sources_are_cached_on_disk(tmp_path, monkeypatch):
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
    monkeypatch.setenv("BIRKHOFF_CACHE", str(source))  # a file, so that nothing can be cached there
    assert module.cached_cubin(nvrtc, source, (9, 0))
