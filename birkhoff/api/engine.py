"""`Engine`: generate, stream, trace, capture and steer with one loaded model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, cast, overload

from birkhoff.analysis.block_signals import signal_jobs
from birkhoff.analysis.gradients import GradientScope
from birkhoff.analysis.run_manifest import model_digest
from birkhoff.api.analyses import Analyses
from birkhoff.api.answer_form import AnswerForm
from birkhoff.api.call_sampling import CallSampling, ChatKwargs, GenerateKwargs
from birkhoff.api.capture_limits import CaptureLimits
from birkhoff.api.driver import Driver, RequestOutput
from birkhoff.api.engine_html import engine_html
from birkhoff.api.options import signature_of
from birkhoff.api.peer_names import PEER_METHODS
from birkhoff.api.prompts import Captures, per_prompt
from birkhoff.capture.planner import CapturePlanner, CaptureRequestSpec
from birkhoff.capture.spec.request import Capture
from birkhoff.config import ModelConfig
from birkhoff.dtype_names import dtype_name
from birkhoff.engine.language_model import LanguageModel
from birkhoff.engine.request import Request, TokenEvent, TokenMask
from birkhoff.engine.request_loop import RequestLoop
from birkhoff.engine.sampler import seed_for
from birkhoff.engine.sampling_params import SamplingKwargs, SamplingParams
from birkhoff.errors import (
    BirkhoffError,
    OptionError,
    PromptError,
    TextUnavailable,
    UnsupportedModel,
    did_you_mean,
)
from birkhoff.hooks.plan import Edit, Plan, SiteRows
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.signals import check_signals
from birkhoff.hooks.site_names import Address
from birkhoff.model.transformer import Transformer
from birkhoff.output import Output, Stream
from birkhoff.planning.request_planner import RequestPlanner
from birkhoff.sae.feature_edits import SaeReconstruct, SaeSet
from birkhoff.sae.resolver import Attachment, split_edits
from birkhoff.steering.modules import NamedVectors
from birkhoff.steering.request_edit import RequestEdit
from birkhoff.steering.resolver import Steering, per_prompt_edits
from birkhoff.steering.tiers import WireEdit
from birkhoff.text.chat_format import AnswerOptions, ChatFormat, Tools
from birkhoff.text.output_stream import ChatStream
from birkhoff.text.prompts import Prompt, check_ids, check_length, is_messages, is_single, room_for
from birkhoff.text.tokenizer import Tokenizer, plain_ids

PLAIN_TEXT = AnswerForm()


class Engine(Analyses, CaptureLimits):
    """A loaded model. A context manager: leaving the `with` block closes it."""

    def __init__(
        self,
        core: RequestLoop,
        tokenizer: Tokenizer | None,
        chat: ChatFormat | None,
        name: str = "",
        capture_root: str | Path | None = None,
        planner: RequestPlanner | None = None,
        **capture_queues: Any,
    ):
        """`capture_queues` are options of the capture `Dispatcher`. An engine that runs plans elsewhere has a `planner`
        of its own."""
        self._core = core
        self._tokenizer = tokenizer
        self._chat = chat
        self.name = name
        self._digest: str | None = None  # of the weights, computed when first needed
        self._planner = planner or RequestPlanner(
            self.schema,
            self.config.num_hidden_layers,
            name,
            self.model.device,
            identity=self.identity,
            capture_root=capture_root,
            **capture_queues,
        )
        self._capture_planner = self._planner.captures
        self._steering = self._planner.steering
        self._texts: list[str] | None = None
        self._steering.token_texts = self._token_texts if tokenizer is not None else None
        self._steering.pieces = None if tokenizer is None else tokenizer.piece
        self.saes = self._planner.saes
        self.gradients = GradientScope()

    def _token_texts(self) -> list[str]:
        """The text of every token id, decoded once."""
        if self._texts is None:
            self._texts = [self.tokenizer.decode([token]) for token in range(self.tokenizer.vocab_size)]
        return self._texts

    @property
    def model(self) -> LanguageModel:
        """The differentiable model itself, for gradients and attribution: `engine.model(token_ids)`. A `Transformer`
        for DeepSeek-V4, an `HfModel` for a model that runs through Transformers."""
        return self._core.model

    @property
    def v4_model(self) -> Transformer:
        """The model, if it is DeepSeek-V4; otherwise raises `UnsupportedModel`."""
        model = self._core.model
        if not isinstance(model, Transformer):
            raise UnsupportedModel(
                f"{self.name} is no DeepSeek-V4 of the backend birkhoff, whose mixers and attention are needed here. "
                f"Its hooks are {', '.join(self.schema)}."
            )
        return model

    @property
    def num_streams(self) -> int | None:
        """Residual streams of DeepSeek-V4; None for an ordinary model, which has one residual."""
        streams = self.schema.get("mhc_streams_final")
        return None if streams is None else streams.logical_shape[0]

    def identity(self) -> tuple[str, str]:
        """The model's name and a 128-bit digest of its weights."""
        if self._digest is None:
            self._digest = model_digest(self.model)
        return self.name, self._digest

    @property
    def config(self) -> ModelConfig:
        return self._core.model.config

    @property
    def max_context(self) -> int:
        return self._core.max_context

    @property
    def schema(self) -> dict[str, HookSchema]:
        return self._core.model.schema

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise TextUnavailable(
                "this checkpoint has no tokenizer.json, so text cannot be encoded. Pass token ids, "
                "or put the model's tokenizer.json into its directory."
            )
        return self._tokenizer

    @property
    def modules(self) -> NamedVectors:
        """Named steering vectors that edits can refer to."""
        return self._steering.modules

    @contextmanager
    def steering(self, *edits: Any) -> Iterator[None]:
        """Context manager: every request submitted inside the block gets these edits too."""
        vectors, features = split_edits(edits)
        with self.saes.for_all(features), self._steering.for_all(vectors or ()):
            yield

    def attach(
        self, name: str, sae: Any, kind: str = "delta", features: Any = None, replace: bool = False
    ) -> Attachment:
        """Register an SAE under a name: an `Sae`, several of them, or the path of its files.

        `kind` "delta" changes single features and keeps the rest of a row; "full" allows rows to be replaced by their
        reconstruction. `features` limits which features may be set. Used as a context manager, the returned attachment
        detaches at the end of the block."""
        self.check_open()
        return self.saes.attach(name, sae, kind, features, replace)

    def detach(self, name: str, drain: bool = False) -> None:
        """Remove an SAE. Raises `SaeBusy` while running requests use it, unless `drain`, which lets them finish."""
        self.saes.detach(name, drain)

    def resolve(self, steer: Steering, ids: Sequence[int], max_tokens: int) -> tuple[Edit, ...]:
        """The edits of one prompt, global ones included, resolved against this model. Immutable: choices share them."""
        return self._planner.edits(steer, ids, max_tokens)

    def edits_from_json(self, fields: Mapping[str, Any]) -> list[RequestEdit | SaeSet | SaeReconstruct]:
        """Parse and check the edits of request fields: `interventions`, `steering_vectors` …; errors name the field."""
        return self._steering.from_wire(fields)

    def request_edits_from_json(self, fields: Mapping[str, Any]) -> list[WireEdit | SaeSet | SaeReconstruct]:
        """Like `edits_from_json`, for `requests`: edits are checked when the request resolves them, and not twice."""
        return self._steering.parse_wire(fields)

    def check_edits(self, edits: Sequence[WireEdit]) -> None:
        """Check vector edits of request fields against this model, as `edits_from_json` does."""
        self._steering.check(edits)

    @property
    def runs(self) -> dict[str, Mapping[Address, SiteRows]]:
        """Captured rows by name, for patches that name a run: `engine.runs["clean"] = output.acts`."""
        return self._steering.runs

    @overload
    def generate(self, prompts: Prompt, **options: Unpack[GenerateKwargs]) -> Output: ...  # type: ignore[overload-overlap]  # a text is a sequence of texts
    @overload
    def generate(self, prompts: Sequence[Prompt], **options: Unpack[GenerateKwargs]) -> list[Output]: ...
    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self, prompts: Prompt, *, n: int | None, **options: Unpack[GenerateKwargs]
    ) -> Output | list[Output]: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], *, n: int | None, **options: Unpack[GenerateKwargs]
    ) -> list[Output] | list[list[Output]]: ...
    @signature_of(SamplingParams)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        params: SamplingParams | None = None,
        capture: Captures = None,
        steer: Steering = None,
        signals: Any = None,
        baseline: bool = False,
        **sampling: Unpack[SamplingKwargs],
    ) -> Output | list[Output] | list[list[Output]]:
        """Generate text after each prompt.

        Returns an `Output` for one prompt and a list for a list of prompts; with `n` > 1 each output becomes a list of
        `n`. Sampling keywords (docs/options.md) override `params`. `capture` selects activations to keep, `steer` is a
        list of edits; both may be given per prompt. `signals` names small per-token values to keep
        (`hooks/signals.py`). With `baseline` every output also has its unsteered twin, from the same seed and batch, as
        `output.baseline`."""
        resolved = CallSampling.of(params, sampling)
        outputs: Output | list[Output] | list[list[Output]] = self._generate(
            prompts, resolved, capture, steer, None, signals, baseline
        )
        return outputs

    def _generate(
        self,
        prompts: Any,
        sampling: CallSampling,
        capture: Captures,
        steer: Steering,
        thinking: bool | None,
        signals: Any,
        baseline: bool,
        tools: Tools = None,
    ) -> Any:
        """`thinking` is None for plain text; otherwise the output is parsed as a chat message."""
        single = is_single(prompts)
        prompts = [prompts] if single else list(prompts)
        if not prompts:
            raise PromptError(
                "the list of prompts is empty. Pass a text, token ids, chat messages, or a list of those."
            )
        captures = per_prompt(capture, len(prompts))
        steers = per_prompt_edits(steer, len(prompts))
        suffixes = [""] if single else [f"-{index}" for index in range(len(prompts))]
        if baseline and sampling.params.seed is None:  # the twins share one seed
            seed = seed_for(sampling.params) % 2**63
            sampling = replace(sampling, params=replace(sampling.params, seed=seed))
        form = AnswerForm(thinking, tools)
        groups = [
            self._requests(prompt, sampling, spec, edits, suffix, signals=signals, form=form)
            for prompt, spec, edits, suffix in zip(prompts, captures, steers, suffixes)
        ]
        twins = []
        if baseline:
            twins = [self._requests(each, sampling, None, signals=signals, form=form) for each in prompts]
        self._run([request for group in [*groups, *twins] for request in group])
        answers = [[_output(request) for request in group] for group in groups]
        for outputs, group in zip(answers, twins):
            for output, twin in zip(outputs, group):
                output.baseline = _output(twin)
        results = [outputs[0] if len(outputs) == 1 else outputs for outputs in answers]
        return results[0] if single else results

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: Tools = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Encode a conversation with the model's chat format; returns the token ids of the prompt."""
        return self.chat_format.encode(
            messages, thinking=thinking, effort=effort, tools=tools, response_format=response_format
        )

    def chat_stream(self, stops: Sequence[str] = (), **options: Unpack[AnswerOptions]) -> ChatStream:
        """A parser of one answer in the model's chat format."""
        return self.chat_format.stream(stops, **options)

    @property
    def chat_abilities(self) -> dict[str, bool]:
        """What the chat format can do: `chat` at all, call `tools`, begin with `reasoning`."""
        chat = self._chat
        return {
            "chat": chat is not None,
            "tools": chat is not None and chat.tools,
            "reasoning": chat is not None and chat.reasons,
        }

    @property
    def chat_format(self) -> ChatFormat:
        if self._chat is None:
            self.tokenizer  # noqa: B018  raises the error that names the missing file
            raise TextUnavailable(
                f"{self.name} has no chat template, so it cannot be talked to. Use generate with a plain prompt."
            )
        return self._chat

    @overload
    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatKwargs]) -> Output: ...
    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, n: int | None, **options: Unpack[ChatKwargs]
    ) -> Output | list[Output]: ...
    @signature_of(SamplingParams)
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: Tools = None,
        params: SamplingParams | None = None,
        capture: Captures = None,
        steer: Steering = None,
        signals: Any = None,
        baseline: bool = False,
        **sampling: Unpack[SamplingKwargs],
    ) -> Output | list[Output]:
        """`generate` through the model's chat format; `output.message` separates reasoning, content and tool calls."""
        resolved = CallSampling.of(params, sampling)
        prompt = self.encode_chat(messages, thinking=thinking, effort=effort, tools=tools)
        outputs: Output | list[Output] = self._generate(
            prompt, resolved, capture, steer, thinking, signals, baseline, tools
        )
        return outputs

    @signature_of(SamplingParams)
    def stream(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        capture: Captures = None,
        steer: Steering = None,
        **sampling: Unpack[SamplingKwargs],
    ) -> Stream:
        """Iterate over token events as they are generated; the last one carries the finish reason.

        Closing the iterator cancels the request. `stream.output` is the complete `Output` after the last event, or the
        partial one after closing."""
        request = self._single_request(prompt, CallSampling.of(params, sampling), capture, steer)
        return Stream(request, self._events(request), self._core.cancel)

    @signature_of(SamplingParams)
    async def astream(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        capture: Captures = None,
        steer: Steering = None,
        **sampling: Unpack[SamplingKwargs],
    ) -> AsyncIterator[TokenEvent]:
        """`stream` for asyncio; the event loop runs other tasks while a step computes."""
        request = self._single_request(prompt, CallSampling.of(params, sampling), capture, steer)
        self._core.submit(request)
        try:
            while True:
                await asyncio.to_thread(self._core.step_until_output, request)
                while request.events:
                    event = request.events.popleft()
                    yield event
                    if event.finish_reason is not None:
                        return
        finally:
            self._core.request_cancel(request)
            self._core.process_cancellations()

    @property
    def max_requests(self) -> int:
        """Maximum number of requests that run at once."""
        return self._core.max_requests

    @property
    def settings(self) -> dict[str, Any]:
        """Everything besides weights and text that determines the bits of an activation row."""
        return {
            "device": self.model.device.type,
            "dtype": dtype_name(self.model.dtype),
            **self.model.settings,
            **self._core.settings,
            "steering": self._steering.digest(),
            "saes": self.saes.digest(),
        }

    @property
    def reuse(self) -> dict[str, Any]:
        """Statistics of the prefix cache and of speculation since the engine was loaded."""
        return self._core.reuse()

    @property
    def placement(self) -> dict[str, Any] | None:
        """Expert placement statistics: experts on the device, hit rate, moves. None when experts are not divided."""
        return None if self._core.placement is None else self._core.placement.report()

    def submit_prompt(
        self, prompt: Prompt, capture: Capture, planner: CapturePlanner | None = None
    ) -> Request:
        """Queue a prompt for its activations only. `planner` replaces the engine's own capture planner."""
        sampling = CallSampling.of(SamplingParams(max_tokens=1, temperature=0), {})
        request = self._single_request(prompt, sampling, capture, planner=planner)
        self._core.submit(request)
        return request

    def wait_for_acts(self, request: Request) -> Mapping[Address, SiteRows]:
        """Step the engine until a submitted prompt has finished; returns its captured rows."""
        self.wait(request)
        return Output.of(request).acts

    def wait(self, request: Request) -> None:
        """Step the engine until a submitted prompt has finished; raises the error that ended it."""
        self._core.step_until_done(request)
        if request.error is not None:
            raise request.error

    def requests(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        capture: Captures = None,
        steer: Steering = None,
        thinking: bool | None = None,
        mask: Callable[[], TokenMask] | None = None,
        mark: str = "",
        signals: Any = None,
        tools: Tools = None,
        forced_call: bool = False,
        prompt_only: bool = False,
        **sampling: Unpack[SamplingKwargs],
    ) -> list[Request]:
        """One checked request per choice, for a `driver` to run.

        `thinking` is None for plain text; calls of `tools` are parsed out of a chat. `mask` makes the token mask of a
        choice, with `forced_call` that of calls alone; `mark` ends names of captures. With `prompt_only` the prompt is
        computed and no token is sampled: the prompt may fill the context, and `max_tokens` has no effect."""
        resolved = CallSampling.of(params, sampling)
        form = AnswerForm(thinking, tools, forced_call, prompt_only)
        requests = self._requests(
            prompt, resolved, per_prompt(capture, 1)[0], steer, mark, signals=signals, form=form
        )
        for request in requests:
            request.mask = None if mask is None else mask()
        return requests

    def driver(self, deliver: Callable[[list[RequestOutput]], None]) -> Driver:
        """Start a thread that steps the engine and calls `deliver` with the outputs of each step."""
        return Driver(self._core, deliver)

    def cancel(self, request: Request) -> None:
        """End a request before the next step. Takes no lock, so it is safe in a finalizer."""
        self._core.request_cancel(request)

    def check_open(self) -> None:
        """Raise `EngineClosed` if the engine was closed."""
        self._core.check_open()

    def close(self) -> None:
        """Cancel all requests and refuse new ones; capture files are completed and synced."""
        self._core.close()
        self._planner.close()

    def __repr__(self) -> str:
        where = f"{dtype_name(self.model.dtype)} on {self.model.device}"
        return f"Engine({self.name}, {self.config.num_hidden_layers} layers, {where})"

    def _repr_html_(self) -> str:
        return engine_html(self)

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> NoReturn:
            here = PEER_METHODS.get(name)
            hint = f" Here it is {here}." if here else did_you_mean(name, dir(type(self)))
            raise AttributeError(f"'Engine' object has no attribute {name!r}.{hint}", name=name, obj=self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _events(self, request: Request) -> Generator[TokenEvent, None, None]:
        self._core.submit(request)
        try:
            while True:
                self._core.step_until_output(request)
                while request.events:
                    event = request.events.popleft()
                    yield event
                    if event.finish_reason is not None:
                        return
        finally:
            self._core.request_cancel(request)

    def _run(self, requests: list[Request]) -> None:
        """Run requests to their end. An error or an interrupt cancels all of them."""
        try:
            self._core.submit(*requests)
            for request in requests:
                self._core.step_until_done(request)
        finally:
            for request in requests:
                self._core.cancel(request)
        for request in requests:
            if request.error is not None and not isinstance(request.error, BirkhoffError):
                raise request.error  # a defect in this package, not a property of the request

    def _single_request(
        self,
        prompt: Prompt,
        sampling: CallSampling,
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
        sampling: CallSampling,
        capture: CaptureRequestSpec | None,
        steer: Steering = None,
        suffix: str = "",
        planner: CapturePlanner | None = None,
        signals: Any = None,
        form: AnswerForm = PLAIN_TEXT,
    ) -> list[Request]:
        """One request per choice of one prompt. `suffix` distinguishes the captures of several prompts."""
        params = sampling.params
        params.check_vocabulary(self.config.vocab_size)
        ids = tuple(self.prompt_ids(prompt))
        room = room_for(ids, self.max_context, form.prompt_only)
        max_tokens = params.max_tokens if sampling.max_tokens_given else min(params.max_tokens, room)
        max_tokens = 0 if form.prompt_only else max_tokens
        self._core.check_context(len(ids), max_tokens)
        if params.stop and self._tokenizer is None:
            self.tokenizer  # noqa: B018  raises the error that names the missing file
        seed = seed_for(params)
        if signals is not None:
            self.v4_model  # noqa: B018  signals summarise its streams
        names = () if signals is None else check_signals(signals, self.modules, self.config.hidden_size)
        edits = self.resolve(steer, ids, max_tokens)

        def plan(choice: int) -> Plan | None:
            tail = suffix if params.n == 1 else f"{suffix}-{choice}"
            measured = signal_jobs(self.v4_model, names, self.modules) if names else None
            return self._planner.plan(
                ids,
                max_tokens,
                edits,
                capture,
                tail,
                captures=planner,
                jobs=() if measured is None else measured.jobs,
                signals=None if measured is None else measured.signals,
            )

        def request(choice: int) -> Request:
            return Request(
                ids,
                params,
                max_tokens,
                seed if choice == 0 else seed_for(SamplingParams(seed=seed % 2**63), choice),
                frozenset(self.config.eos_token_ids),
                form.text_sink(params, self._tokenizer, self.chat_stream),
                plan(choice),
                context=params.context,
            )

        return [request(choice) for choice in range(params.n)]

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt: text is encoded after the begin-of-text token, chat messages with the model's chat
        format, and token ids are checked."""
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty. Pass some text or a list of token ids.")
            bos = [] if self.config.bos_token_id is None else [self.config.bos_token_id]
            check_length(len(prompt), self.tokenizer, self.config.max_position_embeddings)
            return bos + self.tokenizer.encode(prompt)
        if is_messages(prompt):
            return check_ids(self.encode_chat(cast(Sequence[Mapping[str, Any]], prompt)), self.config)
        return check_ids(prompt, self.config)

    def token_texts(self, token_ids: Sequence[int]) -> list[str] | None:
        """The text of each token, of a list or a tensor of ids; None for a model without a tokenizer."""
        tokenizer = self._tokenizer
        return None if tokenizer is None else [tokenizer.decode([token]) for token in plain_ids(token_ids)]


def _output(request: Request) -> Output:
    return Output.of(request, request.sink.message() if isinstance(request.sink, ChatStream) else None)
