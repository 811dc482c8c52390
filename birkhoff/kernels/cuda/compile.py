"""Compile CUDA sources with NVRTC and launch their kernels through the driver API, both via ctypes.

PyTorch's CUDA builds ship NVRTC, so neither a toolkit nor an offline compiler is needed. A `Module` is compiled for one
device in a few seconds; its launches use PyTorch's current stream and may be captured into a CUDA graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import os
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from functools import lru_cache
from pathlib import Path

import torch

from birkhoff.atomic_file import write_atomic
from birkhoff.errors import OptionError
from birkhoff.kernels.cache_folder import cache_folder


def find_nvrtc() -> ctypes.CDLL | None:
    """NVRTC from PyTorch, a pip package or a CUDA toolkit; None if not installed."""
    root = Path(torch.__file__).parents[1]
    candidates = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    for pattern in (
        f"{root}/nvidia/*/lib/libnvrtc.so.*",
        f"{root}/torch/lib/libnvrtc*.so.*",
        f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/lib64/libnvrtc.so*",
    ):
        candidates += sorted(glob.glob(pattern))
    for path in candidates:
        if "builtins" in path:
            continue
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def cached_cubin(
    nvrtc: ctypes.CDLL, path: Path, capability: tuple[int, int], defines: tuple[str, ...] = ()
) -> bytes:
    """`compile_cubin`, kept on disk under a key of the sources, the compiler's version and the device's capability.

    A cache that cannot be read or written is ignored."""
    major, minor = c_int(), c_int()
    _check(nvrtc.nvrtcVersion(byref(major), byref(minor)), "nvrtcVersion")
    sources = [path, *sorted(path.parent.glob("*.cuh"))]
    key = hashlib.sha256(repr((major.value, minor.value, capability, path.name, defines)).encode())
    for source in sources:
        key.update(source.read_bytes())
    file = cache_folder("cubin") / f"{path.stem}-{key.hexdigest()[:32]}.cubin"
    try:
        return file.read_bytes()
    except OSError:
        cubin = compile_cubin(nvrtc, path, capability, defines)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, cubin, sync=False)
    return cubin


def architecture(path: Path, capability: tuple[int, int]) -> str:
    """The target of a source: sources that include `wgmma.cuh` use instructions of one architecture only."""
    own = "a" if '#include "wgmma.cuh"' in path.read_text() else ""
    return f"sm_{capability[0]}{capability[1]}{own}"


def compile_cubin(
    nvrtc: ctypes.CDLL, path: Path, capability: tuple[int, int], defines: tuple[str, ...] = ()
) -> bytes:
    """Compile one source to machine code; it may include the headers of its folder. `defines` are NAME=VALUE."""
    program = c_void_p()
    headers = {header.name.encode(): header.read_bytes() for header in path.parent.glob("*.cuh")}
    texts, names = ((c_char_p * len(headers))(*part) for part in (headers.values(), headers))
    status = nvrtc.nvrtcCreateProgram(
        byref(program), path.read_bytes(), path.name.encode(), len(headers), texts, names
    )
    _check(status, "nvrtcCreateProgram")
    options = [
        f"--gpu-architecture={architecture(path, capability)}".encode(),
        b"--std=c++17",
        b"-default-device",
        *(f"-D{each}".encode() for each in defines),
    ]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
    if status:
        size = c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(f"our CUDA source does not compile: {log.value.decode(errors='replace')}")
    size = c_size_t()
    _check(nvrtc.nvrtcGetCUBINSize(program, byref(size)), "nvrtcGetCUBINSize")
    cubin = ctypes.create_string_buffer(size.value)
    _check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(byref(program))
    return cubin.raw


def _check(code: int, call: str) -> None:
    if code:
        raise OptionError(
            f"{call} failed with CUDA error {code}. Use kernels='reference', or update the driver."
        )


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", ctypes.c_char * 60))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint),
    )


# Values of CUlaunchAttributeID and CUfunction_attribute.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_PDL_ATTRIBUTE = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)


class Module:
    """The compiled kernels of one source, with `defines`, on one device."""

    def __init__(self, nvrtc: ctypes.CDLL, path: Path, device: torch.device, defines: tuple[str, ...] = ()):
        torch.cuda.init()
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # make the context of the device current in this thread
            self._driver = ctypes.CDLL("libcuda.so.1")
            self._cubin = cached_cubin(nvrtc, path, torch.cuda.get_device_capability(device), defines)
            self._module = c_void_p()
            _check(self._driver.cuModuleLoadData(byref(self._module), self._cubin), "cuModuleLoadData")
        self._functions: dict[str, c_void_p] = {}
        self._dynamic_shared: dict[str, int] = {}  # limit set per kernel, bytes

    def launch(
        self,
        name: str,
        grid: tuple[int, int] | tuple[int, int, int],
        threads: int,
        *arguments: torch.Tensor | int | float | c_void_p | None,
        pdl: bool,
        shared: int = 0,
    ) -> None:
        """Launch kernel `name` on the current stream. Tensors are passed as addresses, ints as int, floats as float.

        `shared`: bytes of dynamic shared memory.
        `pdl`: programmatic dependent launch; the kernel may start before the preceding one has ended and waits for it
        itself."""
        function = self._functions.get(name)
        if function is None:
            function = c_void_p()
            status = self._driver.cuModuleGetFunction(byref(function), self._module, name.encode())
            _check(status, f"cuModuleGetFunction({name})")
            self._functions[name] = function
        if shared > self._dynamic_shared.get(name, 0):
            _check(
                self._driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
                f"cuFuncSetAttribute({name})",
            )
            self._dynamic_shared[name] = shared
        values = [_argument(argument) for argument in arguments]
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        blocks = (grid[0], grid[1], grid[2] if len(grid) > 2 else 1)
        config = _LaunchConfig(blocks, (threads, 1, 1), shared, torch.cuda.current_stream().cuda_stream)
        if pdl:
            config.attributes = ctypes.addressof(_PDL_ATTRIBUTE)
            config.count = 1
        _check(self._driver.cuLaunchKernelEx(byref(config), function, pointers, None), name)


def _argument(value: torch.Tensor | int | float | c_void_p | None) -> c_void_p | c_int | c_float:
    if value is None or isinstance(value, c_void_p):
        return value or c_void_p(0)
    if isinstance(value, torch.Tensor):
        return c_void_p(value.data_ptr())
    return c_int(value) if isinstance(value, int) else c_float(value)


@lru_cache
def compiled_module(file: str, device: torch.device, defines: tuple[str, ...] = ()) -> Module:
    """The module of a source of this folder, compiled once per process, device and `defines`: it takes seconds."""
    nvrtc = find_nvrtc()
    assert nvrtc is not None
    return Module(nvrtc, Path(__file__).parent / file, device, defines)
