"""The `Engine` a user holds: answers, streams, traces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from birkhoff.analysis.activations_store import ActBatch, feed
from birkhoff.analysis.attention import AttentionReadout, attention
from birkhoff.analysis.block_signals import signal_jobs
from birkhoff.analysis.forward import edit_tap, features, trace
from birkhoff.analysis.lens import Lens, compute_lens
from birkhoff.analysis.run_manifest import model_digest
from birkhoff.api.driver import Driver, RequestOutput
from birkhoff.api.prompts import Captures, Prompt, check_ids, is_single, per_prompt, room_for
from birkhoff.capture.planner import CapturePlanner, CaptureRequestSpec, CaptureRules
from birkhoff.capture.sinks.captured_rows import CapturedRows
from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.spec.estimate import Estimate
from birkhoff.capture.spec.projections import Projections
from birkhoff.capture.spec.request import Capture
from birkhoff.config import V4Config
from birkhoff.dtype_names import dtype_name
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.named_contexts import check_name
from birkhoff.engine.request import Request, TokenEvent, TokenMask
from birkhoff.engine.sampler import seed_for
from birkhoff.engine.sampling import SamplingOptions
from birkhoff.errors import BirkhoffError, OptionError, PromptError, TextUnavailable
from birkhoff.hooks.plan import Edit, Plan, Reservation
from birkhoff.hooks.schema import HookSchema, schema_of
from birkhoff.hooks.signals import check_signals
from birkhoff.hooks.site_names import Address
from birkhoff.hooks.vector_table import Tables
from birkhoff.model.transformer import Transformer
from birkhoff.output import Output, Stream, Trace
from birkhoff.sae.feature_probe import Feature
from birkhoff.sae.resolver import Attachment, SaeResolver, split_edits
from birkhoff.sae.sae_fields import PARSERS
from birkhoff.steering.modules import NamedVectors
from birkhoff.steering.resolver import Steering, SteeringResolver, per_prompt_edits
from birkhoff.text.chat import encode_chat
from birkhoff.text.detokenizer import ChatStream, TextStream
from birkhoff.text.literals import Literals
from birkhoff.text.tokenizer import Tokenizer


class Engine:
    """A loaded model that answers, traces and explains itself. Also a context manager."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer | None,
        literals: Literals,
        name: str = "",
        capture_root: str | Path | None = None,
    ):
        self._core = core
        self._tokenizer = tokenizer
        self._literals = literals
        self.name = name
        self._capture_planner = CapturePlanner(self.schema, self.config.num_hidden_layers, name, capture_root)
        tables = Tables(self.model.embed.device)
        self._steering = SteeringResolver(self.schema, self.config.num_hidden_layers, self.identity, tables)
        self._steering.parsers |= PARSERS
        self.saes = SaeResolver(self.schema, self.config.num_hidden_layers, self.model.embed.device)

    @property
    def model(self) -> Transformer:
        """The differentiable model itself, for gradients and attribution: `engine.model(token_ids)`."""
        return self._core.model

    def identity(self) -> tuple[str, str]:
        """The model's name, and 128 bits of what its weights are."""
        return self.name, model_digest(self.model)

    @property
    def config(self) -> V4Config:
        return self.model.config

    @property
    def max_context(self) -> int:
        return self._core.max_context

    @property
    def schema(self) -> dict[str, HookSchema]:
        return schema_of(self.config, dtype_name(self.model.numerics.dtype))

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise TextUnavailable(
                "this checkpoint has no tokenizer.json, so text cannot be encoded. Pass token ids, "
                "or put the model's tokenizer.json into its directory."
            )
        return self._tokenizer

    def logits(self, token_ids: Sequence[int], steer: Steering = None) -> torch.Tensor:
        """Next-token logits at every position, float32 [T, vocab]."""
        self._core.check_open()
        ids = torch.tensor(check_ids(token_ids, self.config), device=self.model.embed.device)
        with torch.no_grad():  # not inference mode: what is handed out can be trained on and written to
            return self.model(ids, edit_tap(self, steer, ids.tolist()))

    def trace(
        self, token_ids: Sequence[int], hooks: str | Sequence[str] = "all", steer: Steering = None
    ) -> Trace:
        """A plain forward pass that keeps every asked-for site."""
        self._core.check_open()
        return trace(self, token_ids, hooks, steer)

    def lens(self, token_ids: Sequence[int], per_stream: bool = True, steer: Steering = None) -> Lens:
        """What every stream, their mean and the head's merge of them would predict at every depth."""
        return compute_lens(self, token_ids, per_stream, steer)

    def attention(
        self, token_ids: Sequence[int], position: int = -1, steer: Steering = None
    ) -> list[AttentionReadout]:
        """Where one token's attention goes, layer by layer: single tokens, compressed blocks, the sink."""
        return attention(self, token_ids, position, steer)

    @property
    def modules(self) -> NamedVectors:
        """Named vectors that edits may refer to."""
        return self._steering.modules

    @contextmanager
    def steering(self, *edits: Any) -> Iterator[None]:
        """A block in which every request carries these edits too."""
        vectors, features = split_edits(edits)
        with self.saes.for_all(features), self._steering.for_all(vectors or ()):
            yield

    def attach(
        self, name: str, sae: Any, kind: str = "delta", features: Any = None, replace: bool = False
    ) -> Attachment:
        """Make a dictionary (an `Sae`, several, or the path of its files) known by a name, whole or not at all.

        `kind` "delta": features are changed, everything else of a row stays; "full": rows may be replaced by their
        reconstruction. Of `features`, if given, alone may be set. In a `with` block it is detached at the end."""
        return self.saes.attach(name, sae, kind, features, replace)

    def detach(self, name: str, drain: bool = False) -> None:
        """Forget a dictionary. Refused while running requests use it, unless `drain`: then they finish on it."""
        self.saes.detach(name, drain)

    def features(
        self,
        prompt: Prompt,
        name: str,
        k: int = 10,
        at: tuple[str, int] | None = None,
        steer: Steering = None,
    ) -> list[list[Feature]]:
        """The k largest live features of every token of a text, read with an attached dictionary."""
        self._core.check_open()
        return features(self, prompt, name, k, at, steer)

    def resolve(
        self, steer: Steering, ids: Sequence[int], max_tokens: int
    ) -> tuple[tuple[Edit, ...], tuple[Reservation, ...]]:
        """Everything done to one request, resolved, and what it holds while it runs beside rows of tables."""
        vectors, features = split_edits(steer)
        sets = self.saes.edits(features, ids, max_tokens)
        return (*self._steering.edits(vectors, ids, max_tokens), *sets), self.saes.holdings(sets)

    def edits_from_json(self, fields: Mapping[str, Any]) -> list[Any]:
        """Edits of request fields: `interventions`, or `steering_vectors` and its kin. Refusals name the field."""
        return self._steering.from_wire(fields)

    @property
    def runs(self) -> dict[str, Mapping[Address, CapturedRows]]:
        """Captured rows by name, `engine.runs["clean"] = output.acts`, for patches that name a run."""
        return self._steering.runs

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        capture: Captures = None,
        steer: Steering = None,
        signals: Any = None,
        baseline: bool = False,
        **sampling: Any,
    ):
        """An `Output` for one prompt, a list for a list; with `n` > 1 a list of outputs takes each one's place.

        `signals` names small numbers to keep of every token (`hooks/signals.py`); with `baseline` every answer brings
        its unsteered twin, from the same seed and the same batch, as `output.baseline`."""
        return self._answer(prompts, sampling, capture, steer, signals=signals, baseline=baseline)

    def _answer(
        self,
        prompts: Any,
        sampling: dict[str, Any],
        capture: Captures,
        steer: Steering,
        thinking: bool | None = None,
        signals: Any = None,
        baseline: bool = False,
    ):
        """`thinking` is None for plain text, else the answer is read as a chat's."""
        single = is_single(prompts)
        given = [prompts] if single else list(prompts)
        if not given:
            raise PromptError(
                "the list of prompts is empty. Pass a text, a list of token ids, or a list of those."
            )
        captures = per_prompt(capture, len(given))
        steers = per_prompt_edits(steer, len(given))
        marks = [""] if single else [f"-{place}" for place in range(len(given))]
        if baseline and sampling.get("seed") is None:
            sampling = {**sampling, "seed": seed_for(SamplingOptions()) % 2**63}  # both twins draw from it
        requests = [
            self._requests(prompt, sampling, wish, edits, thinking, mark, signals=signals)
            for prompt, wish, edits, mark in zip(given, captures, steers, marks)
        ]
        twins = (
            [self._requests(p, sampling, None, None, thinking, signals=signals) for p in given]
            if baseline
            else []
        )
        answers = [self._finish(choices) for choices in self._run([*requests, *twins])]
        for steered, plain in zip(answers, answers[len(requests) :]):
            for output, twin in zip(steered, plain):
                output.baseline = twin
        answers = answers[: len(requests)]
        outputs = [choices[0] if len(choices) == 1 else choices for choices in answers]
        return outputs[0] if single else outputs

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt token ids of a conversation, ready for an answer."""
        return encode_chat(
            messages,
            self.tokenizer,
            self._literals,
            thinking=thinking,
            effort=effort,
            tools=tools,
            response_format=response_format,
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        capture: Captures = None,
        steer: Steering = None,
        signals: Any = None,
        baseline: bool = False,
        **sampling: Any,
    ):
        """`generate` through the V4 chat encoding; `output.message` holds reasoning, content and tool calls apart."""
        prompt = self.encode_chat(messages, thinking=thinking, effort=effort, tools=tools)
        return self._answer(prompt, sampling, capture, steer, thinking, signals, baseline)

    def stream(
        self, prompt: Prompt, *, capture: Captures = None, steer: Steering = None, **sampling: Any
    ) -> Stream:
        """Token events as they come; the last one carries the finish reason. Closing the iterator cancels.

        `stream.output` is the whole answer once it has ended, or what there was of it when it was closed."""
        request = self._single_request(prompt, sampling, capture, steer)
        return Stream(request, self._events(request), self._core.cancel)

    async def astream(
        self, prompt: Prompt, *, capture: Captures = None, steer: Steering = None, **sampling: Any
    ) -> AsyncIterator[TokenEvent]:
        """`stream` for asyncio; other tasks run while a step computes."""
        request = self._single_request(prompt, sampling, capture, steer)
        self._core.submit(request)
        try:
            while True:
                await asyncio.to_thread(self._core.drive, request)
                while request.events:
                    event = request.events.popleft()
                    yield event
                    if event.finish_reason is not None:
                        return
        finally:
            self._core.abandon(request)
            self._core.read_notes()

    @property
    def projections(self) -> Projections:
        """Matrices by name that captures may multiply rows with: `engine.projections["probe"] = matrix`."""
        return self._capture_planner.rules.projections

    @property
    def capture_max_request_bytes(self) -> int | None:
        """What the captures of one request may store; None for no limit."""
        return self._capture_planner.rules.max_request_bytes

    @capture_max_request_bytes.setter
    def capture_max_request_bytes(self, limit: int | None) -> None:
        self._capture_planner.rules.max_request_bytes = limit

    @property
    def capture_inline_max_bytes(self) -> int | None:
        """What the rows in `output.acts` may take; None for no limit but the one above."""
        return self._capture_planner.rules.max_inline_bytes

    @capture_inline_max_bytes.setter
    def capture_inline_max_bytes(self, limit: int | None) -> None:
        self._capture_planner.rules.max_inline_bytes = limit

    @property
    def capture_rules(self) -> CaptureRules:
        """Limits and matrices together, for another desk that goes by the same."""
        return self._capture_planner.rules

    def estimate(
        self, capture: CaptureRequestSpec, prompt: Prompt, max_tokens: int = 1
    ) -> dict[str, Estimate]:
        """What a capture would store at most, by consumer, without running anything."""
        return self._capture_planner.estimate(capture, tuple(self.prompt_ids(prompt)), max_tokens)

    def add_consumer(self, name: str, consumer: Consumer) -> None:
        """Let requests send captured rows to `consumer`: `capture={name: {"hooks": …}}`. It is shut down with the
        engine."""
        self._capture_planner.add_consumer(name, consumer)

    def stream_acts(
        self, texts: Iterable[Prompt], capture: Capture, batch_rows: int = 8192
    ) -> Iterator[ActBatch]:
        """Activation rows of many texts in batches of `batch_rows`, in order, in bounded memory."""
        return feed(self, texts, capture, batch_rows)

    @property
    def max_requests(self) -> int:
        """How many requests run at once."""
        return self._core.scheduler.slots.size

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the bits of a row besides the weights and the text."""
        numerics = self.model.numerics
        scheduler = self._core.scheduler
        return {
            "device": self.model.embed.device.type,
            "dtype": dtype_name(numerics.dtype),
            "numerics": "released" if numerics.released else "plain",
            "kernels": numerics.kernels.name,
            "batch_invariant": scheduler.invariant,
            "max_requests": self.max_requests,
            "max_batch_tokens": scheduler.max_batch_tokens,
            "steering": self._steering.digest(),
            "saes": self.saes.digest(),
        }

    @property
    def reuse(self) -> dict[str, Any]:
        """What was not computed twice and what was guessed, since the engine was loaded."""
        return self._core.reuse()

    @property
    def placement(self) -> dict[str, Any] | None:
        """Experts on the device, the share of reads they caught, how many have moved; None where all lie together."""
        return None if self._core.placement is None else self._core.placement.report()

    def submit_prompt(
        self, prompt: Prompt, capture: Capture, planner: CapturePlanner | None = None
    ) -> Request:
        """Queue a prompt for its activations alone; they go through `planner` when it is not this engine's own."""
        request = self._single_request(prompt, {"max_tokens": 1, "temperature": 0}, capture, planner=planner)
        self._core.submit(request)
        return request

    def wait_for_acts(self, request: Request) -> Mapping[Address, CapturedRows]:
        """Drive the engine until a submitted prompt has run; its captured rows."""
        self.wait(request)
        return Output.of(request).acts

    def wait(self, request: Request) -> None:
        """Drive the engine until a submitted prompt has run."""
        while not request.done:
            request.events.clear()
            self._core.drive(request)
        if request.error is not None:
            raise request.error

    def requests(
        self,
        prompt: Prompt,
        *,
        capture: Captures = None,
        steer: Steering = None,
        thinking: bool | None = None,
        mask: Callable[[], TokenMask] | None = None,
        mark: str = "",
        signals: Any = None,
        **sampling: Any,
    ) -> list[Request]:
        """One checked request per choice, for a `driver` to run; `thinking` is None for plain text.

        `mask` makes what each choice may say: the tokens it allows next. `mark` ends the names of captures."""
        made = self._requests(
            prompt, sampling, per_prompt(capture, 1)[0], steer, thinking, mark, signals=signals
        )
        for request in made:
            request.mask = None if mask is None else mask()
        return made

    def driver(self, deliver: Callable[[list[RequestOutput]], None]) -> Driver:
        """A thread that steps for everybody from now on and tells `deliver` what came of it."""
        return Driver(self._core, deliver)

    def cancel(self, request: Request) -> None:
        """End a request before the next step; safe in a finalizer."""
        self._core.abandon(request)

    def close(self) -> None:
        """End every running request and refuse new ones; captures are finished and synced."""
        self._core.close()
        self._capture_planner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _events(self, request: Request) -> Generator[TokenEvent, None, None]:
        self._core.submit(request)
        try:
            while True:
                self._core.drive(request)
                while request.events:
                    event = request.events.popleft()
                    yield event
                    if event.finish_reason is not None:
                        return
        finally:
            self._core.abandon(request)

    def _run(self, requests: list[list[Request]]) -> list[list[Request]]:
        everyone = [request for choices in requests for request in choices]
        try:
            for request in everyone:
                self._core.submit(request)
            for request in everyone:
                while not request.done:
                    request.events.clear()
                    self._core.drive(request)
        finally:  # a refusal or an interrupt leaves nothing behind
            for request in everyone:
                self._core.cancel(request)
        for request in everyone:
            if request.error is not None and not isinstance(request.error, BirkhoffError):
                raise request.error  # a defect of ours, not a property of the request
        return requests

    def _finish(self, choices: list[Request]) -> list[Output]:
        return [
            Output.of(each, each.sink.message() if isinstance(each.sink, ChatStream) else None)
            for each in choices
        ]

    def _single_request(
        self,
        prompt: Prompt,
        sampling: dict[str, Any],
        capture: Captures,
        steer: Steering = None,
        planner: CapturePlanner | None = None,
    ) -> Request:
        if not is_single(prompt):
            raise PromptError(
                "stream takes one prompt: a text or a list of token ids. Start one stream per prompt."
            )
        edits = per_prompt_edits(steer, 1)[0]
        requests = self._requests(prompt, sampling, per_prompt(capture, 1)[0], edits, planner=planner)
        if len(requests) > 1:
            raise OptionError("n is more than 1, but a stream has one answer. Start one stream per choice.")
        return requests[0]

    def _requests(
        self,
        prompt: Prompt,
        sampling: dict[str, Any],
        capture: CaptureRequestSpec | None,
        steer: Steering = None,
        thinking: bool | None = None,
        mark: str = "",
        planner: CapturePlanner | None = None,
        signals: Any = None,
    ) -> list[Request]:
        """One request per choice of one prompt; `mark` tells the captures of several prompts apart."""
        context = check_name(sampling.get("context"))
        options = SamplingOptions.from_kwargs(
            **{name: sampling[name] for name in sampling if name != "context"}
        )
        options.check_vocabulary(self.config.vocab_size)
        ids = tuple(self.prompt_ids(prompt))
        room = room_for(ids, self.max_context)
        wanted = (
            options.max_tokens if sampling.get("max_tokens") is not None else min(options.max_tokens, room)
        )
        if options.stop and self._tokenizer is None:
            self.tokenizer  # noqa: B018  raises the refusal that names the missing file
        seed = seed_for(options)
        wishes = () if signals is None else check_signals(signals, self.modules, self.config.hidden_size)

        def plan(choice: int) -> Plan | None:
            tail = mark if options.n == 1 else f"{mark}-{choice}"
            edits, holdings = self.resolve(steer, ids, wanted)
            table = self._steering.table(edits)
            if capture is None and not wishes:
                return Plan(edits=edits, holdings=holdings, table=table) if edits else None
            made = (
                Plan()
                if capture is None
                else (planner or self._capture_planner).plan(capture, ids, wanted, tail)
            )
            told = signal_jobs(self.model, wishes, self.modules) if wishes else ()
            return replace(made, edits=edits, holdings=holdings, table=table, jobs=(*made.jobs, *told))

        def made(choice: int) -> Request:
            own = seed if choice == 0 else seed_for(SamplingOptions(seed=seed % 2**63), choice)
            ends = frozenset(self.config.eos_token_ids)
            sink = self._sink(options, thinking)
            return Request(ids, options, wanted, own, ends, sink, plan(choice), context=context)

        return [made(choice) for choice in range(options.n)]

    def _sink(self, options: SamplingOptions, thinking: bool | None) -> TextStream | ChatStream | None:
        if self._tokenizer is None:
            return None
        if thinking is None:
            return TextStream(self._tokenizer, options.stop, min_tokens=options.min_tokens)
        return ChatStream(self._tokenizer, options.stop, thinking=thinking, min_tokens=options.min_tokens)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The token ids that a prompt is run as: a text is encoded behind the begin-of-text token."""
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty. Pass some text or a list of token ids.")
            bos = [] if self.config.bos_token_id is None else [self.config.bos_token_id]
            return bos + self.tokenizer.encode(prompt)
        return check_ids(prompt, self.config)
