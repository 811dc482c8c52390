"""Training rows of an SAE: of stored captures, of texts that are run once and kept, or of texts run in every epoch.

All sources yield batches [rows, width] of one site in one view, epoch by epoch, in an order determined by the seed,
and hold a bounded number of rows. Views of the streams: `flat` concatenates all streams, `per_stream` makes each
stream a row, `mean` averages them, and `read` is the sublayer's input, which has its own hook and is captured there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from birkhoff.analysis.activations_store import ActStream
from birkhoff.analysis.harvest import harvest
from birkhoff.capture.spec.request import Capture
from birkhoff.capture.store.row_reader import iter_rows
from birkhoff.data.texts import DatasetText
from birkhoff.errors import OptionError, quoted
from birkhoff.hooks.site_names import Address

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.sae.dictionary import Sae
    from birkhoff.text.prompts import Prompt

STREAM_VIEWS = ("flat", "per_stream", "read", "mean")
KEPT_TAG = "rows"  # the tag of rows that were kept for training
_READ_AT = {"mhc_streams_pre_attn": "pre_attn", "mhc_streams_pre_mlp": "mlp_in"}


class RowSource(Protocol):
    """Training rows of one hook, layer and view; `batches(epoch)` yields them once."""

    @property
    def hook(self) -> str: ...

    @property
    def layer(self) -> int: ...

    @property
    def view(self) -> str: ...

    def batches(self, epoch: int) -> Iterator[torch.Tensor]: ...


def check_view(hook: str, view: str) -> str:
    """Return the view; raise `OptionError` if the hook does not have it."""
    allowed = STREAM_VIEWS if hook.startswith("mhc_streams") else ("single",)
    if view == "read" and hook == "mhc_streams_final":
        raise OptionError(
            "view is 'read', but no sublayer reads mhc_streams_final. Train on final_hidden instead."
        )
    if view not in allowed:
        raise OptionError(f"view is {quoted(view)}, expected {' or '.join(allowed)} at {hook}.")
    return view


def captured_hook(hook: str, view: str) -> str:
    """Return the hook to capture for a view of `hook`."""
    return _READ_AT.get(hook, hook) if view == "read" else hook


def view_rows(rows: torch.Tensor, view: str) -> torch.Tensor:
    """Convert captured rows [n, d] or [n, m, d] to float32 SAE input rows of a view."""
    rows = rows.float()
    if rows.ndim == 2:
        return rows
    return {
        "flat": lambda: rows.flatten(1),
        "per_stream": lambda: rows.flatten(0, 1),
        "mean": lambda: rows.mean(1),
    }[view]()


def begin_token(engine: Engine) -> int | None:
    """The token that stands before a text: what the tokenizer puts there, else what the model's config names."""
    token = engine.config.bos_token_id
    raw = getattr(engine.config, "raw", {})
    return token if token is not None else raw.get("bos_token_id")


def text_ids(engine: Engine, sae: Sae, text: Prompt) -> list[int]:
    """The tokens of a text as the dictionary was trained on them: with or without the begin-of-text token, as its
    `prepend_bos` says. Token ids are taken as they are."""
    ids = engine.prompt_ids(text)
    wanted, begin = sae.metadata.get("prepend_bos"), begin_token(engine)
    if not isinstance(text, str) or not isinstance(wanted, bool) or begin is None:
        return ids
    present = ids[:1] == [begin]
    if wanted and not present:
        return [begin, *ids]
    return ids[1:] if present and not wanted and len(ids) > 1 else ids


@dataclass(frozen=True)
class StoreRows:
    """Rows of the finished captures in a tag directory."""

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
    """Rows of texts run during training; nothing is stored. They are shuffled over a buffer of `pool_batches` batches
    and handed out on `device`: with that of the engine they never leave it."""

    engine: Engine
    texts: Iterable[Prompt]  # iterated again in every epoch
    hook: str
    layer: int
    view: str = "single"
    batch_rows: int = 4096
    seed: int = 0
    pool_batches: int = 8
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        check_view(self.hook, self.view)

    def batches(self, epoch: int) -> Iterator[torch.Tensor]:
        return self.resumed(epoch, None)

    @property
    def width(self) -> int:
        """Numbers of a training row."""
        shape = self.engine.schema[captured_hook(self.hook, self.view)].logical_shape
        return math.prod(shape) if self.view == "flat" else shape[-1]

    def resumed(self, epoch: int, state: Mapping[str, Any] | None) -> LiveBatches:
        """The batches of an epoch from a state of its `LiveBatches` on."""
        hook = captured_hook(self.hook, self.view)
        spec = Capture({hook: [self.layer]}, positions="all_prompt")
        layer = self.layer % self.engine.config.num_hidden_layers
        stream = self.engine.stream_acts(
            self.texts,
            spec,
            self.batch_rows,
            device=self.device,
            shuffle_rows=self.pool_batches * self.batch_rows,
            seed=self.seed * 1_000_003 + epoch,
            resume=state,
        )
        return LiveBatches(stream, (hook, layer), self.view)


class LiveBatches(Iterator[torch.Tensor]):
    """Rows of one site of a stream in a view; `state()` is that of the stream."""

    def __init__(self, stream: ActStream, site: Address, view: str):
        self._stream = stream
        self._site = site
        self._view = view
        self.state = stream.state

    def __next__(self) -> torch.Tensor:
        return view_rows(next(self._stream)[self._site], self._view)


def kept_rows(
    engine: Engine,
    texts: Iterable[DatasetText | str],
    directory: Path,
    hook: str,
    layer: int,
    view: str = "single",
    batch_rows: int = 4096,
    seed: int = 0,
    *,
    source: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> StoreRows:
    """Run texts once, store their rows in float32 under `directory` and return them as a source, so that epochs read
    files instead of running the model again.

    A later call with the same texts uses the rows that are there and goes on where an interrupted one stopped. `source`
    describes the texts; other ones in the same directory are refused. If there are fewer rows than one batch, batches
    have as many rows as there are."""
    check_view(hook, view)
    layer %= engine.config.num_hidden_layers
    spec = Capture({captured_hook(hook, view): [layer]}, positions="all_prompt", dtype="fp32", tag=KEPT_TAG)
    report = harvest(engine, texts, spec, directory, source=source, progress=progress)
    return StoreRows(directory / KEPT_TAG, hook, layer, view, max(1, min(batch_rows, report.rows)), seed)
