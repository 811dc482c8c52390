"""The analyses of an `Engine`: forward passes outside its scheduler, over texts, token ids or chat messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

import torch

from birkhoff.analysis.activations_store import ActStream, iter_activations
from birkhoff.analysis.attention import AttentionPattern, AttentionReadout, attention, attention_patterns
from birkhoff.analysis.attribute import MAX_BATCH_TOKENS, attribute
from birkhoff.analysis.attribution import Attribution, AttributionBatch
from birkhoff.analysis.circuit import Circuit, find_circuit
from birkhoff.analysis.contrast import contrast
from birkhoff.analysis.forward import addresses, features, logits, texts_of, trace
from birkhoff.analysis.gradients import Gradients
from birkhoff.analysis.lens import Lens, compute_lens
from birkhoff.analysis.logit_attribution import LogitAttribution, logit_attribution
from birkhoff.analysis.patching import PatchSweep, PatchSweepBatch, patch, patch_sweep
from birkhoff.capture.spec.request import Capture
from birkhoff.capture.spec.validation import POINTS
from birkhoff.hooks.plan import SiteRows
from birkhoff.hooks.site_names import Address
from birkhoff.option_checks import check_choice, listed
from birkhoff.steering.resolver import Steering, per_prompt_edits
from birkhoff.steering.vector_file import SteeringVector
from birkhoff.text.prompts import Prompt, is_single
from birkhoff.trace import Trace, TraceBatch

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.sae.feature_index import FeatureMatch
    from birkhoff.sae.feature_probe import Feature
    from birkhoff.sae.features import FeatureEntry

Result = TypeVar("Result")
# A forward pass that was kept: a `Trace`, or captured rows (`output.acts`).
Run = Mapping[Address, torch.Tensor] | Mapping[Address, SiteRows]


class Analyses:
    """The part of `Engine` that runs whole texts and reads them. Every method takes the same prompts."""

    def _open_engine(self) -> Engine:
        """The engine this is a part of; raises if it was closed."""
        engine = cast("Engine", self)
        engine.check_open()
        return engine

    def _each(self, prompts: Any, run: Callable[[Engine, list[Any]], list[Result]]) -> Result | list[Result]:
        """The results of `run` for the texts of some prompts: a list of them, or one for a single prompt."""
        engine = self._open_engine()
        texts, single = texts_of(engine, prompts)
        results = run(engine, texts)
        return results[0] if single else results

    @overload
    def logits(self, prompts: Prompt, steer: Steering = None) -> torch.Tensor: ...  # type: ignore[overload-overlap]  # a text is a sequence of texts
    @overload
    def logits(self, prompts: Sequence[Prompt], steer: Steering = None) -> list[torch.Tensor]: ...
    def logits(
        self, prompts: Prompt | Sequence[Prompt], steer: Steering = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Next-token logits at every position, float32 [T, vocab], from one forward pass outside the scheduler.

        Prompts are texts, token ids or chat messages, as for `generate`. A list of prompts gives a list of tensors,
        each as long as its prompt: nothing is padded. `steer` is one list of edits for all prompts, or one for each."""
        return self._each(prompts, lambda engine, texts: logits(engine, texts, steer))

    @overload
    def trace(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompts: Prompt,
        hooks: Any = "all",
        steer: Steering = None,
        capture_point: Literal["before", "after"] = "before",
    ) -> Trace: ...
    @overload
    def trace(
        self,
        prompts: Sequence[Prompt],
        hooks: Any = "all",
        steer: Steering = None,
        capture_point: Literal["before", "after"] = "before",
    ) -> TraceBatch: ...
    def trace(
        self,
        prompts: Prompt | Sequence[Prompt],
        hooks: Any = "all",
        steer: Steering = None,
        capture_point: Literal["before", "after"] = "before",
    ) -> Trace | TraceBatch:
        """One forward pass that keeps the activations of `hooks` at every position.

        `hooks` is "all", a name, a list of names, layers by name as in a `Capture`: `{"mlp_out": [3, -1]}`, or a
        function of hook and layer that says whether a tensor is kept: `lambda hook, layer: layer > 3`. A tensor
        is the one that enters the edits of its site (`steer`), or with `capture_point="after"` the one that leaves
        them; in an `engine.grad()` block it is always the latter.
        Returns a `Trace`, or for a list of prompts a `TraceBatch`: `batch[i]` is the trace of one prompt, and
        `batch[hook, layer]` all of them padded on the right."""
        engine = self._open_engine()
        check_choice("capture_point", capture_point, POINTS)
        texts, single = texts_of(engine, prompts)
        traces = trace(engine, texts, hooks, steer, capture_point)
        return traces[0] if single else TraceBatch(traces)

    @overload
    def lens(self, prompts: Prompt, per_stream: bool = True, steer: Steering = None) -> Lens: ...  # type: ignore[overload-overlap]  # a text is a sequence of texts
    @overload
    def lens(
        self, prompts: Sequence[Prompt], per_stream: bool = True, steer: Steering = None
    ) -> list[Lens]: ...
    def lens(
        self, prompts: Prompt | Sequence[Prompt], per_stream: bool = True, steer: Steering = None
    ) -> Lens | list[Lens]:
        """Logit lens: predictions from every stream, their mean and the head's mix of them, at every layer.

        Returns a `Lens`, or a list of them for a list of prompts."""
        return self._each(prompts, lambda engine, texts: compute_lens(engine, texts, per_stream, steer))

    @overload
    def attention(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self, prompts: Prompt, position: int = -1, steer: Steering = None
    ) -> list[AttentionReadout]: ...
    @overload
    def attention(
        self, prompts: Sequence[Prompt], position: int = -1, steer: Steering = None
    ) -> list[list[AttentionReadout]]: ...
    def attention(
        self, prompts: Prompt | Sequence[Prompt], position: int = -1, steer: Steering = None
    ) -> list[AttentionReadout] | list[list[AttentionReadout]]:
        """Attention weights of one token by layer: single tokens, compressed blocks, the sink.

        Returns a list of `AttentionReadout`, one per layer; for a list of prompts, such a list for each."""
        return self._each(prompts, lambda engine, texts: attention(engine, texts, position, steer))

    @overload
    def attention_patterns(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self, prompts: Prompt, layers: Any = "all", steer: Steering = None
    ) -> dict[int, AttentionPattern]: ...
    @overload
    def attention_patterns(
        self, prompts: Sequence[Prompt], layers: Any = "all", steer: Steering = None
    ) -> list[dict[int, AttentionPattern]]: ...
    def attention_patterns(
        self, prompts: Prompt | Sequence[Prompt], layers: Any = "all", steer: Steering = None
    ) -> dict[int, AttentionPattern] | list[dict[int, AttentionPattern]]:
        """Attention weights of every head and token, `{layer: AttentionPattern}`; for a list of prompts, one such
        mapping for each.

        A pattern has `window` [heads, query, key], the weights of single tokens, `entries` those of compressed blocks,
        `sink`, and `by_token()`, which spreads blocks over their tokens."""
        return self._each(prompts, lambda engine, texts: attention_patterns(engine, texts, layers, steer))

    def patch(
        self,
        prompt: Prompt,
        source: Any,
        hook: str,
        layers: Any = None,
        *,
        where: Any = None,
        align: str = "position",
        streams: Any = None,
        scale: float = 1.0,
        hooks: Any = (),
        steer: Steering = None,
    ) -> Trace:
        """Run a prompt with activations of another run, and return its `Trace` (its logits, and `hooks` if any).

        `source` is a `Trace`, captured rows (`output.acts`), or another prompt, which is run first. Its rows at `hook`
        and `layers` replace those of the prompt, at the positions `where` selects (all by default). `align` says
        which row goes where: "position", or "tokens" for texts of different length. To generate with the same patch,
        pass `Patch(source, hook, layers, align=...)` in `steer`."""
        engine = self._open_engine()
        options = {"where": where, "align": align, "streams": streams, "scale": scale}
        return patch(engine, prompt, source, hook, layers, hooks, steer, options)

    @overload
    def patch_sweep(
        self,
        clean: Prompt | Run,
        corrupt: Prompt,
        metric: Any,
        over: str | Sequence[str],
        *,
        layers: Any = "all",
        positions: Any = "each",
        streams: Any = None,
        align: str = "position",
        steer: Steering = None,
    ) -> PatchSweep: ...
    @overload
    def patch_sweep(
        self,
        clean: Sequence[Prompt | Run],
        corrupt: Sequence[Prompt],
        metric: Any,
        over: str | Sequence[str],
        *,
        layers: Any = "all",
        positions: Any = "each",
        streams: Any = None,
        align: str = "position",
        steer: Steering = None,
    ) -> PatchSweepBatch: ...
    def patch_sweep(
        self,
        clean: Prompt | Run | Sequence[Prompt | Run],
        corrupt: Prompt | Sequence[Prompt],
        metric: Any,
        over: str | Sequence[str],
        *,
        layers: Any = "all",
        positions: Any = "each",
        streams: Any = None,
        align: str = "position",
        steer: Steering = None,
    ) -> PatchSweep | PatchSweepBatch:
        """Patch activations of `clean` into `corrupt`, one site at a time, and measure every run: a `PatchSweep`.

        Two lists of as many texts give a `PatchSweepBatch`: the sweep of every pair, and their mean. All texts have the
        same number of tokens then, unless `positions` is None; `metric` and `steer` are one for all pairs, or a list
        with one for each.

        `over` is a hook, a list of hooks, or "heads": the output of every attention head by itself. There is a cell for
        each hook, each of `layers` and each of `positions` ("each", a list, or None for all positions together); with
        `streams` ("each" or a list) also for each stream.
        `metric` is a token (a text or an id): its logit at the end; two tokens: the difference of their logits; or a
        function that takes the logits [T, vocab] and returns a number. `clean` may be a `Trace` of the hooks, or
        `output.acts` with the rows of all tokens of a text, which is run once more for its metric. Cells run side by
        side: the sweep takes as many passes as its tokens fill."""
        engine = self._open_engine()
        return patch_sweep(engine, clean, corrupt, metric, over, layers, positions, streams, align, steer)

    @contextmanager
    def grad(self, hooks: Any = "all", *, recompute: bool = False) -> Iterator[Gradients]:
        """Context manager: `logits` and `trace` inside the block keep their graph, and `g.backward(number)` computes
        the gradient of a number made from their results at every site of `hooks`: `g[hook, layer]`.

        With `recompute` layers are computed again in the backward pass instead of being kept, so that memory does not
        grow with their number. Only passes of this thread are affected."""
        engine = self._open_engine()
        recorded = Gradients(engine, addresses(engine, hooks), recompute)
        with engine.gradients.opened(recorded) as gradients:
            yield gradients

    @overload
    def attribute(
        self,
        prompt: Prompt,
        metric: Any,
        over: str | Sequence[str] = "sublayers",
        *,
        layers: Any = "all",
        baseline: Any = None,
        method: str = "gradient",
        steps: int = 16,
        steer: Steering = None,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        recompute: bool | None = None,
        max_exact_nodes: int | None = None,
    ) -> Attribution: ...
    @overload
    def attribute(
        self,
        prompt: Sequence[Prompt],
        metric: Any,
        over: str | Sequence[str] = "sublayers",
        *,
        layers: Any = "all",
        baseline: Any = None,
        method: str = "gradient",
        steps: int = 16,
        steer: Steering = None,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        recompute: bool | None = None,
        max_exact_nodes: int | None = None,
    ) -> AttributionBatch: ...
    def attribute(
        self,
        prompt: Prompt | Sequence[Prompt],
        metric: Any,
        over: str | Sequence[str] = "sublayers",
        *,
        layers: Any = "all",
        baseline: Any = None,
        method: str = "gradient",
        steps: int = 16,
        steer: Steering = None,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        recompute: bool | None = None,
        max_exact_nodes: int | None = None,
    ) -> Attribution | AttributionBatch:
        """Score parts of the model by how much they contribute to a metric on a text: an `Attribution`.

        Several prompts of one length give an `AttributionBatch`: the scores of every text, and their mean. `metric`,
        `baseline` and `steer` are one for all texts, or a list with one for each.

        `metric` is a pair of tokens (logit difference), a token (its logit), `LogProb`, or a function of the logits
        [T, vocab]. `over` names what is scored at every position: hooks, or `sublayers`, `streams` (each stream by
        itself), `mixers`, `heads`, `experts`, `features:NAME` (of an attached SAE), or a list of these. A score says
        how much the metric falls when the part is moved to `baseline`: zeros (None), "mean" (over the text), or another
        text of the same length. `method` is gradient, integrated (gradients at `steps` points), inputs or exact
        (docs/attribution.md); `max_exact_nodes` bounds the runs of the last."""
        engine = self._open_engine()
        options = (layers, baseline, method, steps, steer, max_batch_tokens, recompute, max_exact_nodes)
        return attribute(engine, prompt, metric, over, *options)

    def circuit(
        self,
        prompt: Prompt,
        metric: Any,
        over: str | Sequence[str] = "sublayers",
        *,
        baseline: Any = None,
        faithfulness: float = 0.8,
        method: str = "gradient",
        steps: int = 16,
        steer: Steering = None,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
    ) -> Circuit:
        """Find a small set of nodes that keeps `faithfulness` of a metric when all other nodes are at their baseline.

        Nodes are ranked by `attribute` with the same arguments; the set is then verified by running the model with
        everything else ablated. Over `sublayers` it also has edges from output to input through each stream."""
        engine = self._open_engine()
        options = (faithfulness, method, steps, steer, max_batch_tokens)
        return find_circuit(engine, prompt, metric, over, baseline, *options)

    def logit_attribution(
        self, prompt: Prompt, token: Any = None, position: int = -1, steer: Steering = None
    ) -> LogitAttribution:
        """The logit of a token as a sum over everything written to the residual streams, exact given the weights and
        the norm of the same forward pass: per layer, sublayer, head, expert and stream.

        `token` is a text of one token or an id, by default the most likely one; two tokens give the difference of their
        logits. `position` is the token after which it is predicted."""
        engine = self._open_engine()
        return logit_attribution(engine, prompt, token, position, steer)

    @overload
    def features(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompts: Prompt,
        name: str,
        k: int = 10,
        at: tuple[str, int] | str | None = None,
        steer: Steering = None,
        order: Literal["specific", "strength"] | None = None,
    ) -> list[list[Feature]]: ...
    @overload
    def features(
        self,
        prompts: Sequence[Prompt],
        name: str,
        k: int = 10,
        at: tuple[str, int] | str | None = None,
        steer: Steering = None,
        order: Literal["specific", "strength"] | None = None,
    ) -> list[list[list[Feature]]]: ...
    def features(
        self,
        prompts: Prompt | Sequence[Prompt],
        name: str,
        k: int = 10,
        at: tuple[str, int] | str | None = None,
        steer: Steering = None,
        order: Literal["specific", "strength"] | None = None,
    ) -> list[list[Feature]] | list[list[list[Feature]]]:
        """The k first active features of every token of a text, from an attached SAE.

        `order` is "strength" or "specific": activation times -log(density), so that features which are active almost
        everywhere come last (compared among a token's 256 strongest). It is "specific" by default if the dictionary
        has descriptions, which know the densities. Returns one list of `Feature` per token; for a list of prompts, one
        such list each."""
        engine = self._open_engine()
        single = is_single(prompts)
        each: list[Any] = [prompts] if single else list(prompts)
        found = [
            features(engine, prompt, name, k, at, edits, order)
            for prompt, edits in zip(each, per_prompt_edits(steer, len(each)))
        ]
        return found[0] if single else found

    def contrast(
        self,
        positive: Sequence[Prompt],
        negative: Sequence[Prompt],
        hook: str,
        layers: Any = "all",
        how: str = "mean_diff",
        *,
        streams: int | Sequence[int] | None = None,
        tokens: str = "mean",
        note: str = "",
    ) -> SteeringVector:
        """The difference between two sets of texts at a hook as a vector to add, which steers to the positive set:
        `engine.generate(prompt, steer=[Add(vector, scale=2.0)])`.

        `how` is mean_diff (the difference of means) or pca. A text gives the `tokens` "mean" of its rows, or its "last"
        one. With `streams` the others are zero."""
        return contrast(
            self._open_engine(),
            positive,
            negative,
            hook,
            layers,
            how,
            streams=listed(streams),
            tokens=tokens,
            note=note,
        )

    def feature(self, name: str, feature: int | str) -> FeatureEntry:
        """The description of one feature of an attached SAE, given by number or label: label and how it was made,
        contexts, examples, density, promoted tokens."""
        return self._open_engine().saes.describe_feature(name, feature)

    def search_features(self, name: str, words: str, limit: int = 20) -> list[FeatureMatch]:
        """Features of an attached SAE whose label, tokens or contexts have these words, best first."""
        return self._open_engine().saes.descriptions(name).search(words, limit)

    def stream_acts(
        self,
        texts: Iterable[Prompt],
        capture: Capture,
        batch_rows: int = 8192,
        *,
        device: torch.device | str | None = None,
        shuffle_rows: int = 0,
        seed: int = 0,
        resume: Mapping[str, Any] | None = None,
    ) -> ActStream:
        """Iterate over the activation rows of many texts in batches of `batch_rows`, in bounded memory.

        Batches are on the host, or on `device`: rows that a GPU computed stay there for `device="cuda"`. They come in
        the order of the texts, or shuffled over a buffer of `shuffle_rows` rows, by `seed`. `state()` of
        the stream after any batch, given as `resume`, continues with the next one."""
        return iter_activations(
            self._open_engine(),
            texts,
            capture,
            batch_rows,
            device=device,
            shuffle_rows=shuffle_rows,
            seed=seed,
            resume=resume,
        )
