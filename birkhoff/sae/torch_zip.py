"""Plain tensors out of a file that `torch.save` wrote, without unpickling anything.

Such a file is a zip archive: `data.pkl` says which tensors there are, `data/N` holds their bytes. The pickle is not
run. Its opcodes are read one by one by an interpreter that knows numbers, texts, tuples, lists, dictionaries and two
constructions: an ordered dictionary, and a tensor on a storage of a known element type. Anything else, such as a name
of some other function, ends the reading with its name. So a file can hold tensors or be refused; it cannot do anything.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from birkhoff.errors import SaeFileError, quoted

_TYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_REBUILD = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_ORDERED = "collections OrderedDict"
_MARK = object()
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "INT",
    "LONG",
    "FLOAT",
    "UNICODE",
}


@dataclass(frozen=True)
class _Name:
    """A name the pickle mentions. It is compared, never looked up."""

    text: str


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype


def read_plain_tensors(path: Path) -> dict[str, Any]:
    """Tensors by name, and numbers or texts beside them."""
    try:
        with zipfile.ZipFile(path) as archive:
            index = [name for name in archive.namelist() if name.endswith("/data.pkl") or name == "data.pkl"]
            if len(index) != 1:
                raise SaeFileError(f"{path} is an archive without the index of torch.save.")
            read = _PickleReader(path, archive, index[0].removesuffix("data.pkl"))
            found = read.run(archive.read(index[0]))
    except (zipfile.BadZipFile, KeyError, EOFError, OSError) as error:
        raise SaeFileError(
            f"{path} is not an archive that torch.save writes ({error}). Files of the old form are pickles and nothing "
            "else: save them again with a current torch."
        ) from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise SaeFileError(
            f"{path} holds {quoted(type(found).__name__)}, expected tensors by name (a state_dict)."
        )
    return found


class _PickleReader:
    def __init__(self, path: Path, archive: zipfile.ZipFile, prefix: str):
        self._path = path
        self._archive = archive
        self._prefix = prefix
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        try:
            for opcode, argument, _ in pickletools.genops(program):
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._step(opcode.name, argument)
        except (IndexError, ValueError, TypeError, AttributeError) as error:
            raise SaeFileError(f"{self._path}: its index makes no sense ({error}).") from None
        raise SaeFileError(f"{self._path}: its index is cut short.")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("PROTO", "FRAME"):
            pass
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self._memo:
                raise ValueError(f"nothing was kept under {argument}")
            stack.append(self._memo[argument])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name in ("APPEND", "APPENDS"):
            entries = [stack.pop()] if name == "APPEND" else self._since_mark()
            stack[-1].extend(entries)
        elif name in ("SETITEM", "SETITEMS"):
            pairs = [stack.pop(-2), stack.pop()] if name == "SETITEM" else self._since_mark()
            stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            text = argument if name == "GLOBAL" else f"{stack.pop(-2)} {stack.pop()}"
            stack.append(self._known(text))
        elif name == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(self._construct(stack.pop(), arguments))
        elif name == "BUILD":
            stack.pop()  # attributes of a dictionary, such as torch's version notes: left out
            if not isinstance(stack[-1], dict):
                raise SaeFileError(
                    f"{self._path}: its index sets attributes of a {type(stack[-1]).__name__}."
                )
        else:
            raise SaeFileError(
                f"{self._path}: its index uses {name}, which plain tensors do not need. It is not read."
            )

    def _since_mark(self) -> list[Any]:
        at = max(place for place, entry in enumerate(self._stack) if entry is _MARK)
        found = self._stack[at + 1 :]
        del self._stack[at:]
        return found

    def _known(self, text: str) -> _Name:
        module, _, name = text.partition(" ")
        if text in (_REBUILD, _PARAMETER, _ORDERED) or (module == "torch" and name in _TYPES):
            return _Name(text)
        raise SaeFileError(
            f"{self._path} names {quoted(text.replace(' ', '.'))}, which plain tensors do not need, so it is not read. "
            "Save the state_dict alone."
        )

    def _storage(self, said: Any) -> _Storage:
        kind, name, key, _, count = said
        if (
            kind != "storage"
            or not isinstance(name, _Name)
            or not isinstance(key, str)
            or not isinstance(count, int)
        ):
            raise ValueError("a storage is described by something else than a storage")
        return _Storage(key, _TYPES[name.text.partition(" ")[2]])

    def _construct(self, what: Any, arguments: Any) -> Any:
        if what == _Name(_ORDERED):
            return dict(*arguments)
        if what == _Name(_PARAMETER):
            return arguments[0]
        if what != _Name(_REBUILD):
            raise ValueError("something that is no constructor is called")
        storage, offset, size, stride = arguments[:4]
        if not isinstance(storage, _Storage):
            raise ValueError("a tensor lies on no storage")
        numbers = (offset, *size, *stride)
        if len(size) != len(stride) or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("a tensor's sizes are not whole numbers")
        raw = bytearray(self._archive.read(f"{self._prefix}data/{storage.key}"))
        held = torch.frombuffer(raw, dtype=storage.dtype) if raw else torch.empty(0, dtype=storage.dtype)
        last = offset + sum((length - 1) * step for length, step in zip(size, stride))
        if math.prod(size) and last >= len(held):
            raise ValueError(f"a tensor reaches number {last} of a storage with {len(held)}")
        return torch.as_strided(held, size, stride, offset).clone()
