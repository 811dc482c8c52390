"""Baselines with a common interface: the engine, the bare model, and Hugging Face `transformers`.

`prefill(prompts)` processes a batch of prompts and returns the greedy next token of each; `step(tokens)` takes those
and returns the next. Each baseline keeps its own cache in between and is called as in normal use: ours through
`EngineCore` or `Transformer.run`, `transformers` through `from_pretrained` with its cache, under `inference_mode`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import torch

from birkhoff.engine.engine import EngineCore
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.hooks.plan import Plan
from birkhoff.hooks.tap import NoTap, Tap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.cache_size import pages_for
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer

Tokens = list[int]
EXPERT_VARIANTS = ("eager", "batched_mm", "grouped_mm")  # of the experts in `transformers`, on a CPU


class Baseline(Protocol):
    name: str

    def prefill(self, prompts: list[Tokens]) -> Tokens: ...
    def step(self, tokens: Tokens) -> Tokens: ...


class OurEngine:
    """Requests through scheduler, runner and sampler, as in `engine.generate`."""

    name = "engine"

    def __init__(self, model: Transformer, batch: int, prompt_tokens: int, steps: int):
        context = prompt_tokens + steps + 1
        self.steps = steps
        self.core = EngineCore(
            model,
            max_requests=batch,
            max_context=context,
            num_pages=batch * pages_for(context),
            max_batch_tokens=batch
            * (prompt_tokens + 1),  # all prompts in one step, as the other baselines do
        )
        self.began = 0.0  # when the last prefill started
        self._requests: list[Request] = []

    def prefill(self, prompts: list[Tokens]) -> Tokens:
        for request in self._requests:
            self.core.cancel(request)
        options = SamplingParams(temperature=0, max_tokens=self.steps + 1, ignore_eos=True)
        self.began = time.perf_counter()
        self._requests = [
            Request(tuple(ids), options, options.max_tokens, seed=0, plan=self._plan(index, ids))
            for index, ids in enumerate(prompts)
        ]
        for request in self._requests:
            self.core.submit(request)
        return self.step([])

    def _plan(self, index: int, ids: Tokens) -> Plan | None:
        """Captures and edits of prompt `index`."""
        return None

    def step(self, tokens: Tokens) -> Tokens:
        self.core.step()
        return [request.output_ids[-1] for request in self._requests]


class OurModel:
    """The forward pass alone, without requests and sampler; one row of logits per sequence."""

    name = "model"

    def __init__(
        self, model: Transformer, batch: int, prompt_tokens: int, steps: int, tap: Tap | None = None
    ):
        self.model = model
        self.tap = tap or NoTap()
        pages = pages_for(prompt_tokens + steps + 1)
        self.state = State(model.config, batch, batch * pages, "cpu", model.numerics.dtype)
        for slot in range(batch):
            self.state.give_pages(slot, list(range(slot * pages, (slot + 1) * pages)))
        self.length = 0

    def prefill(self, prompts: list[Tokens]) -> Tokens:
        self.length = 0
        return self._run(prompts)

    def step(self, tokens: Tokens) -> Tokens:
        return self._run([[token] for token in tokens])

    @torch.inference_mode()
    def _run(self, chunks: list[Tokens]) -> Tokens:
        batch = Batch.of([SequenceChunk(slot, self.length, ids) for slot, ids in enumerate(chunks)])
        hidden, _ = self.model.run(batch, self.state, self.tap)
        self.length += len(chunks[0])
        return self.model.logits(hidden[batch.last_rows()]).argmax(-1).tolist()


class Transformers:
    """`DeepseekV4ForCausalLM` with its cache. Of its implementations of experts each phase uses the fastest."""

    name = "transformers"

    def __init__(self, path: Path, dtype: torch.dtype):
        import transformers

        from_pretrained: Any = transformers.DeepseekV4ForCausalLM.from_pretrained
        with _quiet(transformers):
            self.model = from_pretrained(path, dtype=dtype).eval()
        default = self.model.config._experts_implementation
        self.variants = {"prefill": default, "decode": default}
        self._cache: Any = None

    def choose_fastest(self, prompts: list[Tokens], steps: int) -> None:
        """Time every implementation that runs here with these prompts and keep the fastest for prefill and for
        decode."""
        seconds: dict[str, dict[str, float]] = {"prefill": {}, "decode": {}}
        for variant in dict.fromkeys([self.variants["prefill"], *EXPERT_VARIANTS]):
            self.variants = {"prefill": variant, "decode": variant}
            try:
                self.prefill(prompts)  # once to warm up
                began = time.perf_counter()
                tokens = self.prefill(prompts)
                prefilled = time.perf_counter()
                for _ in range(steps):
                    tokens = self.step(tokens)
            except (RuntimeError, NotImplementedError, ImportError):
                continue  # made for other devices or dtypes
            seconds["prefill"][variant], seconds["decode"][variant] = (
                prefilled - began,
                time.perf_counter() - prefilled,
            )
        self.variants = {phase: min(seconds, key=seconds.__getitem__) for phase, seconds in seconds.items()}

    def prefill(self, prompts: list[Tokens]) -> Tokens:
        self._cache = None
        return self._run(prompts, "prefill")

    def step(self, tokens: Tokens) -> Tokens:
        return self._run([[token] for token in tokens], "decode")

    @torch.inference_mode()
    def logits(self, ids: Tokens) -> torch.Tensor:
        logits: torch.Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits.float()

    @torch.inference_mode()
    def _run(self, rows: list[Tokens], phase: str) -> Tokens:
        if self.model.config._experts_implementation != self.variants[phase]:
            self.model.set_experts_implementation(self.variants[phase])
        out = self.model(torch.tensor(rows), past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        tokens: Tokens = out.logits[:, -1].argmax(-1).tolist()
        return tokens


class _quiet:
    """Suppresses the progress bars and messages of `transformers`."""

    def __init__(self, transformers: Any):
        self._logging = transformers.logging

    def __enter__(self) -> None:
        self._level = self._logging.get_verbosity()
        self._logging.set_verbosity_error()
        self._logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        self._logging.set_verbosity(self._level)
        self._logging.enable_progress_bar()
