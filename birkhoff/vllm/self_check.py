"""The check at start: a known vector must move a probe row by exactly that vector, at every armed site of the rank.

Every armed site has a row of its own in one forward pass. A hook that is not reached, that acts on a copy nobody reads,
or that touches another row would otherwise give plausible text that is not steered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from birkhoff.errors import UnsupportedModel
from birkhoff.hooks.plan import Edit, Key, Plan, SiteRows, Span
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.step_hooks import StepHooks
from birkhoff.steering.vector_edits import Add

Forward = Callable[
    [int], torch.Tensor
]  # a forward pass of that many rows of fixed input; the output of the rank


class ProbeJob:
    """Keeps all rows of one site."""

    def __init__(self, key: Key, after: bool):
        self.keys = (key,)
        self.after = after
        self.rows: torch.Tensor | None = None

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        return range(len(token_ids))

    def open(self) -> None:
        pass

    def deliver(self, rows: SiteRows) -> None:
        self.rows = rows.tensor.clone()

    def close(self, finish_reason: str, num_tokens: int) -> None:
        pass


def check_sites(
    hooks: StepHooks,
    forward: Forward,
    keys: Sequence[Key],
    schema: Mapping[str, HookSchema],
    num_layers: int,
    max_rows: int,
    rank: str,
    hidden: Collection[str] = (),
) -> int:
    """Raise `UnsupportedModel` unless every site captures and, if it can be edited, is edited; returns their number.

    `hidden` are hooks of which nothing shows in the output of such a forward pass: attention alone reads them, and
    dummy tokens have no entries in its cache."""
    for first in range(0, len(keys), max_rows):
        _check(hooks, forward, keys[first : first + max_rows], schema, num_layers, rank, hidden)
    return len(keys)


def _check(
    hooks: StepHooks,
    forward: Forward,
    keys: Sequence[Key],
    schema: Mapping[str, HookSchema],
    num_layers: int,
    rank: str,
    hidden: Collection[str],
) -> None:
    plain = forward(len(keys)).clone()
    spans: list[Span] = []
    jobs: list[tuple[ProbeJob, ProbeJob]] = []
    vectors: list[torch.Tensor | None] = []
    for row, (hook, layer) in enumerate(keys):
        before, after = ProbeJob((hook, layer), False), ProbeJob((hook, layer), True)
        edits: tuple[Edit, ...] = ()
        vector = None
        if schema[hook].steerable:
            generator = torch.Generator().manual_seed(1000 * layer + row)
            vector = torch.randn(schema[hook].width, generator=generator) * 4
            edits = (Add(vector, hook, [layer]).resolve(schema, num_layers, {}, [0], 1),)
        spans.append(Span(Plan((before, after), edits), row, 0, [0], 1))
        jobs.append((before, after))
        vectors.append(vector)
    hooks.begin(spans, len(keys))
    try:
        moved = forward(len(keys)).clone()
    except BaseException:
        hooks.fail()
        raise
    hooks.end()
    for row, ((hook, layer), (before, after), vector) in enumerate(zip(keys, jobs, vectors)):
        where = f"{hook}[{layer}] on {rank}"
        if before.rows is None or after.rows is None:
            raise UnsupportedModel(f"{where} was never reached by a forward pass. {_ADVICE}")
        if vector is None:
            continue
        old = before.rows.flatten()
        expected = (old.float() + vector).to(old.dtype)
        if not torch.equal(after.rows.flatten(), expected):
            error = float((after.rows.flatten().float() - expected.float()).abs().max())
            raise UnsupportedModel(
                f"a known vector moved the probe row of {where} by something else; off by {error:.3g}. {_ADVICE}"
            )
        if hook not in hidden and torch.equal(plain[row], moved[row]):
            raise UnsupportedModel(f"an edit at {where} has no effect on what follows. {_ADVICE}")


_ADVICE = "This build of vLLM does not run the layers as they are known here: use another version."
