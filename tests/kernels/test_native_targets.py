"""The native CPU kernels compiled for other processors than this one: their tests, run again with those kernels."""

import os
import platform
import subprocess
import sys

import pytest

from birkhoff.kernels.packed import native

TESTS = ("tests/kernels/test_packed.py", "tests/decode/test_native.py")


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are architectures of x86-64")
@pytest.mark.parametrize("architecture", ["x86-64-v3", "x86-64"])  # with AVX2, and with SSE2 alone
def test_kernels_of_processors_without_avx512_pass_the_same_tests(architecture):
    environment = {**os.environ, "BIRKHOFF_NATIVE": architecture, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "could not be built" not in result.stderr


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
def test_an_unknown_architecture_is_named_and_slower_kernels_are_used():
    code = "from birkhoff.kernels.packed import native; print(native.available())"
    environment = {**os.environ, "BIRKHOFF_NATIVE": "no-such-processor"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.stdout.strip() == "False"
    assert "could not be built" in result.stderr and "no-such-processor" in result.stderr
