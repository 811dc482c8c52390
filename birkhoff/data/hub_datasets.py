"""Opens data sets of Hugging Face `datasets`: from its cache, a local path, a hub, or a folder of `save_to_disk`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from birkhoff.errors import DataError, did_you_mean, quoted
from birkhoff.extras import require

# Arguments of `datasets.load_dataset` that may follow the name.
ARGUMENTS = ("split", "name", "revision", "data_dir", "data_files", "streaming")
BATCH_ROWS = 1024


@dataclass(frozen=True)
class HubDataset:
    """A `datasets.Dataset` or `datasets.IterableDataset`, and how it was named."""

    dataset: Any
    name: str


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    )


def saved(path: Path, query: str) -> HubDataset:
    """Open a folder of `save_to_disk`. `query` may be `split=NAME`."""
    arguments = _arguments(str(path), query, ("split",))
    datasets = require("datasets", f"reading {path}")
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"{path} cannot be read by datasets: {str(error)[:300]}. Check the folder.") from None
    return HubDataset(_one_split(dataset, str(path), arguments.get("split")), str(path))


def load(text: str) -> HubDataset:
    """Open `NAME?split=train&streaming=true` with `datasets.load_dataset`."""
    name, _, query = text.partition("?")
    arguments: dict[str, Any] = dict(_arguments(f"datasets:{name}", query, ARGUMENTS))
    if "streaming" in arguments:
        value = arguments["streaming"].lower()
        if value not in ("true", "false", "1", "0"):
            raise DataError(f"datasets:{name} has streaming={value}, expected true or false.")
        arguments["streaming"] = value in ("true", "1")
    if not name:
        raise DataError("datasets: stands without a name, expected datasets:NAME?split=train or a path.")
    if is_saved(Path(name)):
        raise DataError(
            f"{name} was written by save_to_disk. Give the folder itself, without datasets: before it."
        )
    datasets = require("datasets", f"reading datasets:{name}")
    split = arguments.pop("split", None)
    # A slice such as train[:100] is part of `load_dataset`; a plain name is chosen here, for one error message.
    if split is not None and "[" in split and not arguments.get("streaming"):
        arguments["split"] = split
    try:
        dataset = datasets.load_dataset(name, **arguments)
    except Exception as error:  # of many classes: of datasets, of the hub, of file systems and of parsers
        reason = f"{type(error).__name__}: {str(error)[:400]}"
        raise DataError(
            f"datasets:{text} cannot be loaded ({reason}). Check the name and its arguments; offline, only what is in "
            "the cache of datasets can be read."
        ) from None
    return HubDataset(_one_split(dataset, f"datasets:{name}", split), f"datasets:{text}")


def num_rows(data: HubDataset) -> int | None:
    """Number of rows; None for a streamed data set."""
    count = getattr(data.dataset, "num_rows", None)
    return None if count is None else int(count)


def records_of(data: HubDataset, columns: list[str] | None) -> Iterator[dict[str, Any]]:
    """The rows as dictionaries of `columns`, or of all if None (a stream that does not know its columns)."""
    dataset = data.dataset if columns is None else data.dataset.select_columns(columns)
    dataset = dataset.with_format(None)  # a format such as torch would convert the cells
    batches = iter(dataset.iter(batch_size=BATCH_ROWS))
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # see `load`
            raise DataError(
                f"{data.name} cannot be read on: {type(error).__name__}: {str(error)[:300]}. Check the data set."
            ) from None
        if batch is None:
            return
        names = list(batch)
        for values in zip(*batch.values()):
            yield dict(zip(names, values))


def _one_split(dataset: Any, where: str, split: str | None) -> Any:
    """The named split of several; the only one if none is named."""
    if not isinstance(dataset, dict):
        # A slice was resolved by `load_dataset`; a folder of one split has no names.
        return dataset
    if split is None and len(dataset) == 1:
        return next(iter(dataset.values()))
    if split not in dataset:
        given = "no split is named" if split is None else f"split is {quoted(split)}"
        raise DataError(
            f"{where}: {given}, expected one of {', '.join(dataset)}.{did_you_mean(split, dataset)} Name it: "
            f"{where}?split=NAME"
        )
    return dataset[split]


def _arguments(where: str, query: str, known: tuple[str, ...]) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            raise DataError(
                f"{where} has the argument {quoted(name)}, expected {', '.join(known)}.{did_you_mean(name, known)}"
            )
        if name in arguments:
            raise DataError(f"{where} has the argument {name} twice. Give it once.")
        arguments[name] = value
    return arguments
