"""Compiled twins come up wherever the package is installed, also where nothing can be written."""

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


def test_without_a_place_to_cache_functions_are_compiled_all_the_same():
    # the only place to look is one that the user did not name: what an unwritable package and home come to
    env = {**os.environ, "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": ""}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[3.0, 12.0, 21.0, 30.0] None"


def test_another_folder_can_be_named(tmp_path):
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"[3.0, 12.0, 21.0, 30.0] {tmp_path / 'kept'}")
    assert list((tmp_path / "kept").rglob("*.nbi"))
