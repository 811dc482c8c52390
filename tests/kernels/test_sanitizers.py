"""The CUDA kernels that compile for a CPU, under the compiler's sanitizers: accesses outside of tensors, misaligned
ones, and races between the threads of a block.

A race is two accesses that no barrier orders, whether or not it changed a number in this run. Copies and products are
as late as they may be (`cuda_on_cpu.h`). Deliberate defects show that races are found, down to a warp of which one lane
arrives at a barrier before the others have read.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cuda_on_cpu import DEFECT, SANITIZER, find_compiler
from tests.sizes import FULL

LIBRARIES = {"thread": ("libtsan.so",), "address,undefined": ("libasan.so", "libubsan.so")}
OPTIONS = {
    "TSAN_OPTIONS": "report_signal_unsafe=0:halt_on_error=1",
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}
FILES = (
    "test_prompt_experts_on_cpu.py",
    "test_digit_experts_on_cpu.py",
    "test_gemm_rows_on_cpu.py",
    "test_experts_on_cpu.py",
    "test_cuda_on_cpu.py",
)
# What `make test` runs: a few tests of two files, and one defect. A step of a kernel takes a hundred threads of a CPU.
IN_SHORT = (("thread", FILES[0]), ("address,undefined", FILES[3]))
SELECTED = {FILES[0]: "down and passes", FILES[3]: "host"}
DEFECTS = {
    "a lane arrives for its warp before the others have read": (
        "test_prompt_experts_on_cpu.py",
        "__syncwarp();\n        if (more && lane == 0)",
        "if (more && lane == 0)",
    ),
    "a stage is not awaited to be empty": (
        "test_prompt_experts_on_cpu.py",
        "if (wrapped) barrier_wait(shared.empty(stage), parity ^ 1);",
        "",
    ),
    "scales have a slot too few": ("test_prompt_experts_on_cpu.py", "ring == 2", "ring == 1"),
    "tiles have too few descriptions": (
        "test_prompt_experts_on_cpu.py",
        "#define INFOS (STAGES + 1)",
        "#define INFOS 2",
    ),
    "a stage is announced before its copies have arrived": (
        "test_prompt_experts_on_cpu.py",
        "copies_wait<PENDING>();",
        "copies_wait<PENDING + 1>();",
    ),
    "copies of other threads are not awaited": (
        "test_digit_experts_on_cpu.py",
        "__syncthreads();  // copies of all threads",
        "// copies of all threads",
    ),
    "one group of copies is not awaited": (
        "test_gemm_rows_on_cpu.py",
        "wait_for_copies<ROWS_STAGES - 2>();",
        "wait_for_copies<ROWS_STAGES - 1>();",
    ),
    "a staged row is read before other lanes have it": (
        "test_experts_on_cpu.py",
        "await_requests(0);\n    __syncwarp();",
        "await_requests(0);",
    ),
}


def environment(sanitizer: str, **more: str) -> dict[str, str]:
    """Return an environment in which Python loads a sanitizer's library, or skip the test where that does not start."""
    paths = []
    for name in LIBRARIES[sanitizer]:
        command = [find_compiler(), f"-print-file-name={name}"]
        paths.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    if not all(Path(path).is_absolute() for path in paths):
        pytest.skip(f"the compiler has no {' and '.join(LIBRARIES[sanitizer])}")
    variables = {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": " ".join(paths),
        "OMP_NUM_THREADS": "1",
        SANITIZER: sanitizer,
    }
    variables.pop("PYTEST_ADDOPTS", None)
    started = subprocess.run(
        [sys.executable, "-c", ""], env=variables, capture_output=True, text=True, timeout=120
    )
    if started.returncode:
        pytest.skip(f"the library of -fsanitize={sanitizer} does not start here: {started.stderr[-300:]}")
    return variables | more


def run_tests(name: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"tests/kernels/{name}", *([] if FULL else ["-k", SELECTED[name]])]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    ("sanitizer", "name"),
    list(itertools.product(LIBRARIES, FILES)) if FULL else IN_SHORT,
    ids=lambda each: each,
)
def test_kernels_have_no_races_and_stay_within_their_memory(sanitizer, name):
    result = run_tests(name, environment(sanitizer))
    reports = result.stderr + result.stdout
    assert result.returncode == 0, reports[-6000:]
    assert " passed" in result.stdout and "ERROR: " not in reports and "WARNING: Thread" not in reports


@pytest.mark.parametrize("defect", list(DEFECTS)[: None if FULL else 1])
def test_deliberate_races_are_reported(defect):
    name, sound, broken = DEFECTS[defect]
    result = run_tests(name, environment("thread", **{DEFECT: json.dumps([sound, broken])}))
    assert result.returncode != 0 and "ThreadSanitizer: data race" in result.stderr + result.stdout
