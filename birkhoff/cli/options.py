"""Options shared by several commands: model loading, sampling, server.

An option has the name of the Python keyword it sets and a `BIRKHOFF_*` environment variable of that name. It has no
default of its own: an option that is not given is not passed on, so that defaults are defined and checked in one place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from birkhoff.api.options import EngineOptions, describe
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import OptionError, quoted
from birkhoff.server.server_settings import ServerSettings


@dataclass(frozen=True)
class Flag:
    """One option: the keyword it sets, the type of its value, and its help text."""

    name: str
    kind: Any
    help: str
    default: str = ""
    metavar: str | None = None

    def parameter(self, panel: str) -> inspect.Parameter:
        spelled = "--" + self.name.replace("_", "-")
        if self.kind is bool:
            spelled += "/--no-" + self.name.replace("_", "-")
        option = typer.Option(
            spelled,
            help=self.help + (f" \\[default: {self.default}]" if self.default else ""),
            envvar=f"BIRKHOFF_{self.name.upper()}",
            show_envvar=False,
            show_default=False,
            metavar=self.metavar,
            rich_help_panel=panel,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[self.kind | None, option],
        )


def _flag(options: type[Any], name: str, kind: Any, metavar: str | None = None) -> Flag:
    """The flag of a field of `EngineOptions` or `SamplingParams`, with its help text and default."""
    text, default = describe(options, name)
    return Flag(
        name, kind, text + (" May be repeated." if get_origin(kind) is list else ""), default, metavar
    )


ENGINE = (
    Flag("model", str, "nano, a checkpoint directory, a GGUF file, or org/name in the hub cache.", "nano"),
    *(
        _flag(EngineOptions, name, kind)
        for name, kind in (
            ("backend", str),
            ("device", str),
            ("dtype", str),
            ("numerics", str),
            ("kernels", str),
            ("weights", str),
            ("experts", str),
            ("gpu_memory", str),
            ("expert_counts", str),
            ("experts_on", str),
            ("background_experts", bool),
            ("max_context", int),
            ("cache_bytes", int),
            ("max_batch_tokens", int),
            ("batch_invariant", bool),
            ("prefix_cache", bool),
            ("speculative", bool),
            ("context_root", str),
            ("context_bytes", int),
            ("hooks", str),
            ("tensor_parallel_size", int),
            ("pipeline_parallel_size", int),
            ("vllm", str),
            ("revision", str),
            ("download", bool),
        )
    ),
)
SAMPLING = tuple(
    _flag(SamplingParams, name, kind, "ID=NUMBER" if name == "logit_bias" else None)
    for name, kind in (
        ("max_tokens", int),
        ("temperature", float),
        ("top_p", float),
        ("top_k", int),
        ("min_p", float),
        ("seed", int),
        ("stop", list[str]),
        ("stop_token_ids", list[int]),
        ("min_tokens", int),
        ("ignore_eos", bool),
        ("logprobs", int),
        ("presence_penalty", float),
        ("frequency_penalty", float),
        ("repetition_penalty", float),
        ("logit_bias", list[str]),
        ("n", int),
    )
)
SERVER = tuple(
    Flag(
        each.name,
        list[str] if type(each.default) is tuple else type(each.default),
        each.metadata["help"],
        f"{each.default:g}" if type(each.default) is float else str(each.default or ""),
    )
    for each in fields(ServerSettings)
)
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
DATA_HELP = (
    "A .jsonl, .txt or .parquet file (.zst or .gz too), a folder of them or of save_to_disk, or "
    "datasets:NAME?split=train."
)
Texts = Annotated[str, typer.Option(help=DATA_HELP)]
PANELS = {"Model": ENGINE, "Sampling": SAMPLING, "Server": SERVER}
_SAMPLING_NAMES = {flag.name for flag in SAMPLING}


def shared_options(
    *panels: str, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that adds the options of these panels to a command, which receives the given ones as keywords."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(verb, include_extras=True)
        command_parameters = [
            p for p in inspect.signature(verb).parameters.values() if p.kind is not p.VAR_KEYWORD
        ]
        own = {parameter.name for parameter in command_parameters}  # a command's own option has priority
        flags = [
            flag.parameter(panel)
            for panel in panels
            for flag in PANELS[panel]
            if flag.name not in without and flag.name not in own
        ]
        shared = {flag.name for flag in flags}

        @functools.wraps(verb)
        def wrapper(**values: Any) -> None:
            keywords = {
                name: value for name, value in values.items() if name not in shared or value not in (None, [])
            }
            verb(**keywords)

        command_parameters = [
            p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in command_parameters
        ]
        wrapper.__signature__ = inspect.Signature([*command_parameters, *flags])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in [*command_parameters, *flags]}
        return wrapper

    return decorate


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into keywords of `load` (including `model`) and sampling keywords, and check the latter."""
    load_options = {name: value for name, value in options.items() if name not in _SAMPLING_NAMES}
    sampling = {name: value for name, value in options.items() if name in _SAMPLING_NAMES}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _parse_logit_bias(sampling["logit_bias"])
    SamplingParams.from_kwargs(**sampling)  # fail before the model is loaded
    return {"model": "nano", **load_options}, sampling


def server_settings(options: Mapping[str, Any]) -> tuple[ServerSettings, dict[str, Any]]:
    """Split options into checked `ServerSettings` and keywords of `load`."""
    names = {flag.name for flag in SERVER}
    return (
        ServerSettings(**{name: value for name, value in options.items() if name in names}),
        {name: value for name, value in options.items() if name not in names},
    )


def _parse_logit_bias(entries: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in entries:
        token, separator, value = text.partition("=")
        try:
            if not separator or int(token) in biases:
                raise ValueError
            biases[int(token)] = float(value)
        except ValueError:
            raise OptionError(
                f"logit_bias is {quoted(text)}, expected ID=NUMBER with each token id once, such as 42=-5."
            ) from None
    return biases


# Options of a memory plan (`inspect`, `pull`).
PlanGpuMemory = Annotated[
    str | None,
    typer.Option("--gpu", "--gpu-memory", help="Plan for a GPU with this much memory, such as 24GiB."),
]
PlanRam = Annotated[
    str | None,
    typer.Option(help="Plan for this much free host memory, such as 64GiB: beside --gpu, or for a CPU."),
]
PlanContext = Annotated[int | None, typer.Option(help="Context length per request for a plan, in tokens.")]
PlanRequests = Annotated[int, typer.Option(help="Concurrent requests for a plan.")]
