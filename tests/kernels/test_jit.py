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


def run_code(**settings: str) -> str:
    env = {**os.environ, **settings}
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_functions_are_compiled_without_a_cache_directory():
    # The only cache locator is one that the user has not configured: nothing can be kept.
    shown = run_code(NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator", NUMBA_CACHE_DIR="")
    assert shown == "[3.0, 12.0, 21.0, 30.0] None"


def test_code_is_kept_beside_the_sources_if_the_cache_folder_cannot_be_written():
    shown = run_code(BIRKHOFF_CACHE="/dev/null/none")
    assert shown.startswith("[3.0, 12.0, 21.0, 30.0] ") and "__pycache__" in shown


def test_the_cache_directory_can_be_set(tmp_path):
    shown = run_code(BIRKHOFF_CACHE=str(tmp_path / "kept"))
    assert shown.startswith(f"[3.0, 12.0, 21.0, 30.0] {tmp_path / 'kept'}")
    assert list((tmp_path / "kept").rglob("*.nbi"))
