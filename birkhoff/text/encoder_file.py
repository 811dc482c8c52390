"""Read the string templates of a checkpoint's encoder file without running a line of it.

A checkpoint may come from anywhere, so its Python is data: `ast` parses it, and a small evaluator understands string
constants, sums of strings, f-strings, `.format(...)` calls and names bound to strings at module level. Everything it
does not understand inside a string becomes a hole. The result is every string of the file as a `Template` with the
name or dictionary key it was bound to, whatever the author called it; `literals.py` decides which ones matter.

Sizes are bounded, and a file that cannot be parsed is refused as damaged.
"""

from __future__ import annotations

import ast
import string
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from birkhoff.errors import CheckpointError

LARGEST_FILE_BYTES = 2**20
MOST_FILES = 16
_PLACES = ("encoding/encoding*.py", "encoding*.py", "encoding/*.py")


@dataclass(frozen=True)
class Hole:
    """A place in a string that the file fills in at run time."""

    name: str


Parts = tuple["str | Hole", ...]


@dataclass(frozen=True)
class Template:
    """One string of the file. `label` is the variable or dictionary key it belongs to, or empty."""

    label: str
    parts: Parts

    @property
    def holes(self) -> tuple[Hole, ...]:
        return tuple(part for part in self.parts if isinstance(part, Hole))

    def around_only_hole(self) -> tuple[str, str] | None:
        """The text before and after, when exactly one hole is left."""
        if len(self.holes) != 1:
            return None
        place = next(i for i, part in enumerate(self.parts) if isinstance(part, Hole))
        return _text(self.parts[:place]), _text(self.parts[place + 1 :])

    @property
    def whole(self) -> str | None:
        return None if self.holes else _text(self.parts)


def encoder_files(checkpoint_dir: Path) -> list[Path]:
    """Python files of a checkpoint that may hold its chat encoding, likeliest first."""
    files = [file for place in _PLACES for file in sorted(checkpoint_dir.glob(place)) if file.is_file()]
    return list(dict.fromkeys(files))[:MOST_FILES]


def read_templates(file: Path) -> list[Template]:
    """Every string of a Python file, as far as it can be known without running it."""
    try:
        if file.stat().st_size > LARGEST_FILE_BYTES:
            raise CheckpointError(
                f"{file.name} has {file.stat().st_size} bytes, expected at most {LARGEST_FILE_BYTES}."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a stranger's bad escape sequence is not our user's concern
            tree = ast.parse(file.read_bytes())
        return list(_EncoderReader(tree).templates())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{file.name} cannot be read as Python ({type(error).__name__}), so the model's prompt texts are unknown. "
            "Download it again, or delete it to chat with Birkhoff's own wording."
        ) from None


class _EncoderReader:
    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._known: dict[str, str] = {}
        self._renamed: dict[str, ast.expr] = {}
        for statement in tree.body:
            for name, value in _bindings(statement):
                text = _whole(self._parts(value))
                if text is not None:
                    self._known[name] = text
        # `TEMPLATE.format(token=marker)` names a hole after another variable; a second look then fills it.
        self._renamed = {
            word.arg: word.value
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "format"
            for word in call.keywords
            if word.arg
        }

    def templates(self) -> Iterator[Template]:
        labels: dict[int, str] = {}
        for node in ast.walk(self._tree):
            for name, value in _bindings(node):
                labels.setdefault(id(value), name)
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        labels.setdefault(id(value), key.value)
        for node in ast.walk(self._tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp, ast.Call)):
                parts = self._parts(node)
                if parts is not None:
                    label = labels.get(id(node), "")
                    yield Template(label, parts)
                    if any(isinstance(part, str) and "{" in part for part in parts):
                        yield Template(label, tuple(self._formatted(parts)))

    def _parts(self, node: ast.AST) -> Parts | None:
        """The string `node` stands for, or None when it is not one."""
        if isinstance(node, ast.Constant):
            return (node.value,) if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            return (self._known[node.id],) if node.id in self._known else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left = self._parts(node.left)
            right = self._parts(node.right)
            return None if left is None or right is None else left + right
        if isinstance(node, ast.JoinedStr):
            return tuple(part for value in node.values for part in self._field(value))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            template = self._parts(node.func.value)
            return None if template is None else tuple(self._formatted(template))
        return None

    def _field(self, node: ast.AST) -> Parts:
        """A piece of an f-string."""
        if isinstance(node, ast.FormattedValue):
            plain = node.conversion == -1 and node.format_spec is None
            return (self._parts(node.value) if plain else None) or (Hole(ast.unparse(node.value)),)
        return self._parts(node) or (Hole(""),)

    def _formatted(self, parts: Parts) -> Iterator[str | Hole]:
        """The parts of `parts` read as a `str.format` template, known names filled in."""
        for part in parts:
            if isinstance(part, Hole):
                yield part
                continue
            try:
                fields = list(string.Formatter().parse(part))
            except ValueError:  # braces that are no template
                yield part
                continue
            for text, name, _, _ in fields:
                if text:
                    yield text
                if name is not None:
                    yield self._fill(name)

    def _fill(self, name: str) -> str | Hole:
        if name in self._known:
            return self._known[name]
        value = self._renamed.get(name)
        text = _whole(self._parts(value)) if isinstance(value, (ast.Name, ast.Constant)) else None
        return Hole(name) if text is None else text


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        yield node.target.id, node.value


def _whole(parts: Parts | None) -> str | None:
    return None if parts is None or any(isinstance(part, Hole) for part in parts) else _text(parts)


def _text(parts: Parts) -> str:
    return "".join(part for part in parts if isinstance(part, str))
