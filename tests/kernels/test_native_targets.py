"""The native CPU kernels compiled for other processors than this one: their tests, run again with those kernels."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from birkhoff.kernels.packed import native
from birkhoff.kernels.packed.compile import build, find_compiler, target_flags
from tests.sizes import FULL

ARCHITECTURES = ("x86-64-v3", "x86-64", "cascadelake", *(("skylake-avx512",) if FULL else ()))
TESTS = ("tests/kernels/test_packed.py", "tests/decode/test_native.py")


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are architectures of x86-64")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_of_other_processors_pass_the_same_tests(architecture):
    """With AVX2, with SSE2 alone, with AVX-512 and VNNI but without the instructions for bits of bytes, and without
    VNNI."""
    needed = {"cascadelake": "avx512_vnni", "skylake-avx512": "avx512bw"}.get(architecture)
    if needed is not None and needed not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this processor does not run them")
    environment = {**os.environ, "BIRKHOFF_NATIVE": architecture, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    built = [sys.executable, "-c", "from birkhoff.kernels.packed import native; print(native.available())"]
    result = subprocess.run(built, env=environment, capture_output=True, text=True, timeout=600)
    assert result.stdout == "True\n", result.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("value", "available", "said"),
    [("0", "False", ""), ("1", "True", ""), ("no-such-processor", "False", "could not be built")],
)
def test_the_variable_turns_kernels_off_and_names_an_architecture(value, available, said):
    code = "from birkhoff.kernels.packed import native; print(native.available())"
    environment = {**os.environ, "BIRKHOFF_NATIVE": value}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.stdout.strip() == available
    assert said in result.stderr and (not said or value in result.stderr)


def test_processors_are_named_as_their_compilers_do():
    assert target_flags("native", "x86_64") == ["-march=native"]
    assert target_flags("native", "arm64")[0] == "-mcpu=native"
    assert target_flags("armv8.2-a", "arm64") == ["-march=armv8.2-a"]


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
def test_a_compiler_that_does_not_know_its_processor_compiles_for_any(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *=native*) exit 1;; esac\nexec {find_compiler()} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("BIRKHOFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert build(str(compiler)).is_file()
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(subprocess.SubprocessError):
        build(str(compiler))
