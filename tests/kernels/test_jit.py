"""CPU twins compile wherever the package is installed, also if no cache directory is writable."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="CPU twins are compiled by Numba, which is not installed")

CODE = """
import numpy as np, torch
from birkhoff.kernels.linear import cpu
x, w, out = np.ones((2, 3), np.float32), np.arange(12, dtype=np.float32).reshape(4, 3), np.empty((2, 4), np.float32)
cpu.matmul(x, w, out)
print(out[1].tolist(), cpu.matmul.stats.cache_path)
"""


def test_functions_are_compiled_without_a_cache_directory():
    # The only cache locator is one that the user has not configured: equivalent to an unwritable package and home.
    env = {**os.environ, "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": ""}
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "[3.0, 12.0, 21.0, 30.0] None"


def test_the_cache_directory_can_be_set(tmp_path):
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(f"[3.0, 12.0, 21.0, 30.0] {tmp_path / 'kept'}")
    assert list((tmp_path / "kept").rglob("*.nbi"))
