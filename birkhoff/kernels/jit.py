"""Compilation of the CPU twins with Numba, if it is installed.

The twins are plain loops over rows, compiled once per machine and version. Sums may be reassociated, which allows
vectorisation; infinities and NaN keep their meaning, since masks and health checks rely on them. Without Numba the
reference twins are used.

Compiled code is kept in the user's cache folder (`cache_folder.py`), else next to the sources, else not at all, so that
a read-only installation works. It inlines functions of other files, but Numba's own cache checks the text of one file
only. Therefore the folder is named after a digest of all sources that are compiled: installations of one version share
it, and those of different versions do not overwrite each other's code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from birkhoff.kernels.cache_folder import cache_folder

AVAILABLE = importlib.util.find_spec("numba") is not None
MATH = {"reassoc", "contract", "arcp", "nsz"}
KERNELS = Path(__file__).parent


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use; without Numba the function itself, which is then never called."""
    if not AVAILABLE:
        return function
    import numba

    dispatcher: Any = numba.njit(fastmath=MATH, nogil=True, error_model="numpy")(function)
    folder = compiled_code_folder()
    if folder is not None:
        with suppress(RuntimeError):  # Numba's settings may exclude our locator: then nothing is kept
            dispatcher._cache = _function_cache(folder)(
                function
            )  # what njit(cache=True) does, with our folder
    return dispatcher


@contextmanager
def compilation_noticed(on_compile: Callable[[], None]) -> Iterator[None]:
    """Call `on_compile` before the first function that is compiled, not loaded, inside the block."""
    from numba.core import event

    class FirstCompilation(event.Listener):
        noticed = False

        def on_start(self, event: object) -> None:
            if not self.noticed:
                self.noticed = True
                on_compile()

        def on_end(self, event: object) -> None:
            pass

    with event.install_listener("numba:compile", FirstCompilation()):
        yield


@cache
def compiled_code_folder() -> Path | None:
    """The folder of compiled code for these sources, this Python and this Numba; None if none can be written."""
    import numba

    digest = hashlib.sha256()
    for source in sorted(KERNELS.rglob("*.py")):
        text = source.read_bytes()
        if b"jit import compiled" in text or source.name == "jit.py":
            digest.update(str(source.relative_to(KERNELS)).encode() + text)
    name = f"{digest.hexdigest()[:16]}-numba{numba.__version__}-py{platform.python_version()}"
    for folder in (cache_folder("cpu") / name, KERNELS / "__pycache__" / name):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        return folder
    return None


@cache
def _function_cache(folder: Path) -> Any:
    """Numba's cache class with files in a subfolder of `folder` for each package of kernels."""
    from numba.core.caching import CompileResultCacheImpl, FunctionCache

    class KernelLocator:
        def __init__(self, function: Callable[..., Any], file: str):
            self._path = folder / Path(file).parent.name
            self._line = function.__code__.co_firstlineno

        @classmethod
        def from_function(cls, function: Callable[..., Any], file: str) -> KernelLocator:
            return cls(function, file)

        def get_cache_path(self) -> str:
            return str(self._path)

        def ensure_cache_path(self) -> None:
            os.makedirs(self._path, exist_ok=True)

        def get_source_stamp(self) -> str:
            return folder.name

        def get_disambiguator(self) -> str:
            return str(self._line)

    class KernelCacheFiles(CompileResultCacheImpl):
        _locator_classes: list[type[object]] = [KernelLocator]  # noqa: RUF012

    class KernelCache(FunctionCache):
        _impl_class = KernelCacheFiles

    return KernelCache
