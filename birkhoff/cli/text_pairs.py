"""Files of clean and corrupted texts for `patch-sweep --pairs` and `attribute --pairs`, and metrics by token.

Each line is a JSON object: `{"clean": "...", "corrupt": "...", "token": " ball", "other": " hat"}`. `token`, `other`
and `position` are those of the options where a line has none. Attribution takes `corrupt` as the baseline of
`clean`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from birkhoff.cli.generate import decode_utf8
from birkhoff.errors import DataError, OptionError, did_you_mean, quoted
from birkhoff.option_checks import as_int
from birkhoff.small_file import read_bytes

MAX_PAIRS_BYTES = 64 << 20
FIELDS = ("clean", "corrupt", "token", "other", "position")

Token = Annotated[
    str | None,
    typer.Option(help="Token whose logit is explained: its text, or id:NUMBER.", show_default=False),
]
Other = Annotated[str | None, typer.Option(help="Token whose logit is subtracted.")]
Position = Annotated[int, typer.Option(help="Position of the prediction; negative ones count from the end.")]
Pairs = Annotated[
    Path | None,
    typer.Option(
        help="Several texts from a file of JSON lines with the fields clean and corrupt, and token, other and position "
        "if they differ by line. Prints their mean."
    ),
]


def metric_of(token: Any, other: Any, position: Any) -> dict[str, Any]:
    """A metric as the engine takes it; `id:NUMBER` is a token id, everything else the text of a token."""

    def parsed(value: Any) -> Any:
        number = value.removeprefix("id:") if isinstance(value, str) else ""
        return int(number) if number != value and number.isdigit() else value

    if token is None:
        raise OptionError(
            "there is no token whose logit is explained. Give --token, such as --token ' ball'."
        )
    metric: dict[str, Any] = {"token": parsed(token), "position": position}
    return metric if other is None else metric | {"other": parsed(other)}


@dataclass(frozen=True)
class TextPairs:
    """The columns of a file of pairs. `corrupt` is None if no line has one."""

    clean: list[str]
    corrupt: list[str] | None
    metrics: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path, token: str | None, other: str | None, position: int) -> TextPairs:
        """Read a file; metrics are those of its lines, or of the options."""
        lines = decode_utf8(read_bytes(path, MAX_PAIRS_BYTES), str(path)).split("\n")
        rows = [_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
        if not rows:
            raise DataError(
                f'{path} has no pairs, expected lines such as {{"clean": "...", "corrupt": "..."}}.'
            )
        lacking = [number for number, row in enumerate(rows) if "corrupt" not in row]
        if lacking and len(lacking) < len(rows):
            raise DataError(
                f"{path}: pair {lacking[0]} has no corrupt, others have. Give it to all or to none."
            )
        metrics = []
        for row in rows:
            # A token of the line is compared with the line's other token, or with none.
            second = row.get("other") if "token" in row else row.get("other", other)
            metrics.append(metric_of(row.get("token", token), second, row.get("position", position)))
        corrupt = None if lacking else [row["corrupt"] for row in rows]
        return cls([row["clean"] for row in rows], corrupt, metrics)


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is no JSON ({error}). Write one object on each line.") from None
    if not isinstance(row, dict) or "clean" not in row:
        raise DataError(f'{where} is {quoted(row)}, expected an object with "clean" and "corrupt".')
    for name, value in row.items():
        if name not in FIELDS:
            raise DataError(
                f"{where} has the unknown field {quoted(name)}, expected {', '.join(FIELDS)}."
                + did_you_mean(name, FIELDS)
            )
        text, number = name != "position", name not in ("clean", "corrupt")  # what it may be
        if not (text and isinstance(value, str) and value) and not (number and as_int(value) is not None):
            kinds = [kind for kind, may in (("a text", text), ("a whole number", number)) if may]
            raise DataError(f"{where}: {name} is {quoted(value)}, expected {' or '.join(kinds)}.")
    return row
