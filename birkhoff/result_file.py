"""Files of results: one safetensors file with the tensors of a result, and JSON in its metadata.

    trace.save("cat.safetensors")
    Trace.load("cat.safetensors")

The metadata has `format`, "birkhoff KIND 1", and under the name of the kind everything that is no tensor. Other
programs read such files with `safetensors.safe_open`. A class takes part by inheriting from `SavedResult` and saying
what its parts are; results of several texts hold the parts of each, numbered."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch

from birkhoff.atomic_file import save_tensors
from birkhoff.errors import DataError, quoted
from birkhoff.small_file import check_regular


class FileParts(NamedTuple):
    """What a file holds: tensors by name, and facts that JSON can express."""

    tensors: Mapping[str, torch.Tensor]
    facts: Any


class SavedResult(ABC):
    """A result with `save` and `load`. Subclasses give `kind`, `file_parts` and `from_file_parts`."""

    kind: ClassVar[str]

    @abstractmethod
    def file_parts(self) -> FileParts:
        """What `save` writes."""

    @classmethod
    @abstractmethod
    def from_file_parts(cls, parts: FileParts) -> Self:
        """The result that has these parts."""

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with JSON metadata; `load` of the same class reads it back. The file is complete
        under its name or absent."""
        parts = self.file_parts()
        # Tensors of one file may not share memory, and views of a graph or of a GPU are copied anyway.
        stored = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in parts.tensors.items()}
        save_tensors(path, stored, {"format": _format(self.kind), self.kind: json.dumps(parts.facts)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a result that `save` of this class wrote."""
        from safetensors import SafetensorError, safe_open

        try:
            check_regular(path)
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _format(cls.kind):
                    raise DataError(
                        f"{path} is no {cls.kind}: its format is {quoted(metadata.get('format'))}, expected "
                        f"{_format(cls.kind)!r}. Open it with load of the class that saved it."
                    )
                facts = json.loads(metadata[cls.kind])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
            return cls.from_file_parts(FileParts(tensors, facts))
        except (
            OSError,
            SafetensorError,
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
        ) as error:
            raise DataError(
                f"{path} cannot be read as a {cls.kind}: {error}. Write it with {cls.__name__}.save(path)."
            ) from error


def join_parts(results: Sequence[SavedResult]) -> FileParts:
    """The parts of several results: tensors named `INDEX/NAME`, facts in a list."""
    parts = [result.file_parts() for result in results]
    tensors = {
        f"{index}/{name}": tensor for index, each in enumerate(parts) for name, tensor in each.tensors.items()
    }
    return FileParts(tensors, [each.facts for each in parts])


def split_parts(parts: FileParts) -> list[FileParts]:
    """The parts of each result, from those that `join_parts` made."""
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in parts.facts]
    for name, tensor in parts.tensors.items():
        index, _, own = name.partition("/")
        tensors[int(index)][own] = tensor
    return [FileParts(each, facts) for each, facts in zip(tensors, parts.facts)]


def site_name(hook: str, layer: int) -> str:
    """The name of a site's tensor in a file: `hook.layer`."""
    return f"{hook}.{layer}"


def site_of(name: str) -> tuple[str, int]:
    """The site that `site_name` named."""
    hook, _, layer = name.rpartition(".")
    return hook, int(layer)


def _format(kind: str) -> str:
    return f"birkhoff {kind} 1"
