"""Extract the string templates of a checkpoint's encoder file without executing it.

A checkpoint is untrusted, so its Python is treated as data: `ast` parses it, and a small evaluator handles string
constants, concatenation, f-strings, `.format(...)` calls and names bound to strings at module level. Any other
expression inside a string becomes a `Placeholder`. The result is every string of the file as a `Template`, with the
name or dictionary key it is bound to; `prompt_texts.py` selects the relevant ones.

Sizes are bounded, and a file that cannot be parsed raises CheckpointError.
"""

from __future__ import annotations

import ast
import string
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from birkhoff.errors import CheckpointError
from birkhoff.small_file import CONFIG_BYTES, read_bytes

MAX_FILES = 16
_FILE_PATTERNS = ("encoding/encoding*.py", "encoding*.py", "encoding/*.py")


@dataclass(frozen=True)
class Placeholder:
    """A part of a string that the file computes at run time."""

    name: str


Parts = tuple["str | Placeholder", ...]


@dataclass(frozen=True)
class Template:
    """One string of the file. `label` is the variable or dictionary key it is bound to, or empty."""

    label: str
    parts: Parts

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        return tuple(part for part in self.parts if isinstance(part, Placeholder))

    def split_at_placeholder(self) -> tuple[str, str] | None:
        """Return the text before and after the placeholder if there is exactly one, else None."""
        if len(self.placeholders) != 1:
            return None
        index = next(i for i, part in enumerate(self.parts) if isinstance(part, Placeholder))
        return _text(self.parts[:index]), _text(self.parts[index + 1 :])

    @property
    def text(self) -> str | None:
        """The whole string, or None if it has placeholders."""
        return None if self.placeholders else _text(self.parts)


def encoder_files(checkpoint_dir: Path) -> list[Path]:
    """Return the Python files of a checkpoint that may hold its chat encoding, most likely first."""
    files = [
        file for pattern in _FILE_PATTERNS for file in sorted(checkpoint_dir.glob(pattern)) if file.is_file()
    ]
    return list(dict.fromkeys(files))[:MAX_FILES]


def read_templates(file: Path) -> list[Template]:
    """Return every string of a Python file, as far as it is known without executing it."""
    try:
        source = read_bytes(file, CONFIG_BYTES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bad escape sequences in the file are not the user's concern
            tree = ast.parse(source)
        return list(_EncoderReader(tree).templates())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{file.name} cannot be read as Python ({type(error).__name__}), so the model's prompt texts are unknown. "
            "Download it again, or delete it to chat with Birkhoff's own wording."
        ) from None


class _EncoderReader:
    """Evaluates the string expressions of one module."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._known: dict[str, str] = {}
        self._renamed: dict[str, ast.expr] = {}
        for statement in tree.body:
            for name, value in _bindings(statement):
                text = _constant(self._parts(value))
                if text is not None:
                    self._known[name] = text
        # `TEMPLATE.format(token=marker)` fills a placeholder from another variable.
        self._renamed = {
            keyword.arg: keyword.value
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "format"
            for keyword in call.keywords
            if keyword.arg
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
        """Return the parts of the string that `node` evaluates to, or None if it is not a string."""
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
        """Return the parts of one piece of an f-string."""
        if isinstance(node, ast.FormattedValue):
            plain = node.conversion == -1 and node.format_spec is None
            return (self._parts(node.value) if plain else None) or (Placeholder(ast.unparse(node.value)),)
        return self._parts(node) or (Placeholder(""),)

    def _formatted(self, parts: Parts) -> Iterator[str | Placeholder]:
        """Yield `parts` parsed as a `str.format` template, with known names filled in."""
        for part in parts:
            if isinstance(part, Placeholder):
                yield part
                continue
            try:
                fields = list(string.Formatter().parse(part))
            except ValueError:  # braces that do not form a template
                yield part
                continue
            for text, name, _, _ in fields:
                if text:
                    yield text
                if name is not None:
                    yield self._fill(name)

    def _fill(self, name: str) -> str | Placeholder:
        if name in self._known:
            return self._known[name]
        value = self._renamed.get(name)
        text = _constant(self._parts(value)) if isinstance(value, (ast.Name, ast.Constant)) else None
        return Placeholder(name) if text is None else text


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        yield node.target.id, node.value


def _constant(parts: Parts | None) -> str | None:
    return None if parts is None or any(isinstance(part, Placeholder) for part in parts) else _text(parts)


def _text(parts: Parts) -> str:
    return "".join(part for part in parts if isinstance(part, str))
