"""Compile and load the native CPU kernels (`native.cpp` and its headers) with the machine's C++ compiler.

The library is built on first use, for the instructions of this processor, and kept in the cache folder under a key of
the source, the compiler and the processor. Without a compiler (`c++`, `g++`, `clang++` or `$CXX`) there are no native
kernels and callers use the plain twins. `BIRKHOFF_NATIVE=0` disables them, 1 is the default; any other value is the
architecture to compile for (`-march`), such as `x86-64-v3`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from birkhoff.kernels.cache_folder import cache_folder

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "native.cpp"
ABI = 4
# As -ffast-math, but infinities and NaN keep their meaning and the processor's rounding mode is left alone.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
    "-ffp-contract=fast",
)


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library; None without a compiler. Compiled once per machine, which takes several seconds."""
    architecture = native_architecture()
    compiler = find_compiler()
    if architecture is None or compiler is None:
        return None
    try:
        return _load(build(compiler, architecture))
    except (OSError, subprocess.SubprocessError) as error:
        print(
            f"birkhoff: the native CPU kernels could not be built ({error}); slower ones are used",
            file=sys.stderr,
        )
        return None


def native_architecture() -> str | None:
    """What the kernels are compiled for (`BIRKHOFF_NATIVE`): "native" is this processor, None no kernels at all."""
    value = os.environ.get("BIRKHOFF_NATIVE", "")
    if value == "0" or sys.platform == "win32":
        return None
    return "native" if value in ("", "1") else value


def find_compiler() -> str | None:
    """The path of a C++ compiler; None if there is none."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    return None


def target_flags(architecture: str, machine: str) -> list[str]:
    """Compiler flags for an architecture on a machine (`platform.machine()`), best first: compilers for ARM call this
    processor `-mcpu=native`, if they know it at all, and have its vector instructions without any flag."""
    if architecture == "native" and machine in ("aarch64", "arm64"):
        return ["-mcpu=native", "-O3"]
    return [f"-march={architecture}"]


def build(compiler: str, architecture: str = "native") -> Path:
    """Compile the source unless the cache folder has it; returns the library's path."""
    *choices, last = target_flags(architecture, platform.machine())
    for choice in choices:
        with contextlib.suppress(subprocess.SubprocessError):
            return _build(compiler, (*FLAGS, choice))
    return _build(compiler, (*FLAGS, last))


def _build(compiler: str, flags: tuple[str, ...]) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    sources = [path.read_bytes() for path in (SOURCE, *sorted(FOLDER.glob("*.h")))]
    key = hashlib.sha256(b"\0".join((*sources, version, _processor(), " ".join(flags).encode())))
    name = f"packed-{key.hexdigest()[:32]}.so"
    folder = cache_folder("native")
    file = folder / name
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        command = [compiler, *flags, str(SOURCE), "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if result.returncode:
            raise subprocess.SubprocessError(result.stderr.strip()[:400])
        os.replace(made, file)
    return file


def _processor() -> bytes:
    """What distinguishes the processors that may share a home directory."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features"))})).encode()
    return platform.processor().encode()


def _load(path: Path) -> ctypes.CDLL:
    native = ctypes.CDLL(str(path))
    if native.birkhoff_abi() != ABI:
        raise OSError(f"{path} is of another version")
    return native
