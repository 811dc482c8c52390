"""Forward passes of texts outside the engine's batches: every token is a prompt token, and every site is accessible.

`texts_of` turns what callers pass as prompts into token ids, `run_texts` runs several texts in one pass with the edits
of each, `trace` records tensors, `features` reads the features of an attached SAE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from birkhoff.analysis.sae_rows import text_ids
from birkhoff.errors import PromptError, SiteError, quoted
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.layers import ALL_LAYERS, parse_layers
from birkhoff.hooks.plan import Edit, Key, Plan, Span
from birkhoff.hooks.site_names import has_streams, refusal, resolve, select
from birkhoff.hooks.sites import ATTN_WEIGHTS, Site
from birkhoff.hooks.tap import LeavingTap, NoTap, ReadingTap, RecordingTap, RowReader, Tap
from birkhoff.sae.feature_probe import STRONGEST, Feature, active_features, order_of
from birkhoff.steering.resolver import per_prompt_edits
from birkhoff.text.prompts import Prompt, is_single
from birkhoff.trace import Trace

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

Point = Literal["before", "after", "carried"]
PASS_TOKENS = 4096  # tokens of several texts that run in one pass; one longer text runs alone


def texts_of(engine: Engine, prompts: Any) -> tuple[list[list[int]], bool]:
    """The token ids of every prompt, and whether it was one prompt and not a list of them."""
    single = is_single(prompts)
    each = [prompts] if single else list(prompts)
    if not each:
        raise PromptError(
            "the list of prompts is empty. Pass a text, token ids, chat messages, or a list of those."
        )
    return [engine.prompt_ids(prompt) for prompt in each], single


def one_text(engine: Engine, prompt: Any, call: str) -> list[int]:
    """The token ids of one prompt; `call` is what takes it, for the error that refuses several."""
    texts, single = texts_of(engine, prompt)
    if not single:
        raise PromptError(
            f"{call} takes one prompt, a text, token ids or chat messages, and this is a list of {len(texts)}. Pass "
            "them one by one."
        )
    return texts[0]


def residual_hook(engine: Engine) -> str:
    """The hook of the residual, or the streams, entering a layer."""
    return "pre_attn" if engine.num_streams is None else "mhc_streams_pre_attn"


def passes(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Indices of the texts that run together, in order."""
    together: list[int] = []
    tokens = 0
    for index, ids in enumerate(texts):
        if together and tokens + len(ids) > PASS_TOKENS:
            yield together
            together, tokens = [], 0
        together.append(index)
        tokens += len(ids)
    yield together


def run_texts(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    edits: Sequence[Sequence[Edit]],
    record: Any = None,
    weights: Callable[[int, int, RowReader], None] | None = None,
    point: Point = "before",
) -> list[torch.Tensor]:
    """Run texts in one pass, each with its edits; returns the hidden rows [T, d] of each, for `engine.model.logits`.

    `record(index, site, layer, rows)` is called at every site with the rows of each text before or after its edits, or
    with those that are carried after them ("carried": an edit of what a sublayer reads does not show).
    `weights(index, layer, rows)` is called in every layer of a V4 model; `rows` computes the rows of `attn_weights` of
    the tokens at given positions of a text, after its edits."""

    def read(first_rows: Sequence[int], layer: int, rows: RowReader) -> None:
        assert weights is not None
        for index, first in enumerate(first_rows):
            weights(index, layer, partial(_rows_at, rows, first))

    def tap(first_rows: Sequence[int]) -> Tap:
        spans = [
            Span(Plan(edits=tuple(each)), row, 0, ids, len(ids))
            for row, ids, each in zip(first_rows, texts, edits)
        ]
        inner: Tap = arm(StepStaging(engine.model.device), spans) or NoTap()
        if weights is not None:
            inner = ReadingTap(inner, ATTN_WEIGHTS, partial(read, first_rows))
        if record is None:
            return inner

        def seen(site: Site, layer: int, tensor: torch.Tensor) -> None:
            for index, (row, ids) in enumerate(zip(first_rows, texts)):
                record(index, site, layer, tensor[row : row + len(ids)])

        if point == "before":
            return RecordingTap(inner, seen)
        return LeavingTap(inner, seen, carried=point == "carried")

    hidden: list[torch.Tensor] = engine.model.run_texts(texts, tap)
    return hidden


def _rows_at(rows: RowReader, first: int, positions: Sequence[int]) -> list[torch.Tensor]:
    """The rows of tokens by their positions in a text that begins at row `first` of the pass."""
    return rows([first + position for position in positions])


def text_tap(engine: Engine, texts: Sequence[Sequence[int]], edits: Sequence[Sequence[Edit]]) -> Tap:
    """The tap of a pass of texts of equal length side by side, each with its edits."""
    spans = [
        Span(Plan(edits=tuple(each)), index * len(ids), 0, ids, len(ids))
        for index, (ids, each) in enumerate(zip(texts, edits))
    ]
    return arm(StepStaging(engine.model.device), spans) or NoTap()


def resolve_edits(engine: Engine, texts: Sequence[Sequence[int]], steer: Any) -> list[tuple[Edit, ...]]:
    """The edits of each text, from one list for all texts or one list for each."""
    return [engine.resolve(edits, ids, 1) for edits, ids in zip(per_prompt_edits(steer, len(texts)), texts)]


def logits(engine: Engine, texts: Sequence[Sequence[int]], steer: Any) -> list[torch.Tensor]:
    """Next-token logits [T, vocab] of each text; with a graph inside an `engine.grad()` block."""
    return edited_logits(engine, texts, resolve_edits(engine, texts, steer))


def edited_logits(
    engine: Engine, texts: Sequence[Sequence[int]], edits: Sequence[Sequence[Edit]]
) -> list[torch.Tensor]:
    """`logits` with the resolved edits of each text."""
    gradients = engine.gradients.active
    if gradients is not None:
        return [gradients.logits(ids, text_tap(engine, [ids], [each])) for ids, each in zip(texts, edits)]
    results: list[torch.Tensor] = []
    with torch.no_grad():  # not inference mode: the result may be trained on and written to
        for together in passes(texts):
            hidden = run_texts(engine, [texts[i] for i in together], [edits[i] for i in together])
            results += [engine.model.logits(rows) for rows in hidden]
    return results


def trace(
    engine: Engine, texts: Sequence[Sequence[int]], hooks: Any, steer: Any, point: Point = "before"
) -> list[Trace]:
    """Run texts and return the logits and the tensors of `hooks` of each, as `addresses` takes them. `point` is that of
    `run_texts`."""
    recorded = addresses(engine, hooks)
    edits = resolve_edits(engine, texts, steer)
    traces: list[Trace] = []

    def add(ids: Sequence[int], logits: torch.Tensor, tensors: Mapping[Key, torch.Tensor]) -> None:
        streams, tokens = has_streams(engine.schema), engine.token_texts(ids)
        traces.append(Trace(logits, tensors, engine.config.num_hidden_layers, streams, ids, tokens))

    gradients = engine.gradients.active
    if gradients is not None:
        for ids, each in zip(texts, edits):
            logits = gradients.logits(ids, text_tap(engine, [ids], [each]), recorded)
            add(ids, logits, gradients.passes[-1].nodes(recorded))
        return traces
    with torch.no_grad():
        for together in passes(texts):
            tensors: list[dict[Key, torch.Tensor]] = [{} for _ in together]

            def record(index: int, site: Site, layer: int, rows: torch.Tensor, into: Any = tensors) -> None:
                if (site.name, layer) in recorded:
                    into[index][site.name, layer] = rows.detach().clone()

            chosen = [texts[i] for i in together], [edits[i] for i in together]
            hidden = run_texts(engine, *chosen, record, point=point)
            for index, rows, kept in zip(together, hidden, tensors):
                add(texts[index], engine.model.logits(rows), kept)
    return traces


def features(
    engine: Engine,
    prompt: Prompt,
    name: str,
    k: int,
    at: tuple[str, int] | str | None,
    steer: Any,
    order: str | None = None,
) -> list[list[Feature]]:
    """Run the prompt and return the `k` first features of an attached SAE for each token of it, the begin-of-text
    token included if the dictionary expects it."""
    if at is not None:
        hook, layer = (at, None) if isinstance(at, str) else at
        at = resolve(hook, layer, engine.schema, engine.config.num_hidden_layers)
    probe, plan, sae = engine.saes.probe(name, k, at)
    chosen = order_of(sae, order)
    if chosen == "specific":
        probe.k = max(k, STRONGEST)
    ids = text_ids(engine, sae, prompt)
    with torch.no_grad():
        run_texts(engine, [ids], [(plan, *engine.resolve(steer, ids, 1))])
    return active_features(probe, sae, len(ids), k, chosen)


def addresses(engine: Engine, hooks: Any) -> set[Key]:
    """The addresses that `hooks` selects: "all", a name, a list of names, layers by name, or a function of the hook and
    the layer that says whether a tensor is kept."""
    known, count = engine.schema, engine.config.num_hidden_layers
    if callable(hooks):
        return {address for address in addresses(engine, "all") if hooks(*address)}
    if isinstance(hooks, str) and hooks == "all":
        hooks = [name for name, row in known.items() if row.ragged is None]
    single = isinstance(hooks, str) or not isinstance(hooks, (Sequence, Set, Mapping))
    selectors = dict(hooks) if isinstance(hooks, Mapping) else {}
    found: set[Key] = set()
    for hook in [hooks] if single else hooks:
        why = (
            refusal(hook, known) if isinstance(hook, str) else f"{quoted(hook)} is not a hook of this model."
        )
        if why is not None:
            raise SiteError(why if isinstance(hook, str) else f"{why} It has: {', '.join(sorted(known))}.")
        if hook in known and known[hook].ragged is not None:
            raise SiteError(
                f"{hook} has any number of rows for a token, which a trace does not hold. Capture it: "
                f"engine.generate(prompt, capture=Capture({{{hook!r}: 'all'}}))."
            )
        layers = parse_layers(selectors[hook]) if hook in selectors else ALL_LAYERS
        found |= set(select(hook, layers, known, count).values())
    return found
