"""Who is timed: our engine, our bare model, and `transformers`, behind one small face.

`prefill(prompts)` reads a batch of prompts and gives each one's greedy next token; `step(tokens)` feeds those and gives
the next. Each contender keeps its own cache between the two and is used as its users would: ours through `EngineCore`
or `Transformer.run`, theirs through `from_pretrained` with its cache, under `inference_mode`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import torch

from birkhoff.engine.engine import EngineCore
from birkhoff.engine.memory_plan import pages_for
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.hooks.tap import NoTap, Tap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer

Tokens = list[int]
WAYS = ("eager", "batched_mm", "grouped_mm")  # of `transformers`, for experts on a CPU


class Baseline(Protocol):
    name: str

    def prefill(self, prompts: list[Tokens]) -> Tokens: ...
    def step(self, tokens: Tokens) -> Tokens: ...


class OurEngine:
    """Requests through the scheduler, the runner and the sampler, as `engine.generate` has them."""

    name = "engine"

    def __init__(self, model: Transformer, batch: int, prompt_tokens: int, steps: int):
        context = prompt_tokens + steps + 1
        self.steps = steps
        self.core = EngineCore(
            model,
            max_requests=batch,
            max_context=context,
            num_pages=batch * pages_for(context),
            max_batch_tokens=batch * prompt_tokens
            + batch,  # all prompts in one step, as the others read them
        )
        self._requests: list[Request] = []

    def prefill(self, prompts: list[Tokens]) -> Tokens:
        for request in self._requests:
            self.core.cancel(request)
        options = SamplingParams(temperature=0, max_tokens=self.steps + 1, ignore_eos=True)
        self._requests = [Request(tuple(ids), options, options.max_tokens, seed=0) for ids in prompts]
        for request in self._requests:
            self.core.submit(request)
        return self.step([])

    def step(self, tokens: Tokens) -> Tokens:
        self.core.step()
        return [request.output_ids[-1] for request in self._requests]


class OurModel:
    """The forward pass alone: no requests, no sampler, one row of logits per sequence."""

    name = "model"

    def __init__(
        self, model: Transformer, batch: int, prompt_tokens: int, steps: int, tap: Tap | None = None
    ):
        self.model = model
        self.tap = tap or NoTap()
        each = pages_for(prompt_tokens + steps + 1)
        self.state = State(model.config, batch, batch * each, "cpu", model.numerics.dtype)
        for slot in range(batch):
            self.state.give_pages(slot, list(range(slot * each, (slot + 1) * each)))
        self.length = 0

    def prefill(self, prompts: list[Tokens]) -> Tokens:
        self.length = 0
        return self._run(prompts)

    def step(self, tokens: Tokens) -> Tokens:
        return self._run([[token] for token in tokens])

    @torch.inference_mode()
    def _run(self, pieces: list[Tokens]) -> Tokens:
        batch = Batch.of([SequenceChunk(slot, self.length, ids) for slot, ids in enumerate(pieces)])
        hidden, _ = self.model.run(batch, self.state, self.tap)
        self.length += len(pieces[0])
        return self.model.logits(hidden[batch.last_rows()]).argmax(-1).tolist()


class Transformers:
    """`DeepseekV4ForCausalLM` with its cache. It knows several ways to compute experts; each phase uses its best."""

    name = "transformers"

    def __init__(self, path: Path, dtype: torch.dtype):
        import transformers

        with _quiet(transformers):
            self.model = transformers.DeepseekV4ForCausalLM.from_pretrained(path, dtype=dtype).eval()
        default = self.model.config._experts_implementation
        self.ways = {"prefill": default, "decode": default}
        self._cache: Any = None

    def choose_fastest(self, prompts: list[Tokens], steps: int) -> None:
        """Try every way that works here on these prompts and keep the best for reading and for writing."""
        tried: dict[str, dict[str, float]] = {"prefill": {}, "decode": {}}
        for way in dict.fromkeys([self.ways["prefill"], *WAYS]):
            self.ways = {"prefill": way, "decode": way}
            try:
                self.prefill(prompts)  # once to warm up
                began = time.perf_counter()
                tokens = self.prefill(prompts)
                read = time.perf_counter()
                for _ in range(steps):
                    tokens = self.step(tokens)
            except (RuntimeError, NotImplementedError, ImportError):
                continue  # a way made for other devices or dtypes
            tried["prefill"][way], tried["decode"][way] = read - began, time.perf_counter() - read
        self.ways = {phase: min(seconds, key=seconds.__getitem__) for phase, seconds in tried.items()}

    def prefill(self, prompts: list[Tokens]) -> Tokens:
        self._cache = None
        return self._run(prompts, "prefill")

    def step(self, tokens: Tokens) -> Tokens:
        return self._run([[token] for token in tokens], "decode")

    @torch.inference_mode()
    def logits(self, ids: Tokens) -> torch.Tensor:
        return self.model(torch.tensor([ids]), use_cache=False).logits[0].float()

    @torch.inference_mode()
    def _run(self, rows: list[Tokens], phase: str) -> Tokens:
        if self.model.config._experts_implementation != self.ways[phase]:
            self.model.set_experts_implementation(self.ways[phase])
        out = self.model(torch.tensor(rows), past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        return out.logits[:, -1].argmax(-1).tolist()


class _quiet:
    """Their progress bars and notices stay off our stderr."""

    def __init__(self, transformers: Any):
        self._logging = transformers.logging

    def __enter__(self) -> None:
        self._level = self._logging.get_verbosity()
        self._logging.set_verbosity_error()
        self._logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        self._logging.set_verbosity(self._level)
        self._logging.enable_progress_bar()
