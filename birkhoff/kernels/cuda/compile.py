"""CUDA source to something that can be launched: NVRTC and the driver, through ctypes.

PyTorch's CUDA builds bring NVRTC along, so nothing has to be installed and no compiler called. A `Module` is compiled
for one device in a few seconds; its launches go to PyTorch's current stream and may be captured into a graph.
"""

from __future__ import annotations

import ctypes
import glob
import os
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

import torch

from birkhoff.errors import OptionError


def find_nvrtc() -> ctypes.CDLL | None:
    """NVRTC as PyTorch, an environment's packages or a toolkit bring it; None when nobody does."""
    root = Path(torch.__file__).parents[1]
    places = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    for pattern in (
        f"{root}/nvidia/*/lib/libnvrtc.so.*",
        f"{root}/torch/lib/libnvrtc*.so.*",
        f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/lib64/libnvrtc.so*",
    ):
        places += sorted(glob.glob(pattern))
    for place in places:
        if "builtins" in place:
            continue
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


def compile_cubin(nvrtc: ctypes.CDLL, path: Path, capability: tuple[int, int]) -> bytes:
    """One source, which may include the headers that lie beside it."""
    program = c_void_p()
    headers = {header.name.encode(): header.read_bytes() for header in path.parent.glob("*.cuh")}
    texts, names = ((c_char_p * len(headers))(*part) for part in (headers.values(), headers))
    made = nvrtc.nvrtcCreateProgram(
        byref(program), path.read_bytes(), path.name.encode(), len(headers), texts, names
    )
    _ok(made, "nvrtcCreateProgram")
    options = [
        f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(),
        b"--std=c++17",
        b"-default-device",
    ]
    done = nvrtc.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
    if done:
        size = c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(f"our CUDA source does not compile: {log.value.decode(errors='replace')}")
    size = c_size_t()
    _ok(nvrtc.nvrtcGetCUBINSize(program, byref(size)), "nvrtcGetCUBINSize")
    cubin = ctypes.create_string_buffer(size.value)
    _ok(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(byref(program))
    return cubin.raw


def _ok(code: int, what: str) -> None:
    if code:
        raise OptionError(
            f"{what} failed with CUDA error {code}. Use kernels='reference', or update the driver."
        )


class _Attribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint),
    )


_PROGRAMMATIC_SERIALIZATION = 6
_MOST_DYNAMIC_SHARED = 8
_PDL_ATTRIBUTE = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, 1)


class Module:
    """Compiled kernels of one source, on the device that is current."""

    def __init__(self, nvrtc: ctypes.CDLL, path: Path, device: torch.device):
        torch.cuda.init()
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # makes the device's context current in this thread
            self._driver = ctypes.CDLL("libcuda.so.1")
            self._cubin = compile_cubin(nvrtc, path, torch.cuda.get_device_capability(device))
            self._module = c_void_p()
            _ok(self._driver.cuModuleLoadData(byref(self._module), self._cubin), "cuModuleLoadData")
        self._functions: dict[str, c_void_p] = {}
        self._allowed: dict[str, int] = {}  # bytes of shared memory beside what a source declares

    def launch(
        self,
        name: str,
        grid: tuple[int, int] | tuple[int, int, int],
        threads: int,
        *arguments: torch.Tensor | int | float | c_void_p | None,
        pdl: bool,
        shared: int = 0,
    ) -> None:
        """On the current stream. Tensors go as addresses, whole numbers as int, others as float.

        `shared`: bytes of shared memory beside what the source declares.
        `pdl`: may begin before its predecessor has ended, which the kernel then waits for by itself."""
        function = self._functions.get(name)
        if function is None:
            function = c_void_p()
            found = self._driver.cuModuleGetFunction(byref(function), self._module, name.encode())
            _ok(found, f"cuModuleGetFunction({name})")
            self._functions[name] = function
        if shared > self._allowed.get(name, 0):
            _ok(
                self._driver.cuFuncSetAttribute(function, _MOST_DYNAMIC_SHARED, shared),
                f"cuFuncSetAttribute({name})",
            )
            self._allowed[name] = shared
        values = [_argument(argument) for argument in arguments]
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        blocks = (grid[0], grid[1], grid[2] if len(grid) > 2 else 1)
        config = _Config(blocks, (threads, 1, 1), shared, torch.cuda.current_stream().cuda_stream)
        if pdl:
            config.attributes = ctypes.addressof(_PDL_ATTRIBUTE)
            config.count = 1
        _ok(self._driver.cuLaunchKernelEx(byref(config), function, pointers, None), name)


def _argument(value: torch.Tensor | int | float | c_void_p | None) -> c_void_p | c_int | c_float:
    if value is None or isinstance(value, c_void_p):
        return value or c_void_p(0)
    if isinstance(value, torch.Tensor):
        return c_void_p(value.data_ptr())
    return c_int(value) if isinstance(value, int) else c_float(value)
