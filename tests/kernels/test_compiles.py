"""Prefill kernels compile for an H200, fit its shared memory and use its tensor cores; they and CUDA sources compile
for other GPUs too. No GPU is needed.

The interpreter, which all other tests use, accepts programs that the compiler rejects.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from birkhoff.kernels.cuda.compile import architecture, cached_cubin, compile_cubin, find_nvrtc
from birkhoff.kernels.cuda.variants import BLOCK_DECODERS, BlockVariant
from tests.sizes import FULL

pytest.importorskip("triton", reason="triton is not installed")
CUDA_FOLDER = Path(__file__).parents[2] / "birkhoff" / "kernels" / "cuda"
SHARED = 232_448  # bytes available to one thread block
HOPPER_ONLY = ("attention on Hopper",)
ALL = ("experts gate_up", "experts down", "linear fp8", "mhc mix", "attention", "index score")
SOME = (
    "experts down",
    "linear fp8",
    "mhc mix",
    "index score",
    *HOPPER_ONLY,
)  # the others take several seconds each


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    library = find_nvrtc()
    assert library is not None, "NVRTC is a requirement of the tests"
    return library


def test_prefill_kernels_compile_for_hopper(tmp_path):
    kernel_names = (*ALL, *HOPPER_ONLY) if FULL else SOME
    rows = compile_elsewhere(list(kernel_names), tmp_path)
    assert [row["kernel"] for row in rows] == list(kernel_names)
    for row in rows:
        assert row["shared"] <= SHARED and row["tensor_cores"], row
        # `mhc mix` uses a tile of streams in two products and a sum of squares, so its products must have finished
        # before the tile is overwritten.
        assert row["waits_for_products"] or row["kernel"] != "mhc mix", row
        assert row["async_copies"], row


# A kernel of each kind for each GPU; all of them with the full suite.
OTHER_GPUS = ("sm_89", "sm_100", "sm_120", "gfx942")
KERNELS_ELSEWHERE = (*ALL, "norm rotate", "compress", "store", "round", "hadamard")
STEPS = (
    "attention",
    "combine",
    "write",
    "read",
    "route",
    "gate_up",
    "down",
    "swiglu",
    "product",
    "score",
    "top-k",
)
DECODE = [f"decode {name}" for name in (*STEPS, "caches", "norm")]
FP8_KERNELS = ("quantise", "norm codes", "gate codes", "read codes", "fp8 product", "fp8 gate_up", "fp8 down")
FEW = (
    "sm_89 quantise",
    "sm_89 decode combine",
    "sm_100 index score",
    "sm_120 quantise",
    "gfx942 index score",
    "gfx942 decode combine",
)


def test_kernels_compile_for_other_gpus_and_fit_their_shared_memory(tmp_path):
    """Ada, Blackwell and AMD's gfx942, of which none was at hand. FP8 products are not launched on the last one. Every
    decode kernel is compiled for those without CUDA kernels, Ada and gfx942."""
    names = FEW
    if FULL:
        names = [f"{gpu} {kernel}" for gpu in OTHER_GPUS for kernel in KERNELS_ELSEWHERE]
        names += [f"{gpu} {kernel}" for gpu in OTHER_GPUS[:3] for kernel in FP8_KERNELS]
        names += [f"sm_90 {kernel}" for kernel in FP8_KERNELS]
        names += [f"{gpu} {kernel}" for gpu in ("sm_89", "gfx942") for kernel in DECODE]
    rows = compile_elsewhere(["targets", *names], tmp_path)
    assert [f"{row['target']} {row['kernel']}" for row in rows] == list(names)
    assert all(row["shared"] <= row["limit"] for row in rows), rows


# What CUDA sources are compiled for. Older GPUs, without programmatic dependent launch, use the Triton twins; the
# matrix instructions of the sources of sm_90a exist on 9.0 only; elsewhere other kernels run.
PORTABLE = (
    "gemv",
    "gemm_rows",
    "experts",
    "fp8_experts",
    "blocks",
    "mhc",
    "query",
    "route",
    "topk",
    "attend",
    "sample",
)
HOPPER_SOURCES = ("prompt_experts", "digit_experts")
CAPABILITIES = {"sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}
SLOW = ("gemv", "experts")  # seconds each: compiled for Hopper alone in `make test`


@pytest.mark.parametrize("target", CAPABILITIES)
def test_cuda_sources_compile_for_hopper_and_blackwell(nvrtc, target):
    """With NVRTC and the options of `compile.py`, as on a machine with a GPU."""
    stems = {path.stem for path in CUDA_FOLDER.glob("*.cu")}
    assert stems == {*PORTABLE, *HOPPER_SOURCES}, "every source has a target"
    sources = (*PORTABLE, *HOPPER_SOURCES) if target == "sm_90" else PORTABLE
    for stem in sources:
        if not FULL and stem in SLOW and target != "sm_90":
            continue
        source = CUDA_FOLDER / f"{stem}.cu"
        own = "a" if stem in HOPPER_SOURCES else ""
        assert architecture(source, CAPABILITIES[target]) == target + own
        for defines in ((), ("Q8_CODES=1",)) if stem == "gemv" and FULL else ((),):
            assert compile_cubin(nvrtc, source, CAPABILITIES[target], defines).startswith(b"\x7fELF")


# What the sources use that Ada does not have: programmatic dependent launch, clusters.
WITHOUT_ADA = r"griddepcontrol|cluster"


@pytest.mark.parametrize("stem", PORTABLE if FULL else ["mhc", "sample"])
def test_cuda_sources_do_not_compile_for_ada(nvrtc, stem):
    """`unsupported_reason` and `DeviceSampler.supported` send these GPUs to the Triton twins and the plain sampler
    (tests/decode/test_gpu.py). Sources that compile for Ada could be launched there."""
    defines = BlockVariant("Q2_K", 8, 2).defines if stem == "blocks" else ()  # without, it has no kernel
    with pytest.raises(AssertionError, match="does not compile") as error:
        compile_cubin(nvrtc, CUDA_FOLDER / f"{stem}.cu", (8, 9), defines)
    assert re.search(WITHOUT_ADA, str(error.value)), str(error.value)[:500]


@pytest.mark.parametrize("target", CAPABILITIES if FULL else ["sm_90"])
def test_every_decoder_of_experts_compiles(nvrtc, target):
    for name in BLOCK_DECODERS:
        variant = BlockVariant(name, 8, 2)
        compile_cubin(nvrtc, CUDA_FOLDER / "blocks.cu", CAPABILITIES[target], variant.defines)


def test_a_source_that_does_not_compile_says_why(nvrtc, tmp_path):
    source = tmp_path / "wrong.cu"
    source.write_text('extern "C" __global__ void wrong() { missing(); }')
    with pytest.raises(AssertionError, match=r'does not compile: wrong\.cu.*"missing" is undefined'):
        compile_cubin(nvrtc, source, (9, 0))


def test_decoders_of_experts_fit_the_registers_of_their_thread_blocks(tmp_path):
    names = list(BLOCK_DECODERS) if FULL else ["Q2_K_DIGITS"]
    for name in names:
        for warps, stages in ((4, 1), (8, 2)) if FULL else ((8, 2),):
            variant = BlockVariant(name, warps, stages)
            report = compile_with_nvcc("blocks", "sm_90", tmp_path, variant.defines)
            used = [int(each) for each in re.findall(r"Used (\d+) registers", report)]
            assert len(used) == 2 and max(used) <= 128, report  # two thread blocks of eight warps


def compile_with_nvcc(stem: str, target: str, folder: Path, defines: tuple[str, ...] = ()) -> str:
    """Compile a CUDA source; returns the assembler's report of registers and memory."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    options = ["-std=c++17", f"-arch={target}", "-cubin", "-Xptxas", "-v", *(f"-D{each}" for each in defines)]
    command = [nvcc, *options, CUDA_FOLDER / f"{stem}.cu", "-o", folder / "out"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, (target, stem, defines, process.stderr[-2000:])
    return process.stderr


def compile_elsewhere(arguments: list[str], cache: Path) -> list[dict]:
    """The JSON lines of `compile_for_hopper`, which runs in a process that does not interpret."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper", *arguments],
        cwd=Path(__file__).parent.parent.parent,
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


def test_compiled_cuda_sources_are_cached_on_disk(nvrtc, tmp_path, monkeypatch):
    monkeypatch.setenv("BIRKHOFF_CACHE", str(tmp_path))
    source = tmp_path / "one.cu"
    source.write_text('extern "C" __global__ void one(int* x) { *x = 1; }')
    first = cached_cubin(nvrtc, source, (9, 0))
    (file,) = (tmp_path / "cubin").iterdir()
    assert file.read_bytes() == first == cached_cubin(nvrtc, source, (9, 0))
    source.write_text('extern "C" __global__ void one(int* x) { *x = 2; }')
    assert cached_cubin(nvrtc, source, (9, 0)) != first
    monkeypatch.setenv("BIRKHOFF_CACHE", str(source))  # a file, so that nothing can be cached there
    assert cached_cubin(nvrtc, source, (9, 0))
