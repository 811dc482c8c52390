"""The CUDA kernels, compiled for a CPU, under the compiler's sanitizers: accesses outside of tensors, misaligned ones,
and races between threads of a block, blocks of a grid or cluster, and grids that overlap.

A race is two accesses that nothing orders, whether or not it changed a number in this run. Copies and products are as
late as they may be (`cuda_on_cpu.h`), blocks run in any order (`threads_on_cpu.h`). Deliberate defects in every source
show that both are found, down to a warp of which one lane arrives at a barrier before the others have read.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
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
    "test_route_on_cpu.py",
    "test_mhc_on_cpu.py",
    "test_attend_on_cpu.py",
    "test_topk_on_cpu.py",
    "test_sample_on_cpu.py",
)
# What `make test` runs: a few tests of three files, and two defects.
IN_SHORT = (("thread", FILES[0]), ("address,undefined", FILES[3]), ("thread", FILES[5]))
SELECTED = {FILES[0]: "down and passes", FILES[3]: "host", FILES[5]: "shared_expert and (1-16 or 2-16)"}

OUTSIDE, INDEX = "AddressSanitizer: heap-buffer-overflow", "runtime error: index"
NOT_STARTED = "the shared memory of one that has not started"


@dataclass(frozen=True)
class Defect:
    """A replacement in the sources that the tests of `file` (those that `only` names) compile, and what is reported."""

    file: str
    sound: str
    broken: str
    report: str = "ThreadSanitizer: data race"
    only: str = ""

    @property
    def sanitizer(self) -> str:
        return "address,undefined" if self.report in (OUTSIDE, INDEX) else "thread"


DEFECTS = {
    "a lane arrives for its warp before the others have read": Defect(
        "test_prompt_experts_on_cpu.py",
        "__syncwarp();\n        if (more && lane == 0)",
        "if (more && lane == 0)",
        only="down and passes",
    ),
    "a block counts itself before its logits are visible": Defect(
        "test_route_on_cpu.py",
        "        __threadfence();\n    }\n    __syncthreads();\n    if (t == 0) last",
        "    }\n    __syncthreads();\n    if (t == 0) last",
        only="shared_expert and 1-16",
    ),
    "the last block reads logits without a fence": Defect(
        "test_route_on_cpu.py",
        "if (!last || t >= 32) return;\n    __threadfence();",
        "if (!last || t >= 32) return;",
        only="shared_expert and 1-16",
    ),
    "pairs are counted while others still count": Defect(
        "test_route_on_cpu.py",
        "__syncthreads();\n    int count = 0, at = 0, slot = 0;",
        "int count = 0, at = 0, slot = 0;",
        only="shared_expert and 5-32",
    ),
    "routing starts before the logits are complete": Defect(
        "test_route_on_cpu.py",
        "grid_dependency_wait();\n    __syncthreads();\n    for (int b = warp",
        "__syncthreads();\n    for (int b = warp",
        only="shared_expert and 2-16",
    ),
    "a pair too many is ordered": Defect(
        "test_route_on_cpu.py",
        "if (t < n * topk) order[",
        "if (t <= n * topk) order[",
        INDEX,
        only="shared_expert and 5-32",
    ),
    "products of tokens that do not exist are stored": Defect(
        "test_route_on_cpu.py", "if (t < n && in_range)", "if (in_range)", OUTSIDE, only="products"
    ),
    "partial sums are added before other warps have stored theirs": Defect(
        "test_route_on_cpu.py",
        "        }\n    __syncthreads();\n}\n\ntemplate <int WARPS>",
        "        }\n}\n\ntemplate <int WARPS>",
        only="products",
    ),
    "a stream is written while another warp reads it": Defect(
        "test_mhc_on_cpu.py", "__syncthreads();  // all four streams are read before any is written", ""
    ),
    "streams are read before they are written": Defect(
        "test_mhc_on_cpu.py",
        "grid_dependency_wait();\n    const float* own = mix_parts",
        "const float* own = mix_parts",
    ),
    "streams are written before the last boundary has read them": Defect(
        "test_mhc_on_cpu.py", "grid_dependency_wait();\n    launch_dependents();", "launch_dependents();"
    ),
    "a row is one column too long": Defect(
        "test_mhc_on_cpu.py", "if (d < width)", "if (d <= width)", OUTSIDE
    ),
    "scores are added before all warps have theirs": Defect(
        "test_attend_on_cpu.py",
        "__syncthreads();\n#pragma unroll\n        for (int i = 0; i < PER_LANE; i++) {\n            const int h",
        "#pragma unroll\n        for (int i = 0; i < PER_LANE; i++) {\n            const int h",
        only="128]-128 and False-96",
    ),
    "keys that other lanes have copied are read at once": Defect(
        "test_attend_on_cpu.py",
        "else cp_async_wait<0>();\n        __syncwarp();",
        "else cp_async_wait<0>();",
        only="128]-128 and False-96",
    ),
    "splits are merged before they are complete": Defect(
        "test_attend_on_cpu.py",
        "grid_dependency_wait();\n    float2 cosine",
        "float2 cosine",
        only="128]-128 and False-96",
    ),
    "indices are read after the last one": Defect(
        "test_attend_on_cpu.py",
        "min(max(start + lane - ring, 0), topk - 1)",
        "max(start + lane - ring, 0)",
        OUTSIDE,
        only="True",
    ),
    "counts of warps are added before all are stored": Defect(
        "test_topk_on_cpu.py",
        "if (lane == 0) all[warp] = warp_pair;\n        __syncthreads();",
        "if (lane == 0) all[warp] = warp_pair;",
        only="one_block and random",
    ),
    "counts are sent to a block that has not started": Defect(
        "test_topk_on_cpu.py", "if (BLOCKS > 1) cluster_sync();", "", NOT_STARTED, only="cluster and random"
    ),
    "counts are read before all blocks have sent theirs": Defect(
        "test_topk_on_cpu.py",
        "            cluster_sync();\n#pragma unroll",
        "#pragma unroll",
        only="cluster and random",
    ),
    "a score too many is read": Defect(
        "test_topk_on_cpu.py",
        "key[i] = e < count ?",
        "key[i] = e <= count ?",
        OUTSIDE,
        only="one_block and random",
    ),
    "two rounds of a reduction share a buffer": Defect(
        "test_sample_on_cpu.py", "turn = round & 1;", "turn = 0;", only="masks"
    ),
    "a reduction does not wait for the other blocks": Defect(
        "test_sample_on_cpu.py",
        "cluster_sync();\n        v = blocks[turn][0];",
        "v = blocks[turn][0];",
        only="masks",
    ),
    "a reduction writes to a block that has not started": Defect(
        "test_sample_on_cpu.py",
        "cluster_sync();  // no block writes to another's shared memory before that block has started",
        "",
        NOT_STARTED,
        only="masks",
    ),
    "a logit too many is read": Defect(
        "test_sample_on_cpu.py",
        "token < vocab ? from[token]",
        "token <= vocab ? from[token]",
        OUTSIDE,
        only="masks",
    ),
    "a stage is not awaited to be empty": Defect(
        "test_prompt_experts_on_cpu.py", "if (wrapped) barrier_wait(shared.empty(stage), parity ^ 1);", ""
    ),
    "scales have a slot too few": Defect("test_prompt_experts_on_cpu.py", "ring == 2", "ring == 1"),
    "tiles have too few descriptions": Defect(
        "test_prompt_experts_on_cpu.py", "#define INFOS (STAGES + 1)", "#define INFOS 2"
    ),
    "a stage is announced before its copies have arrived": Defect(
        "test_prompt_experts_on_cpu.py", "copies_wait<PENDING>();", "copies_wait<PENDING + 1>();"
    ),
    "copies of other threads are not awaited": Defect(
        "test_digit_experts_on_cpu.py",
        "__syncthreads();  // copies of all threads",
        "// copies of all threads",
    ),
    "one group of copies is not awaited": Defect(
        "test_gemm_rows_on_cpu.py",
        "wait_for_copies<ROWS_STAGES - 2>();",
        "wait_for_copies<ROWS_STAGES - 1>();",
    ),
    "a staged row is read before other lanes have it": Defect(
        "test_experts_on_cpu.py", "await_requests(0);\n    __syncwarp();", "await_requests(0);"
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


def run_tests(name: str, only: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"tests/kernels/{name}", *(["-k", only] if only else [])]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    ("sanitizer", "name"),
    list(itertools.product(LIBRARIES, FILES)) if FULL else IN_SHORT,
    ids=lambda each: each,
)
def test_kernels_have_no_races_and_stay_within_their_memory(sanitizer, name):
    result = run_tests(name, "" if FULL else SELECTED[name], environment(sanitizer))
    reports = result.stderr + result.stdout
    assert result.returncode == 0, reports[-6000:]
    assert " passed" in result.stdout and "ERROR: " not in reports and "WARNING: Thread" not in reports


@pytest.mark.parametrize("name", list(DEFECTS)[: None if FULL else 2])
def test_deliberate_defects_are_reported(name):
    """At small sizes, also with the full suite: the first report ends a run."""
    defect = DEFECTS[name]
    variables = environment(defect.sanitizer, **{DEFECT: json.dumps([defect.sound, defect.broken])})
    variables.pop("BIRKHOFF_FULL", None)
    result = run_tests(defect.file, defect.only, variables)
    assert result.returncode != 0 and defect.report in result.stderr + result.stdout, result.stdout[-3000:]
