"""`load` and the `Engine` it returns: the one place where the rooms meet.

Everything a user calls from Python is here, and everything here is thin: it checks what was asked, introduces text to
tokens and tokens to the engine, and hands back plain results. Options that are not built yet are refused by name.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence, Set
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch

from birkhoff.config import V4Config
from birkhoff.engine.engine import EngineCore, plan_cache
from birkhoff.engine.request import Request, TokenEvent
from birkhoff.engine.sampler import seed_for
from birkhoff.engine.sampling import SamplingOptions
from birkhoff.engine.warmup import compile_kernels
from birkhoff.errors import (
    BirkhoffError,
    CheckpointError,
    OptionError,
    PromptError,
    SiteError,
    TextUnavailable,
    TokenError,
    UnsupportedModel,
    quoted,
)
from birkhoff.hooks.schema import HookSchema, build_hook_schema
from birkhoff.hooks.sites import Site
from birkhoff.hooks.tap import EagerTap
from birkhoff.kernels import jit
from birkhoff.kernels.select import Choice, select
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer
from birkhoff.output import Output, Stream, Trace
from birkhoff.text.chat import encode_chat
from birkhoff.text.literals import Literals, load_literals
from birkhoff.text.parse import parse_completion
from birkhoff.text.stop import StopMatcher
from birkhoff.text.stream import IncrementalDecoder
from birkhoff.text.tokenizer import Tokenizer
from birkhoff.weights.checkpoint import open_checkpoint
from birkhoff.weights.load import load_into

Prompt = str | Sequence[int]
EMBEDDED = Path(__file__).parent / "models"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ARRAYS = (torch.Tensor, np.ndarray)


def load(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    numerics: str = "plain",
    kernels: str = "auto",
    experts: str | int = "auto",
    max_requests: int = 8,
    max_batch_tokens: int = 2048,
    max_context: int | None = None,
    cache_bytes: int | None = None,
    batch_invariant: bool = False,
    prefix_cache: str | bool = "auto",
    speculative: str | bool = "auto",
    capture_root: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Open a checkpoint and make it ready to answer. See the package's documentation for every option.

    `progress` is called with (bytes read, bytes in all) while weights are loaded."""
    _refuse_unbuilt(experts, prefix_cache, speculative, capture_root)
    _one_of("numerics", numerics, ("plain", "released"))
    _one_of("dtype", dtype, ("auto", *_DTYPES))
    for name, value in (("max_requests", max_requests), ("max_batch_tokens", max_batch_tokens)):
        _whole(name, value)
    for name, optional in (("max_context", max_context), ("cache_bytes", cache_bytes)):
        if optional is not None:
            _whole(name, optional)
    if not isinstance(batch_invariant, bool):
        raise OptionError(f"batch_invariant is {quoted(batch_invariant)}, expected True or False.")
    if max_batch_tokens <= max_requests:
        raise OptionError(
            f"max_batch_tokens is {max_batch_tokens}, expected more than max_requests ({max_requests}): "
            "every running request decodes one token a step."
        )
    path = _resolve(model)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    if max_context is not None and max_context > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise OptionError(f"max_context is {max_context}, the model's limit is {limit}. Ask for that or less.")
    where = _device(device)
    compute = torch.float32 if dtype == "auto" and where.type == "cpu" else _DTYPES.get(dtype, torch.bfloat16)
    how = Numerics(compute, numerics == "released", select(_kernels(kernels, where)))
    with torch.device("meta"):
        network = Transformer(config, how, mtp=checkpoint.has_mtp)
    network = network.to_empty(device=where).eval()
    load_into(network.destinations(), checkpoint, progress=progress)
    network.fuse()
    if how.kernels.name == "cpu":
        seconds = compile_kernels()
        if seconds > 2:
            print(f"birkhoff: compiled CPU kernels in {seconds:.0f} s; they are kept for next time", file=sys.stderr)
    if cache_bytes is None:
        cache_bytes = _free_bytes(where) // 4
    pages, context = plan_cache(config, compute.itemsize, cache_bytes, max_requests, max_context)
    tokenizer = _tokenizer(path, config)
    core = EngineCore(
        network,
        max_requests=max_requests,
        max_context=context,
        num_pages=pages,
        max_batch_tokens=max_batch_tokens,
        batch_invariant=batch_invariant,
        device=where,
    )
    for notice in checkpoint.notices:
        print(f"birkhoff: {notice}", file=sys.stderr)
    print(
        f"birkhoff: {model} on {where}, {dtype_name(compute)}, {numerics} numerics, {how.kernels.name} kernels; "
        f"{max_requests} requests of up to {context} tokens, cache_bytes {cache_bytes}",
        file=sys.stderr,
    )
    return Engine(core, tokenizer, load_literals(path))


class Engine:
    """A loaded model that answers, traces and explains itself. Also a context manager."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer | None, literals: Literals):
        self._core, self._tokenizer, self._literals = core, tokenizer, literals

    @property
    def model(self) -> Transformer:
        """The differentiable model itself, for gradients and attribution: `engine.model(token_ids)`."""
        return self._core.model

    @property
    def config(self) -> V4Config:
        return self.model.config

    @property
    def max_context(self) -> int:
        return self._core.max_context

    @property
    def schema(self) -> dict[str, HookSchema]:
        c = self.config
        dtype = dtype_name(self.model.numerics.dtype)
        return build_hook_schema(c.hidden_size, dtype, c.hc_mult, c.n_routed_experts, c.num_experts_per_tok)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise TextUnavailable(
                "this checkpoint has no tokenizer.json, so text cannot be encoded. Pass token ids, "
                "or put the model's tokenizer.json into its directory."
            )
        return self._tokenizer

    def logits(self, token_ids: Sequence[int], steer: None = None) -> torch.Tensor:
        """Next-token logits at every position, float32 [T, vocab]."""
        _not_built("steer", steer)
        self._core.check_open()
        ids = torch.tensor(self._check_ids(token_ids), device=self.model.embed.device)
        with torch.no_grad():  # not inference mode: what is handed out can be trained on and written to
            return self.model(ids)

    def trace(self, token_ids: Sequence[int], hooks: str | Sequence[str] = "all", steer: None = None) -> Trace:
        """A plain forward pass that keeps every asked-for site."""
        _not_built("steer", steer)
        self._core.check_open()
        wanted = self._check_hooks(hooks)
        ids = torch.tensor(self._check_ids(token_ids), device=self.model.embed.device)
        kept: dict[tuple[str, int], torch.Tensor] = {}

        def keep(site: Site, layer: int, tensor: torch.Tensor) -> None:
            if site.name in wanted:
                kept[site.name, layer] = tensor.detach().clone()

        with torch.no_grad():
            logits = self.model(ids, EagerTap(seen=keep))
        return Trace(logits, kept)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, capture: None = None, steer: None = None, **sampling: Any
    ):
        """An `Output` for one prompt, a list for a list; with `n` > 1 a list of outputs takes each one's place."""
        _not_built("capture", capture)
        _not_built("steer", steer)
        single = _is_single(prompts)
        given = [prompts] if single else list(prompts)
        if not given:
            raise PromptError("the list of prompts is empty. Pass a text, a list of token ids, or a list of those.")
        requests = [self._requests(prompt, sampling) for prompt in given]  # type: ignore[arg-type]
        answers = [self._finish(choices) for choices in self._run(requests)]
        outputs = [choices[0] if len(choices) == 1 else choices for choices in answers]
        return outputs[0] if single else outputs

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Prompt token ids of a conversation, ready for an answer."""
        return encode_chat(messages, self.tokenizer, self._literals, thinking=thinking, effort=effort, tools=tools)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ):
        """`generate` through the V4 chat encoding; `output.message` holds reasoning, content and tool calls apart."""
        prompt = self.encode_chat(messages, thinking=thinking, effort=effort, tools=tools)
        answers = self.generate(prompt, **options)
        for output in answers if isinstance(answers, list) else [answers]:
            ids = output.token_ids
            output.message = parse_completion(ids, thinking=thinking, tokenizer=self.tokenizer, strict=False)
            output.text = output.message.content
        return answers

    def stream(self, prompt: Prompt, *, capture: None = None, steer: None = None, **sampling: Any) -> Stream:
        """Token events as they come; the last one carries the finish reason. Closing the iterator cancels.

        `stream.output` is the whole answer once it has ended, or what there was of it when it was closed."""
        _not_built("capture", capture)
        _not_built("steer", steer)
        request = self._single_request(prompt, sampling)
        return Stream(request, self._events(request), self._core.cancel)

    async def astream(
        self, prompt: Prompt, *, capture: None = None, steer: None = None, **sampling: Any
    ) -> AsyncIterator[TokenEvent]:
        """`stream` for asyncio; other tasks run while a step computes."""
        _not_built("capture", capture)
        _not_built("steer", steer)
        request = self._single_request(prompt, sampling)
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
            self._core.cancel(request)

    def close(self) -> None:
        """End every running request and refuse new ones."""
        self._core.close()

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
            self._core.cancel(request)

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
        return [Output.of(request) for request in choices]

    def _single_request(self, prompt: Prompt, sampling: dict[str, Any]) -> Request:
        if not _is_single(prompt):
            raise PromptError("stream takes one prompt: a text or a list of token ids. Start one stream per prompt.")
        requests = self._requests(prompt, sampling)
        if len(requests) > 1:
            raise OptionError("n is more than 1, but a stream has one answer. Start one stream per choice.")
        return requests[0]

    def _requests(self, prompt: Prompt, sampling: dict[str, Any]) -> list[Request]:
        """One request per choice of one prompt."""
        options = SamplingOptions.from_kwargs(**sampling)
        options.check_vocabulary(self.config.vocab_size)
        ids = tuple(self._prompt_ids(prompt))
        room = self.max_context - len(ids)
        if room < 1:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, the context holds {self.max_context} and an answer "
                "needs at least one. Shorten the prompt or load with a larger max_context."
            )
        wanted = options.max_tokens if sampling.get("max_tokens") is not None else min(options.max_tokens, room)
        if options.stop and self._tokenizer is None:
            self.tokenizer  # noqa: B018  raises the refusal that names the missing file
        seed = seed_for(options)
        return [
            Request(
                prompt_ids=ids,
                options=options,
                max_tokens=wanted,
                seed=seed if choice == 0 else seed_for(SamplingOptions(seed=seed % 2**63), choice),
                eos_ids=frozenset(self.config.eos_token_ids),
                sink=None if self._tokenizer is None else TextStream(self._tokenizer, options.stop, options.min_tokens),
            )
            for choice in range(options.n)
        ]

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty. Pass some text or a list of token ids.")
            bos = [] if self.config.bos_token_id is None else [self.config.bos_token_id]
            return bos + self.tokenizer.encode(prompt)
        return self._check_ids(prompt)

    def _check_ids(self, token_ids: Sequence[int]) -> list[int]:
        ids, last = _as_list(token_ids), self.config.vocab_size - 1
        if not ids:
            raise PromptError("the list of token ids is empty. Pass at least one id.")
        for place, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise TokenError(
                    f"token_ids[{place}] is {quoted(token)}, expected a whole number from 0 to {last}. "
                    "Text goes in as one string, or through engine.tokenizer.encode."
                )
            if not 0 <= int(token) <= last:
                raise TokenError(
                    f"token_ids[{place}] is {quoted(token)}, this model has ids 0..{last}. "
                    "Was the text encoded with another model's tokenizer?"
                )
        if len(ids) > self.config.max_position_embeddings:
            limit = self.config.max_position_embeddings
            raise PromptError(f"{len(ids)} tokens, the model's limit is {limit}. Shorten the text or cut it in parts.")
        return [int(token) for token in ids]

    def _check_hooks(self, hooks: str | Sequence[str]) -> set[str]:
        known = self.schema
        if hooks == "all":
            return set(known)
        names = [hooks] if isinstance(hooks, str) or not isinstance(hooks, (Sequence, Set)) else list(hooks)
        for hook in names:
            if not isinstance(hook, str) or hook not in known:
                raise SiteError(f"{quoted(hook)} is not a hook of this model. It has: {', '.join(sorted(known))}.")
        return set(names)


class TextStream:
    """Token ids to text for one request: whole characters only, stop strings taken out.

    The first `min_tokens` tokens cannot end an answer, so no stop string is looked for in their text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int = 0):
        self._decoder, self._matcher = IncrementalDecoder(tokenizer, skip_special=True), StopMatcher(stops)
        self._safe = min_tokens
        self.text = ""

    def feed(self, token_id: int) -> tuple[str, bool]:
        piece = self._decoder.feed(token_id)
        if self._safe:
            self._safe -= 1
        else:
            piece = self._matcher.feed(piece)
        self.text += piece
        return piece, self._matcher.matched is not None

    def finish(self) -> str:
        piece = self._matcher.feed(self._decoder.finish()) + self._matcher.finish()
        self.text += piece
        return piece


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, _ARRAYS) and prompts.ndim == 2:
        return False
    items = _as_list(prompts)
    return len(items) > 0 and not isinstance(items[0], (str, Sequence, *_ARRAYS))


def _as_list(values: Any) -> list[Any]:
    """A list, tuple, range, or array of one axis; bytes are numbers too, but never token ids."""
    if isinstance(values, _ARRAYS) and values.ndim == 1:
        return values.tolist()
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes, bytearray, memoryview)):
        return list(values)
    kind = f"an array of {values.ndim} axes" if isinstance(values, _ARRAYS) else f"a {type(values).__name__}"
    raise PromptError(
        f"{kind} was given where a list of token ids was expected. Text goes into generate, chat and stream as str "
        "(decode bytes first); elsewhere encode it with engine.tokenizer.encode."
    )


def _resolve(model: str | Path) -> Path:
    if not isinstance(model, (str, Path)):
        raise OptionError(f"model is {quoted(model)}, expected 'nano' or the path of a checkpoint directory.")
    if model == "nano":
        if not (EMBEDDED / "nano" / "config.json").is_file():
            raise CheckpointError(
                "the embedded model nano is not part of this installation. Install the package with "
                "its model files, or write a random one: birkhoff synth OUT --like nano"
            )
        return EMBEDDED / "nano"
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        raise UnsupportedModel(f"{path.name}: reading GGUF files is not built yet. Use a directory with safetensors.")
    if not path.is_dir():
        what = "a file" if path.exists() else "missing"
        raise CheckpointError(
            f"{model} is {what}; expected 'nano' or a directory with config.json and safetensors files. Check the path."
        )
    return path


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device if isinstance(device, (str, torch.device)) else "")
    except RuntimeError:
        where = torch.device("meta")
    if where.type not in ("cpu", "cuda"):
        raise OptionError(f"device is {quoted(device)}, expected 'auto', 'cpu' or 'cuda'.")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("device is 'cuda', but PyTorch sees no CUDA device here. Use device='cpu'.")
    return where


def _kernels(kernels: str, where: torch.device) -> Choice:
    _one_of("kernels", kernels, ("auto", "reference", "triton"))
    if kernels == "triton":
        raise OptionError("kernels='triton' is not built yet. Use 'auto' or 'reference'.")
    return "cpu" if kernels == "auto" and where.type == "cpu" and jit.AVAILABLE else "reference"


def _tokenizer(path: Path, config: V4Config) -> Tokenizer | None:
    file = path / "tokenizer.json"
    return Tokenizer.from_file(file, vocab_size=config.vocab_size) if file.is_file() else None


def _free_bytes(where: torch.device) -> int:
    if where.type == "cuda":
        return torch.cuda.mem_get_info(where)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 * 2**30


def _refuse_unbuilt(experts: object, prefix_cache: object, speculative: object, capture_root: object) -> None:
    if experts not in ("auto", "device"):
        raise OptionError(f"experts={experts!r} is not built yet: all experts live on the device. Use 'auto'.")
    for name, value in (("prefix_cache", prefix_cache), ("speculative", speculative)):
        if value not in ("auto", False):
            raise OptionError(f"{name}={value!r} is not built yet. Use 'auto' or False.")
    _not_built("capture_root", capture_root)


def _not_built(name: str, value: object) -> None:
    if value is not None:
        raise OptionError(f"{name} is not built yet. Leave it out.")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name} is {quoted(value)}, expected one of {', '.join(map(repr, allowed))}.")


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} is {quoted(value)}, expected a positive whole number.")
