"""Results as tables: one plain dictionary per row, for pandas, polars or any other library of data frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from birkhoff.extras import require

if TYPE_CHECKING:
    import pandas
    import polars


class Tabular(ABC):
    """A result that is a table. Subclasses give `records`."""

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries with the same keys."""

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a `pandas.DataFrame`; needs pandas."""
        frame: pandas.DataFrame = require("pandas", "to_pandas").DataFrame(self.records())
        return frame

    def to_polars(self) -> polars.DataFrame:
        """The rows as a `polars.DataFrame`; needs polars."""
        frames = require("polars", "to_polars")
        frame: polars.DataFrame = frames.DataFrame(self.records(), infer_schema_length=None)
        return frame
