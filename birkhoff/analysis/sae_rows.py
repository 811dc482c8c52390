"""Where a dictionary's training rows come from: a store of captures, or an engine that runs texts meanwhile.

Both give batches [rows, width] of one site as one view of it, epoch by epoch, in an order decided by the seed, and hold
a bounded number of rows. A view of the streams is taken batch by batch: `flat` rows hold all streams, `per_stream`
makes a row of each stream, `mean` averages them. The `read` view is what the sublayer read, which has a hook of its
own, so its rows are taken there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from birkhoff.capture.spec.request import Capture
from birkhoff.capture.store.row_reader import iter_rows
from birkhoff.errors import OptionError, quoted

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.api.prompts import Prompt

STREAM_VIEWS = ("flat", "per_stream", "read", "mean")
_READ_AT = {"mhc_streams_pre_attn": "pre_attn", "mhc_streams_pre_mlp": "mlp_in"}


class RowSource(Protocol):
    """`hook`, `layer` and `view` say what the rows are; `batches(epoch)` gives them once through."""

    @property
    def hook(self) -> str: ...

    @property
    def layer(self) -> int: ...

    @property
    def view(self) -> str: ...

    def batches(self, epoch: int) -> Iterator[torch.Tensor]: ...


def check_view(hook: str, view: str) -> str:
    """The view, or why this hook has none such."""
    allowed = STREAM_VIEWS if hook.startswith("mhc_streams") else ("single",)
    if view == "read" and hook == "mhc_streams_final":
        raise OptionError(
            "view is 'read', but no sublayer reads mhc_streams_final. Train on final_hidden instead."
        )
    if view not in allowed:
        raise OptionError(f"view is {quoted(view)}, expected {' or '.join(allowed)} at {hook}.")
    return view


def captured_hook(hook: str, view: str) -> str:
    """The hook whose captured rows this view is made of."""
    return _READ_AT.get(hook, hook) if view == "read" else hook


def view_rows(rows: torch.Tensor, view: str) -> torch.Tensor:
    """Captured rows [n, d] or [n, m, d] as the rows of a dictionary with this view, float32."""
    rows = rows.float()
    if rows.ndim == 2:
        return rows
    return {
        "flat": lambda: rows.flatten(1),
        "per_stream": lambda: rows.flatten(0, 1),
        "mean": lambda: rows.mean(1),
    }[view]()


@dataclass(frozen=True)
class StoreRows:
    """Rows of finished captures under a tag's directory."""

    directory: Path
    hook: str
    layer: int
    view: str = "single"
    batch_rows: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        check_view(self.hook, self.view)

    def batches(self, epoch: int) -> Iterator[torch.Tensor]:
        hook = captured_hook(self.hook, self.view)
        seed = self.seed * 1_000_003 + epoch
        for batch in iter_rows(
            self.directory,
            hook,
            self.layer,
            self.batch_rows,
            shuffle=True,
            seed=seed,
            dtype="float32",
            drop_last=True,
            verify=epoch == 0,
        ):
            yield view_rows(torch.from_numpy(batch.array), self.view)


@dataclass(frozen=True)
class LiveRows:
    """Rows of texts that run now; nothing is stored. Rows are mixed in a pool of some batches, as `iter_rows` does."""

    engine: Engine
    texts: Iterable[Prompt]  # gone through again in every epoch
    hook: str
    layer: int
    view: str = "single"
    batch_rows: int = 4096
    seed: int = 0
    pool_batches: int = 8

    def __post_init__(self) -> None:
        check_view(self.hook, self.view)

    def batches(self, epoch: int) -> Iterator[torch.Tensor]:
        hook = captured_hook(self.hook, self.view)
        wish = Capture({hook: [self.layer]}, positions="all_prompt")
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        held: list[torch.Tensor] = []
        layer = self.layer % self.engine.config.num_hidden_layers
        for part in self.engine.stream_acts(self.texts, wish, batch_rows=self.batch_rows):
            held.append(part[hook, layer])
            if sum(map(len, held)) >= self.pool_batches * self.batch_rows:
                pool = torch.cat(held)[torch.randperm(sum(map(len, held)), generator=generator)]
                keep = len(pool) // 2 // self.batch_rows * self.batch_rows
                for first in range(0, len(pool) - keep, self.batch_rows):
                    yield view_rows(pool[first : first + self.batch_rows], self.view)
                held = [pool[len(pool) - keep :]] if keep else []
        if held:
            pool = torch.cat(held)[torch.randperm(sum(map(len, held)), generator=generator)]
            for rows in pool.split(self.batch_rows):
                yield view_rows(rows, self.view)
