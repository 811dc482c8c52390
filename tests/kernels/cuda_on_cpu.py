"""Compile sources of CUDA kernels for a CPU (`cuda_on_cpu.h`, `hopper_on_cpu.h`) and call them.

`test_sanitizers.py` runs the tests that use this with two variables: `BIRKHOFF_TEST_SANITIZER` names a sanitizer of the
compiler, `BIRKHOFF_TEST_DEFECT` a replacement in the source that makes it wrong, as JSON of two strings.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "birkhoff" / "kernels" / "cuda"
SANITIZER, DEFECT = "BIRKHOFF_TEST_SANITIZER", "BIRKHOFF_TEST_DEFECT"


def find_compiler() -> str:
    """Return the path of g++, or skip the test."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    return compiler


def compile_for_cpu(text: str, folder: Path) -> ctypes.CDLL:
    """Compile C++ text that includes one of the headers beside this file, and load it."""
    if defect := os.environ.get(DEFECT):
        sound, broken = json.loads(defect)
        assert sound in text, f"the source does not contain {sound!r}"
        text = text.replace(sound, broken)
    (folder / "kernels.cpp").write_text(text)
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-w", f"-I{HERE}"]
    if sanitizer := os.environ.get(SANITIZER):
        flags += ["-g", f"-fsanitize={sanitizer}"]
    command = [find_compiler(), *flags, str(folder / "kernels.cpp"), "-o", str(folder / "kernels.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))
