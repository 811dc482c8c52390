"""The engine core of the backend vllm: our requests, run by vLLM's engine.

vLLM schedules, computes and samples. A request that captures or edits is prepared on every rank before vLLM gets it;
tokens come back step by step, and captured rows when the request has ended. Text, stop strings and events are made here
from the tokens, as in our own engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from birkhoff.config import ModelConfig
from birkhoff.engine.request import FinishReason, Request, TokenLogprob
from birkhoff.engine.request_loop import RequestLoop
from birkhoff.errors import CapacityError, EngineClosed, OptionError, UnsupportedModel, quoted
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.tap import Tap
from birkhoff.vllm.front_planner import RemotePlan
from birkhoff.vllm.ranks import Ranks
from birkhoff.vllm.spec import FIELD

_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "cancelled",
    "error": "error",
}


class VllmModel:
    """A model that vLLM runs: what is known of it without a forward pass. `path` is its checkpoint directory."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        schema: Mapping[str, HookSchema],
        settings: Mapping[str, Any],
    ):
        self.path = path
        self.config = config
        self.dtype = dtype
        self.schema = dict(schema)
        self.settings = {"backend": "vllm", **settings}
        self.device = torch.device("cpu")  # of tensors in the front; the ranks have their own

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the checkpoint, for its digest."""
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  no mapping
                    yield name, tensors.get_tensor(name)

    def __call__(self, token_ids: torch.Tensor, tap: Tap | None = None) -> torch.Tensor:
        raise self._unsupported("a forward pass outside its scheduler")

    def run_texts(self, texts: Any, tap: Any = None) -> list[torch.Tensor]:
        raise self._unsupported("a forward pass outside its scheduler")

    def merge_streams(self, streams: torch.Tensor) -> torch.Tensor:
        raise self._unsupported("its head by itself")

    def norm(self, residual: torch.Tensor) -> torch.Tensor:
        raise self._unsupported("its final norm by itself")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise self._unsupported("its head by itself")

    def _unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"vLLM does not offer {what}. Use generate with a capture, or load the model with the backend transformers "
            "or birkhoff."
        )


class VllmCore(RequestLoop):
    """`engine` is vLLM's `LLMEngine`, `sampling` makes its sampling parameters from keywords."""

    def __init__(
        self,
        engine: Any,
        sampling: Callable[..., Any],
        model: VllmModel,
        max_context: int,
        max_requests: int,
        max_batch_tokens: int,
    ):
        super().__init__(max_context)
        self.model = model
        self.engine = engine
        self._sampling = sampling
        self._max_requests = max_requests
        self._max_batch_tokens = max_batch_tokens
        self._waiting: deque[Request] = deque()  # prepared, without room in the tables
        self._active: dict[str, Request] = {}
        self.ranks = Ranks(self._call)

    @property
    def max_requests(self) -> int:
        return self._max_requests

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "batch_invariant": False,
            "max_requests": self._max_requests,
            "max_batch_tokens": self._max_batch_tokens,
        }

    def _call(self, method: str, *given: Any) -> list[Any]:
        """Call a method of every worker; one result per rank."""
        results: list[Any] = self.engine.collective_rpc(method, args=given)
        return results

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.check_context(
                len(request.prompt_ids), max(request.max_tokens, 1)
            )  # vLLM samples at least one
            _check_supported(request)
        with self._locked():
            self.check_open()
            opened: list[Request] = []
            try:
                for request in requests:
                    if request.plan is not None:
                        request.plan.open()
                        opened.append(request)
                plans = [request.plan for request in opened]
                hold = [bool(request.params.stop) for request in opened]
                self.ranks.prepare([plan for plan in plans if isinstance(plan, RemotePlan)], hold)
            except BaseException:
                for request in opened:
                    assert request.plan is not None
                    request.plan.close("cancelled", 0)
                raise
            self._waiting.extend(requests)
            self._admit()

    def step(self) -> bool:
        with self._locked():
            self._admit()
            if not self._active:
                return False
            try:
                outputs = self.engine.step()
            except Exception as error:
                self._fail(error)
                return True
            for output in outputs:
                self._collect(output)
            return True

    def reuse(self) -> dict[str, Any]:
        return {"prefix": None, "speculation": None}

    def close(self) -> None:
        with self._locked():
            if self._closed:
                return
            self._closed = True
            for request in [*self._waiting, *self._active.values()]:
                self._cancel(request)
        self.engine.engine_core.shutdown()

    def _cancel(self, request: Request) -> None:
        if request.done:
            return
        if request in self._waiting:
            self._waiting.remove(request)
        elif request.id in self._active:
            del self._active[request.id]
            self.engine.abort_request([request.id])
        request.finish("cancelled")

    def _admit(self) -> None:
        """Give vLLM the waiting requests, in order, as long as their edits fit the tables of the ranks."""
        while self._waiting:
            request = self._waiting[0]
            if request.plan is not None and not request.plan.reserve():
                if not self._active:
                    self._waiting.popleft()
                    request.finish(
                        "error", error=CapacityError("the edits of this request fit no empty table.")
                    )
                    continue
                return
            self._waiting.popleft()
            self._active[request.id] = request
            prompt = {"prompt_token_ids": list(request.prompt_ids)}
            self.engine.add_request(request.id, prompt, self._sampling(**sampling_keywords(request)))

    def _collect(self, output: Any) -> None:
        """New tokens of one request."""
        request = self._active.get(output.request_id)
        if request is None:
            return
        if request.cached_tokens is None:
            request.cached_tokens = output.num_cached_tokens
        answer = output.outputs[0]
        tokens = answer.token_ids
        if request.prompt_only and tokens:  # vLLM samples at least one token, which is dropped
            request.finish("length")
            tokens = []
        logprobs = answer.logprobs or [None] * len(tokens)
        for token, found in zip(tokens, logprobs):
            request.append_token(int(token), token_logprob(int(token), found, request.params.logprobs))
            if request.done:
                break
        if output.finished and not request.done:
            reason = _REASONS.get(str(answer.finish_reason), "error")
            error = CapacityError("vLLM ended the request with an error.") if reason == "error" else None
            request.finish(reason, error=error)
        if request.done:
            del self._active[request.id]
            if not output.finished:  # it ended here, at a stop string
                self.engine.abort_request([request.id])

    def _fail(self, error: Exception) -> None:
        """vLLM's engine has ended: so do all requests, and the engine."""
        self._closed = True
        failure = EngineClosed(f"vLLM's engine has ended ({quoted(str(error), 300)}). Load the model again.")
        failure.__cause__ = error
        for request in [*self._waiting, *self._active.values()]:
            if isinstance(request.plan, RemotePlan):
                request.plan.lose(str(failure))
            request.finish("error", error=failure)
        self._waiting.clear()
        self._active.clear()
        self.engine.engine_core.shutdown()  # ends the processes that are left


def sampling_keywords(request: Request) -> dict[str, Any]:
    """Keywords of vLLM's `SamplingParams`. The end-of-text ids are ours: vLLM's own are ignored. Text is made here."""
    params = request.params
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_ids))
    keywords: dict[str, Any] = {
        "max_tokens": max(request.max_tokens, 1),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": None if params.greedy else request.seed % 2**63,
        "stop_token_ids": sorted(ends),
        "ignore_eos": True,
        "min_tokens": params.min_tokens,
        "logprobs": params.logprobs,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": dict(params.logit_bias) or None,
        "detokenize": False,
    }
    if isinstance(request.plan, RemotePlan):
        keywords["extra_args"] = {FIELD: request.plan.mark.to_text()}
    return keywords


def token_logprob(token: int, found: Any, alternatives: int | None) -> TokenLogprob | None:
    """vLLM's log-probabilities of one token: an object with `logprob` and `rank` by token id."""
    if found is None or alternatives is None:
        return None
    top = sorted(((int(each), entry.logprob) for each, entry in found.items()), key=lambda pair: -pair[1])
    return TokenLogprob(token, found[token].logprob, tuple(top[:alternatives]))


def _check_supported(request: Request) -> None:
    if request.mask is not None:
        raise OptionError(
            "the answer is constrained by a grammar, which this backend does not pass to vLLM. Leave response_format "
            "out."
        )
    if request.context is not None:
        raise OptionError(
            f"context is {quoted(request.context)}, a name for kept pages of the backend birkhoff. Leave it out: "
            "vLLM's prefix cache keeps prompts by itself."
        )
