"""`validate_engine(model)`: does the engine, as `load` builds it on this machine, compute what the reference computes?

The engine reads a prompt and decodes greedily, alone and in batches, with every site captured. The reference kernels
then run over the same tokens in float32. An engine in float32 is held to the gate `float32`. In bfloat16, and with
activations rounded as the release does, the yardstick is measured: plain PyTorch runs over the tokens in bfloat16 too,
and at every site the engine's error may be at most twice that of plain PyTorch at the median row, and four times at the
90th percentile, of prompt and decoded rows separately. Quantiles of rows, because a near tie between experts moves
single rows by any amount in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from birkhoff.api.engine import Engine
from birkhoff.api.load import load
from birkhoff.api.options import EngineKwargs
from birkhoff.errors import OptionError
from birkhoff.hooks.sites import INDEX_SCORES, SITES
from birkhoff.output import Output
from birkhoff.validate.compare import Comparison, compare
from birkhoff.validate.gates import GATES
from birkhoff.validate.runs import ForwardRun, Sites, build, random_tokens, run_model
from birkhoff.validate.selection import computation_order
from birkhoff.validate.validate import checked_tokens, router_biases
from birkhoff.weights.checkpoint import Checkpoint, open_checkpoint
from birkhoff.weights.locate import locate

BATCHES = (1, 4, 20)  # GPU kernels differ for one token, up to sixteen, and more
NEW_TOKENS = 32
SHORTEST = 5  # tokens of the shortest prompt beside the compared one
ALLOWED = {0.5: 2.0, 0.9: 4.0}  # times the error of plain PyTorch in bfloat16, by quantile of rows
EXACT = GATES["float32"].site or 0.0


@dataclass(frozen=True)
class SiteRatio:
    """The engine's error at a site and quantile of rows, beside that of plain PyTorch in bfloat16."""

    site: str
    layer: int
    phase: str  # prompt or decode
    quantile: float
    error: float
    plain_error: float

    @property
    def ratio(self) -> float:
        """The engine's error in units of plain PyTorch's, or of the gate `float32` where that is larger."""
        return self.error / max(self.plain_error, EXACT)

    @property
    def allowed(self) -> float:
        """The largest ratio at this quantile."""
        return ALLOWED[self.quantile]

    @property
    def ok(self) -> bool:
        return self.ratio <= self.allowed  # false for an error that is not a number


@dataclass(frozen=True)
class GreedyTokens:
    """The greedy tokens of a run: how many are the reference's choice, and by how much the others' logits are lower
    at most."""

    tokens: int
    same: int
    largest_gap: float
    allowed_gap: float
    same_without_capture: bool

    @property
    def ok(self) -> bool:
        return self.same_without_capture and self.largest_gap <= self.allowed_gap


@dataclass(frozen=True)
class BatchCheck:
    """One run of the engine: the compared request beside `batch` - 1 others. Either `exact` or `ratios` is set."""

    batch: int
    rows: int
    greedy: GreedyTokens
    exact: Comparison | None
    ratios: list[SiteRatio]

    @property
    def ok(self) -> bool:
        sites = self.exact.ok if self.exact is not None else all(ratio.ok for ratio in self.ratios)
        return sites and self.greedy.ok

    @property
    def worst(self) -> SiteRatio:
        """The site with the largest ratio; an error that is not a number comes first."""
        return max(self.ratios, key=lambda ratio: (ratio.ratio != ratio.ratio, ratio.ratio / ratio.allowed))

    @property
    def diverging(self) -> SiteRatio | None:
        """The first site outside, in order of computation."""
        return next((ratio for ratio in self.ratios if not ratio.ok), None)


@dataclass(frozen=True)
class EngineCheck:
    """The result of `validate_engine`."""

    model: str
    settings: dict[str, Any]
    runs: list[BatchCheck]

    @property
    def ok(self) -> bool:
        return all(run.ok for run in self.runs)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "ok": self.ok,
            "model": self.model,
            "settings": self.settings,
            "runs": [_run_dict(run) for run in self.runs],
        }

    def lines(self) -> list[str]:
        """The report as lines of plain text."""
        built = "{device}, {dtype}, {numerics} numerics, {kernels} kernels".format_map(self.settings)
        verdict = "agrees" if self.ok else "does not agree"
        out = [f"the engine of {self.model} ({built}) {verdict} with the reference kernels"]
        for run in self.runs:
            out += [f"{_batch_name(run.batch)}, {run.rows} tokens: {line}" for line in _run_lines(run)]
        return out


def validate_engine(
    model: str | Path,
    *,
    tokens: Sequence[int] | None = None,
    text: str | None = None,
    length: int | None = None,
    seed: int = 0,
    batches: Sequence[int] = BATCHES,
    engine: Engine | None = None,
    **options: Unpack[EngineKwargs],
) -> EngineCheck:
    """Compare the engine of a checkpoint with the reference kernels.

    `tokens`, `text`, or `length` and `seed` give the prompt, as in `validate`; `batches` are the numbers of requests
    that run at once. `engine` is one that was loaded from the model; by default it is loaded with `options`, those of
    `load`, and without prefix cache and speculation. The checkpoint must fit into host memory in float32: of a large
    model make one with fewer layers and experts (`birkhoff synth DIR --like flash --layers 4 --routed-experts 8`)."""
    if not batches or min(batches) < 1:
        raise OptionError(f"batches is {list(batches)}, expected sizes of at least 1.")
    checkpoint = open_checkpoint(locate(model))
    prompt = checked_tokens(checkpoint, None, tokens, text, length, seed, room=NEW_TOKENS)
    keywords: EngineKwargs = {
        "max_requests": max(batches),
        "max_context": len(prompt) + NEW_TOKENS,
        "prefix_cache": False,
        "speculative": False,  # "auto" drafts as timings say, so that batches would not be the same each time
        **options,
    }
    if engine is not None and options:
        raise OptionError(f"an engine that is given has its options already; got {', '.join(options)}.")
    # One that is loaded here is closed before the reference takes its memory.
    with nullcontext(engine) if engine is not None else load(model, **keywords) as running:
        settings = running.settings
        runs = [_run_engine(running, prompt, batch, seed) for batch in batches]
    sequences = [run.forward.tokens for run in runs]
    exact = settings["dtype"] == "float32" and settings["numerics"] == "plain"
    dtypes = ["float32"] if exact else ["float32", "bfloat16"]
    references = {
        dtype: _run_reference(checkpoint, dtype, settings["numerics"], sequences) for dtype in dtypes
    }
    checked = [
        _check(run, checkpoint, *(references[dtype][run.forward.tokens] for dtype in dtypes)) for run in runs
    ]
    shown = {key: settings[key] for key in ("device", "dtype", "numerics", "kernels")}
    return EngineCheck(str(model), shown, checked)


@dataclass(frozen=True)
class _EngineRun:
    batch: int
    prompt_rows: int
    generated: list[int]
    same_without_capture: bool
    forward: ForwardRun


def _run_reference(
    checkpoint: Checkpoint, dtype: str, numerics: str, sequences: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], ForwardRun]:
    """Run the reference kernels on the CPU over each sequence, so that nothing on a GPU is compared with itself."""
    model = build(checkpoint, dtype, numerics)
    label = f"the reference kernels in {dtype}"
    return {tokens: run_model(model, tokens, label) for tokens in dict.fromkeys(sequences)}


def _run_engine(engine: Engine, prompt: list[int], batch: int, seed: int) -> _EngineRun:
    """Generate after the prompt beside `batch` - 1 shorter random ones, with every site of the first captured, and
    again without captures."""
    size = engine.config.vocab_size
    lengths = [SHORTEST + (len(prompt) - SHORTEST) * index // batch for index in range(1, batch)]
    others = [random_tokens(size, max(1, count), seed + index + 1) for index, count in enumerate(lengths)]
    hooks = {site.name: "all" for site in SITES if not site.absent and not site.ragged}
    if engine.schema[INDEX_SCORES.name].layers:
        hooks[INDEX_SCORES.name] = "all"
    capture = {"memory": {"hooks": hooks, "positions": "all"}}
    prompts = [prompt, *others]
    outputs: list[list[Output]] = [
        engine.generate(prompts, capture=wanted, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        for wanted in ([capture, *[None] * len(others)], None)
    ]
    watched, unwatched = outputs[0][0], outputs[1][0]
    tokens = (*prompt, *watched.token_ids[:-1])
    forward = ForwardRun(f"the engine in a batch of {batch}", tokens, _sites(watched, len(tokens)), None)
    same = watched.token_ids == unwatched.token_ids
    return _EngineRun(batch, len(prompt), list(watched.token_ids), same, forward)


def _sites(output: Output, rows: int) -> Sites:
    """The captured sites as a `ForwardRun` has them: [rows, ...] float32, scores of the indexer as a matrix."""
    sites: Sites = {}
    for key, captured in output.acts.items():
        values = captured.tensor.float().cpu()
        if key[0] == INDEX_SCORES.name:
            scores = torch.zeros(rows, rows // 4)
            scores[torch.tensor(list(captured.positions)), values[:, 0].long()] = values[:, 1]
            values = scores
        if values.numel():
            sites[key] = values
    return sites


def _check(
    run: _EngineRun, checkpoint: Checkpoint, reference: ForwardRun, plain: ForwardRun | None = None
) -> BatchCheck:
    """Judge a run of the engine; `plain` is the reference in bfloat16, if that is the yardstick."""
    greedy = _greedy(run, reference, plain)
    if plain is not None:
        ratios = _ratios(run.forward, reference, plain, run.prompt_rows)
        return BatchCheck(run.batch, len(run.forward.tokens), greedy, None, ratios)
    gate, biases = GATES["float32"], router_biases(checkpoint)
    exact = compare(run.forward, replace(reference, logits=None, mtp=None), gate, checkpoint.config, biases)
    return BatchCheck(run.batch, len(run.forward.tokens), greedy, exact, [])


def _ratios(ours: ForwardRun, reference: ForwardRun, plain: ForwardRun, prompt_rows: int) -> list[SiteRatio]:
    """Errors of every site in order of computation. `moe_topk` is left out: it is a choice, not a measured value."""
    if ours.sites.keys() != reference.sites.keys():
        missing = sorted(reference.sites.keys() ^ ours.sites.keys(), key=computation_order)
        raise OptionError(f"the engine and the reference have other sites: {missing[:3]}.")
    phases = {"prompt": slice(0, prompt_rows), "decode": slice(prompt_rows, None)}
    ratios = []
    for key in sorted(reference.sites, key=computation_order):
        if key[0] == "moe_topk":
            continue
        errors = [_row_errors(run.sites[key], reference.sites[key]) for run in (ours, plain)]
        for phase, rows in phases.items():
            for quantile in ALLOWED:
                error, plain_error = (float(each[rows].quantile(quantile)) for each in errors)
                ratios.append(SiteRatio(*key, phase, quantile, error, plain_error))
    return ratios


def _row_errors(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The relative error of every row; of rows of zeros the norm of the other."""
    a, b = a.flatten(1).double(), b.flatten(1).double()
    size = b.norm(dim=-1)
    errors: torch.Tensor = (a - b).norm(dim=-1) / torch.where(size > 0, size, 1.0)
    return errors


def _greedy(run: _EngineRun, reference: ForwardRun, plain: ForwardRun | None) -> GreedyTokens:
    """Compare the generated tokens with the reference's logits. A token may be another one if its logit is lower by no
    more than rounding moves logits: with a yardstick, twice what its best logits are off by, for each of the two."""
    assert reference.logits is not None
    logits = reference.logits[run.prompt_rows - 1 :]
    chosen = torch.tensor(run.generated)
    gaps = logits.amax(-1) - logits.gather(1, chosen.unsqueeze(-1)).squeeze(-1)
    allowed = 1e-4 * float(logits.abs().amax())
    if plain is not None:
        assert plain.logits is not None
        best = logits.argmax(-1, keepdim=True)
        off = (plain.logits[run.prompt_rows - 1 :] - logits).gather(1, best).abs().amax()
        allowed = 4 * float(off)
    return GreedyTokens(
        len(run.generated), int((gaps == 0).sum()), float(gaps.max()), allowed, run.same_without_capture
    )


def _batch_name(batch: int) -> str:
    return "alone" if batch == 1 else f"in a batch of {batch}"


def _run_lines(run: BatchCheck) -> list[str]:
    if run.exact is not None:
        largest = max(run.exact.sites, key=lambda row: (row.rel_rmse != row.rel_rmse, row.rel_rmse))
        first = run.exact.divergence
        sites = (
            f"largest error {largest.rel_rmse:.1e} at {largest.site}[{largest.layer}], allowed {EXACT:.0e}"
        )
        out = [f"{len(run.exact.sites)} sites, {sites}", *([] if first is None else first.lines())]
    else:
        out = [f"{len({(ratio.site, ratio.layer) for ratio in run.ratios})} sites, {_ratio_text(run.worst)}"]
        if run.diverging is not None:
            out.append(f"first outside: {_ratio_text(run.diverging)}")
    greedy = run.greedy
    tokens = f"{greedy.same} of {greedy.tokens} greedy tokens are the reference's"
    if greedy.same < greedy.tokens:
        tokens += f", the others' logits are up to {greedy.largest_gap:.2g} lower (allowed {greedy.allowed_gap:.2g})"
    out.append(tokens)
    if not greedy.same_without_capture:
        out.append("the tokens are others without captures: capturing must not change them")
    return out


def _ratio_text(ratio: SiteRatio) -> str:
    row = "median row" if ratio.quantile == 0.5 else f"{100 * ratio.quantile:.0f}th percentile of rows"
    return (
        f"{ratio.site}[{ratio.layer}] of {ratio.phase} rows has {ratio.ratio:.2f} times the error of plain PyTorch in "
        f"bfloat16 ({row}: {ratio.error:.1e}), allowed {ratio.allowed:g}"
    )


def _run_dict(run: BatchCheck) -> dict[str, Any]:
    shown = {"batch": run.batch, "rows": run.rows, "ok": run.ok, "greedy": asdict(run.greedy)}
    if run.exact is not None:
        return shown | {"exact": run.exact.to_dict()}
    return shown | {
        "sites": [
            {**asdict(ratio), "ratio": ratio.ratio, "allowed": ratio.allowed, "ok": ratio.ok}
            for ratio in run.ratios
        ]
    }
