"""Options of `birkhoff.load`, as one frozen dataclass.

`EngineOptions` is the single source of the keywords: the signature of `load`, the command-line help and
`docs/options.md` are made from its fields. Values are checked on construction, before any file is read. Checks that
need the checkpoint or the hardware (a context beyond the model's limit, a missing CUDA device) are part of `load`.

This module does not import PyTorch, so that the command line can list the options quickly.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from birkhoff.byte_size import parse_bytes
from birkhoff.engine.sampling_params import option
from birkhoff.errors import OptionError, did_you_mean, quoted
from birkhoff.option_checks import check_bool, check_choice, check_int

DRAFT_DEPTHS = (1, 2, 3)
BACKENDS = ("auto", "birkhoff", "transformers", "vllm")
# Options of our own model; a model that runs through another library refuses them.
OWN_ONLY = (
    "numerics kernels experts gpu_memory expert_counts experts_on background_experts prefix_cache "
    "speculative context_root context_bytes"
).split()
# Options of the backend vllm, and those of the others that it does not have.
VLLM_ONLY = ("hooks", "tensor_parallel_size", "pipeline_parallel_size", "vllm")
NOT_VLLM = (*(name for name in OWN_ONLY if name != "prefix_cache"), "device", "weights", "batch_invariant")
_AnyFunction = TypeVar("_AnyFunction", bound=Callable[..., Any])


class EngineKwargs(TypedDict, total=False):
    """The fields of `EngineOptions` as keywords."""

    backend: str
    device: str
    dtype: str
    numerics: str
    kernels: str
    weights: str
    experts: str | int | float
    gpu_memory: str | int | None
    expert_counts: str | Path | None
    experts_on: str
    background_experts: bool
    max_requests: int
    max_batch_tokens: int
    max_context: int | None
    cache_bytes: int | None
    batch_invariant: bool
    prefix_cache: str | bool
    speculative: str | bool | int
    capture_root: str | Path | None
    capture_overload_policy: str
    capture_dispatch_queue_size: int
    capture_spill_dir: str | Path | None
    capture_spill_max_bytes: int
    context_root: str | Path | None
    context_bytes: int
    hooks: Any
    tensor_parallel_size: int
    pipeline_parallel_size: int
    vllm: Any
    revision: str | None
    download: bool


@dataclass(frozen=True)
class EngineOptions:
    """Where and how a model runs, and how much memory it may use."""

    backend: str = option(
        "auto",
        "What runs the model: birkhoff (DeepSeek-V4), transformers (docs/models.md), vllm (docs/vllm.md), or auto: one "
        "of the first two, by the checkpoint.",
    )
    device: str = option("auto", "Device to run on: auto, cpu or cuda.")
    dtype: str = option(
        "auto", "Compute dtype: auto (float32 on CPU, bfloat16 on CUDA), float32 or bfloat16."
    )
    numerics: str = option("plain", "plain, or released: round activations as the released model does.")
    kernels: str = option("auto", "Kernel backend: auto, reference (slow, plain PyTorch) or triton.")
    weights: str = option(
        "auto",
        "auto: weights stay in the types in which they are stored where kernels can read them. packed: refuse to load "
        "otherwise. dense: dequantise them to the compute dtype.",
    )
    experts: str | int | float = option(
        "auto",
        "Routed experts kept on the GPU: auto (as many as fit), device (all), host (none), a share such as 0.5, "
        "or bytes such as 20GiB. The others stay in host memory. On a CPU: auto, device (all in memory), or mapped "
        "(they stay in their files; auto does so if they do not fit).",
    )
    gpu_memory: str | int | None = option(
        None, "GPU memory the whole model may use, such as 24GiB.", "what is free"
    )
    expert_counts: str | Path | None = option(
        None,
        "File of expert usage counts. It decides which experts start on the GPU and is rewritten on close.",
        "none",
    )
    experts_on: str = option(
        "gpu",
        "Where decode steps compute experts that are not on the GPU: gpu (read over the bus), cpu (beside the GPU), or "
        "auto (what decode steps timed at load show to be fastest, which may be a share on each side).",
    )
    background_experts: bool = option(
        False,
        "Serve while experts in host memory are still being read; a request waits for those that it needs.",
        "off",
    )
    max_requests: int = option(8, "Requests that run at once.")
    max_batch_tokens: int = option(2048, "Maximum tokens computed in one step; more than max_requests.")
    max_context: int | None = option(
        None, "Maximum tokens of a prompt and its answer together.", "what fits, up to the model's limit"
    )
    cache_bytes: int | None = option(
        None, "Bytes for the attention cache and the prefix cache.", "a quarter of the free memory"
    )
    batch_invariant: bool = option(
        False, "Make results independent of the other requests in a batch, bit for bit; slower.", "off"
    )
    prefix_cache: str | bool = option(
        "auto",
        "Reuse the cache of earlier prompts with the same beginning: auto, True or False.",
        "if it fits",
    )
    speculative: str | bool | int = option(
        "auto",
        "Draft tokens with the MTP block and verify them in the next step: auto (while it is faster), True, False, "
        "or 1 to 3 tokens ahead.",
        "while it is faster",
    )
    capture_root: str | Path | None = option(
        None, "Directory for captures that are written to files.", "none"
    )
    capture_overload_policy: str = option(
        "spill",
        "When a consumer of captured rows falls behind: spill to disk, block the engine, or drop rows and count them.",
    )
    capture_dispatch_queue_size: int = option(
        256, "Chunks of captured rows that wait in memory for a consumer."
    )
    capture_spill_dir: str | Path | None = option(
        None, "Directory for rows that wait on disk.", "the system's temporary directory"
    )
    capture_spill_max_bytes: int = option(
        4 << 30, "Maximum bytes of rows that wait on disk; then the engine waits.", "4 GiB"
    )
    context_root: str | Path | None = option(
        None, "Directory for cache pages of earlier prompts; a later process reuses them.", "none"
    )
    context_bytes: int = option(2**30, "Maximum bytes of files in context_root.", "1 GiB")
    hooks: Any = option(
        None,
        "Backend vllm: hooks to arm at start, as names separated by commas, or JSON of layers by name; none arms "
        "nothing.",
        "the residuals; all hooks of V4",
    )
    tensor_parallel_size: int = option(1, "Backend vllm: ranks that divide every layer.")
    pipeline_parallel_size: int = option(1, "Backend vllm: ranks that divide the layers among them.")
    vllm: Any = option(
        None, "Backend vllm: further arguments of its engine, as a mapping or its JSON.", "none"
    )
    revision: str | None = option(
        None, "Branch, tag or commit of a model named org/name; also written org/name@revision.", "main"
    )
    download: bool = option(
        False,
        "Download a model named org/name that is not in the hub cache; otherwise no network is used.",
        "off",
    )

    def __post_init__(self) -> None:
        device = str(self.device) if type(self.device).__name__ == "device" else self.device  # a torch.device
        if not isinstance(device, str) or not re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", device):
            raise OptionError(f"device is {quoted(self.device)}, expected 'auto', 'cpu' or 'cuda'.")
        object.__setattr__(self, "device", device)
        if type(self.dtype).__name__ == "dtype":  # torch.bfloat16
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        check_choice("backend", self.backend, BACKENDS)
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        check_choice("numerics", self.numerics, ("plain", "released"))
        check_choice("kernels", self.kernels, ("auto", "reference", "triton"))
        check_choice("capture_overload_policy", self.capture_overload_policy, ("spill", "block", "drop"))
        check_int("capture_dispatch_queue_size", self.capture_dispatch_queue_size)
        check_int("capture_spill_max_bytes", self.capture_spill_max_bytes, 0)
        check_choice("experts_on", self.experts_on, ("auto", "gpu", "cpu"))
        check_choice("weights", self.weights, ("auto", "packed", "dense"))
        for name in ("max_requests", "max_batch_tokens", "max_context", "cache_bytes", "context_bytes"):
            value = getattr(self, name)
            if value is not None or name not in ("max_context", "cache_bytes"):
                object.__setattr__(self, name, check_int(name, value))
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            object.__setattr__(self, name, check_int(name, getattr(self, name)))
        object.__setattr__(self, "vllm", _engine_arguments(self.vllm))
        check_bool("batch_invariant", self.batch_invariant)
        check_bool("download", self.download)
        check_bool("background_experts", self.background_experts)
        if self.background_experts and (self.experts_on != "gpu" or self.context_root is not None):
            raise OptionError(
                "background_experts is on together with experts_on or context_root, which need all experts at load. "
                "Leave one of them out."
            )
        if self.revision is not None and (not isinstance(self.revision, str) or not self.revision):
            raise OptionError(
                f"revision is {quoted(self.revision)}, expected a branch, tag or commit, or None."
            )
        if self.prefix_cache != "auto" and not isinstance(self.prefix_cache, bool):
            raise OptionError(f"prefix_cache is {quoted(self.prefix_cache)}, expected 'auto', True or False.")
        self.speculation(has_mtp=True)
        self.placement  # noqa: B018  parsing is the check
        for name in ("capture_root", "capture_spill_dir", "context_root"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, Path)):
                raise OptionError(f"{name} is {quoted(value)}, expected the path of a folder, or None.")
        if self.max_batch_tokens <= self.max_requests:
            raise OptionError(
                f"max_batch_tokens is {self.max_batch_tokens}, expected more than max_requests "
                f"({self.max_requests}): every running request decodes one token a step."
            )

    @classmethod
    def from_kwargs(cls, base: EngineOptions | None = None, /, **keywords: Any) -> EngineOptions:
        """Build from keywords that override `base`; an unknown keyword is a `TypeError` with the nearest name."""
        if base is not None and not isinstance(base, EngineOptions):
            raise OptionError(f"options is {quoted(base)}, expected a birkhoff.EngineOptions.")
        names = [each.name for each in fields(cls)]
        for name in keywords:
            if name not in names:
                hint = did_you_mean(name, names)
                raise TypeError(f"load() got an unexpected keyword argument {name!r}.{hint}")
        return cls(**keywords) if base is None else replace(base, **keywords)

    @property
    def placement(self) -> PlacementOptions:
        """`experts`, `gpu_memory` and `expert_counts`, parsed."""
        return parse_placement(self.experts, self.gpu_memory, self.expert_counts)

    def speculation(self, has_mtp: bool) -> SpeculationOptions:
        """`speculative`, parsed for a checkpoint with or without an MTP block."""
        return parse_speculation(self.speculative, has_mtp, self.batch_invariant)


@dataclass(frozen=True)
class SpeculationOptions:
    """`depth` draft tokens per step, 0 for none; `always` also when it is measured to be slower."""

    depth: int = 0
    always: bool = False

    def __str__(self) -> str:
        if not self.depth:
            return "no speculation"
        return f"speculation {self.depth} ahead" + ("" if self.always else " while it is faster")


def parse_speculation(
    speculative: str | bool | int, has_mtp: bool, batch_invariant: bool, drafter: str | None = None
) -> SpeculationOptions:
    """`"auto"`: one draft token while it is faster; True: always; 1 to 3: always, that many. `drafter` describes
    another drafter in the checkpoint, which is not run."""
    if not (speculative == "auto" or isinstance(speculative, bool) or speculative in DRAFT_DEPTHS):
        raise OptionError(f"speculative is {quoted(speculative)}, expected 'auto', True, False, 1, 2 or 3.")
    if speculative is False:
        return SpeculationOptions()
    reason = None
    if not has_mtp:
        reason = "this checkpoint has no MTP block to guess with"
        if drafter is not None:
            reason += f", but {drafter}"
    elif batch_invariant:
        reason = "batch_invariant computes every token by itself, and guesses are computed beside one"
    if speculative == "auto":
        return SpeculationOptions() if reason else SpeculationOptions(1)
    if reason:
        raise OptionError(f"speculative is {speculative!r}, but {reason}. Use 'auto' or False.")
    return SpeculationOptions(int(speculative), always=True)


@dataclass(frozen=True)
class PlacementOptions:
    """Where experts go. `share` and `expert_bytes` are None unless requested; `all_on_device` refuses a partial fit."""

    all_on_device: bool = False
    mapped: bool = False
    share: float | None = None
    expert_bytes: int | None = None
    gpu_memory: int | None = None
    counts_file: Path | None = None

    @property
    def is_default(self) -> bool:
        """Whether a model whose experts cannot be placed satisfies these options too."""
        requested = (self.share, self.expert_bytes, self.gpu_memory, self.counts_file)
        return not self.mapped and all(value is None for value in requested)


def parse_placement(experts: object, gpu_memory: object, expert_counts: object) -> PlacementOptions:
    """Parse and check the three options that place experts between the GPU and host memory."""
    memory = None if gpu_memory is None else _check_bytes("gpu_memory", gpu_memory)
    if expert_counts is not None and not isinstance(expert_counts, (str, Path)):
        raise OptionError(f"expert_counts is {quoted(expert_counts)}, expected the path of a file, or None.")
    file = None if expert_counts is None else Path(expert_counts).expanduser()
    if file is not None and not file.parent.is_dir():
        raise OptionError(
            f"expert_counts is {quoted(str(file))}, whose folder does not exist. Make it first."
        )
    options = PlacementOptions(gpu_memory=memory, counts_file=file)
    if experts in ("auto", "device"):
        return replace(options, all_on_device=experts == "device")
    if experts == "mapped":
        return replace(options, mapped=True)
    if experts == "host":
        return replace(options, share=0.0)
    share = _parse_share(experts)
    if share is not None:
        return replace(options, share=share)
    return replace(options, expert_bytes=_check_bytes("experts", experts))


def _parse_share(experts: object) -> float | None:
    """A number from 0.0 to 1.0, also as text. It must contain a point, because whole numbers are bytes."""
    text = str(experts) if isinstance(experts, (float, str)) else ""
    try:
        share = float(text)
    except ValueError:
        return None
    if "." not in text:
        return None
    if not 0.0 <= share <= 1.0:
        raise OptionError(
            f"experts is {quoted(experts)}, a share lies between 0.0 and 1.0; bytes are whole numbers."
        )
    return share


def _check_bytes(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        value = quoted(value)
    try:
        return parse_bytes(str(value))
    except OptionError:
        more = ", 'auto', 'device', 'host', 'mapped' or a share such as 0.5" if name == "experts" else ""
        raise OptionError(f"{name} is {quoted(value)}, expected bytes such as '24GiB'{more}.") from None


def _engine_arguments(value: object) -> dict[str, Any] | None:
    """The option `vllm`: a mapping, or its JSON; None if it is not given."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if value is not None and not (
        isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    ):
        raise OptionError(
            f"vllm is {quoted(value)}, expected arguments of vLLM's engine by name, such as "
            '{"enforce_eager": true}.'
        )
    return None if value is None else dict(value)


def describe(options: type[Any], name: str) -> tuple[str, str]:
    """The help text of a field of an options dataclass, and its default as text."""
    each: Field[Any] = next(each for each in fields(options) if each.name == name)
    shown = each.metadata["shown"]
    if shown is None:
        shown = f"{each.default:g}" if isinstance(each.default, float) else str(each.default)
    return each.metadata["help"], shown


def help_text(options: type[Any], name: str) -> str:
    """The help text of a field of an options dataclass."""
    return describe(options, name)[0]


def signature_of(options: type[Any]) -> Callable[[_AnyFunction], _AnyFunction]:
    """Decorator: show the fields of an options dataclass in place of `**keywords` in a function's signature."""

    def decorate(function: _AnyFunction) -> _AnyFunction:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown = [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type
            )
            for each in fields(options)
        ]
        function.__signature__ = signature.replace(parameters=[*named, *shown])  # type: ignore[attr-defined]
        return function

    return decorate
