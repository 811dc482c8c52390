"""Compile sources of CUDA kernels for a CPU (`threads_on_cpu.h`, `cuda_on_cpu.h`, `hopper_on_cpu.h`) and call them.

`test_sanitizers.py` runs the tests that use this with two variables: `BIRKHOFF_TEST_SANITIZER` names a sanitizer of the
compiler, `BIRKHOFF_TEST_DEFECT` a replacement in the source that makes it wrong, as JSON of two strings.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from ctypes import c_int, c_void_p
from pathlib import Path

import pytest
import torch

from birkhoff.kernels.cuda.compile import _argument

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


def whole_source(name: str) -> str:
    """A source with its kernels, without its includes and without what `cuda_on_cpu.h` defines: functions of inline PTX
    and the overload of `store_as` for floats."""
    text = re.sub(r"^(#include|#pragma once).*$", "", (SOURCES / name).read_text(), flags=re.M)
    text = re.sub(r'asm volatile\("prefetch\.global\.L2 \[%0\];" ::"l"\((.*)\)\);', r"prefetch(\1);", text)
    kept, part, depth = [], [], 0
    for line in [*text.splitlines(), ""]:
        part.append(line)
        depth += line.count("{") - line.count("}")
        if (
            depth == 0
            and (not line or line[-1] in "};" or line.startswith(("#", "//")))
            and line[-1:] != "\\"
        ):
            whole = "\n".join(part)
            if not re.search(r"\basm\b|void store_as\(float", whole):
                kept.append(whole)
            part = []
    assert depth == 0 and not part, f"the parts of {name} were not found"
    return "\n".join(kept) + "\n"


class _Place(ctypes.Structure):
    _fields_ = (("x", c_int), ("y", c_int), ("z", c_int))


class KernelsOnCpu:
    """Kernels of CUDA sources, compiled for a CPU, in the place of `compile.Module`: `launch` has its signature.

    Launches are enqueued; `run` runs them, and grids overlap as programmatic dependent launch allows
    (`threads_on_cpu.h`).

    `kernels` are names, or names with C++ expressions of template instances; `replacements` change constants."""

    def __init__(
        self,
        sources: Sequence[str],
        kernels: Sequence[str] | Mapping[str, str],
        folder: Path,
        replacements: Mapping[str, str] | None = None,
    ):
        text = "".join(map(whole_source, sources))
        for old, new in (replacements or {}).items():
            assert old in text, old
            text = text.replace(old, new)
        self._clusters = {
            name.split("##")[0]: int(size)
            for size, name in re.findall(
                r"__cluster_dims__\((\d+)[^\n]*\n?\s*([\w#]+)\(", text.replace("\\", "")
            )
        }
        text = _shared_of_blocks(text)
        expressions = kernels if isinstance(kernels, Mapping) else dict.fromkeys(kernels)
        for name, expression in expressions.items():
            text += f"LAUNCH_FROM_PYTHON({name}, ({expression or name}))\n"
        text += 'extern "C" void run_launches(unsigned seed) { run_all_launches(seed); }\n'
        self._library = compile_for_cpu('#include "cuda_on_cpu.h"\n' + text, folder)
        self._arguments: list = []

    def launch(
        self,
        name: str,
        grid: tuple[int, int] | tuple[int, int, int],
        threads: int,
        *arguments: torch.Tensor | int | float | c_void_p | None,
        pdl: bool,
        shared: int = 0,
    ) -> None:
        """Enqueue a kernel; without `pdl` what is enqueued runs first."""
        if not pdl and self._arguments:
            self.run()
        values = [_argument(each) for each in arguments]
        self._arguments.append((arguments, values))
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        cluster = next((size for prefix, size in self._clusters.items() if name.startswith(prefix)), 1)
        size = _Place(*grid, *([1] if len(grid) == 2 else []))
        self._library[f"add_{name}"](size, threads, cluster, shared, pointers)

    def run(self, seed: int = 0) -> None:
        self._library.run_launches(seed)
        self._arguments.clear()


def _shared_of_blocks(text: str) -> str:
    """Replace declarations of shared memory by variables of the running block."""
    numbers = itertools.count()

    def variables(found: re.Match[str]) -> str:
        kind, names = found[1], found[2].split(", ")
        parts = [re.fullmatch(r"(\w+)(.*)", each) for each in names]
        calls = [(part[1], f"shared_variable<{kind}{part[2]}>({next(numbers)})") for part in parts if part]
        return " ".join(f"auto& {name} = {call};" for name, call in calls)

    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];",
        r"\1* const \2 = (\1*)self().block->dynamic;",
        text,
    )
    return re.sub(r"__shared__ (?:__align__\(\d+\) )?([\w<>]+) ([^;]+);", variables, text)
