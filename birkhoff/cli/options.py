"""Options shared by several commands: model loading, sampling, server.

An option has the name of the Python keyword it sets and a `BIRKHOFF_*` environment variable of that name. It has no
default of its own: an option that is not given is not passed on, so that defaults are defined and checked in one place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from birkhoff.engine.sampling import SamplingOptions
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


ENGINE = (
    Flag("model", str, "nano, a checkpoint directory or a GGUF file.", "nano"),
    Flag("device", str, "auto, cpu or cuda.", "auto"),
    Flag("dtype", str, "Compute dtype: auto, float32 or bfloat16.", "auto"),
    Flag("numerics", str, "plain, or released: with the release's activation rounding.", "plain"),
    Flag("kernels", str, "auto, or reference: the slow plain twins.", "auto"),
    Flag("experts", str, "auto, device, host, a share such as 0.5, or bytes of the GPU for them.", "auto"),
    Flag("gpu_memory", str, "What the model may take of the GPU, such as 24GiB.", "what is free"),
    Flag(
        "expert_counts",
        str,
        "File of how often experts are read; says who begins on the GPU, updated at the end.",
    ),
    Flag("max_context", int, "Longest prompt and answer together, in tokens.", "what fits"),
    Flag("cache_bytes", int, "Memory for the cache.", "a quarter of what is free"),
    Flag("max_batch_tokens", int, "Most tokens computed in one step.", "2048"),
    Flag("batch_invariant", bool, "Answers that do not depend on their neighbours, bit for bit; slower."),
    Flag(
        "prefix_cache",
        bool,
        "Start behind what past prompts have in common with a new one.",
        "if there is room",
    ),
    Flag("speculative", bool, "Guess a token ahead with the model's MTP block.", "while it pays"),
    Flag("context_root", str, "Directory for pages of past prompts that memory has no room for.", "none"),
    Flag("context_bytes", int, "Most bytes of files in it.", "1 GiB"),
)
SAMPLING = (
    Flag("max_tokens", int, "Most tokens of an answer.", str(SamplingOptions.max_tokens)),
    Flag("temperature", float, "0 is greedy.", f"{SamplingOptions.temperature:g}"),
    Flag(
        "top_p",
        float,
        "Draw from the likeliest tokens that make up this share.",
        f"{SamplingOptions.top_p:g}",
    ),
    Flag("top_k", int, "Draw from this many likeliest tokens.", "off"),
    Flag("min_p", float, "Draw from tokens at least this likely relative to the likeliest.", "0"),
    Flag("seed", int, "The same seed draws the same answer.", "a new one each time"),
    Flag("stop", list[str], "End before this text; may be given several times."),
    Flag("stop_token_ids", list[int], "End after this token; may be given several times."),
    Flag("min_tokens", int, "Do not end before this many tokens.", "0"),
    Flag("ignore_eos", bool, "Go on after the end-of-text token."),
    Flag("logprobs", int, "Log-probabilities of the chosen token and of so many others (with --json)."),
    Flag("presence_penalty", float, "Taken off the logit of every token already there.", "0"),
    Flag("frequency_penalty", float, "Taken off for every time it is already there.", "0"),
    Flag("repetition_penalty", float, "Divides the logit of every token already there.", "1"),
    Flag(
        "logit_bias",
        list[str],
        "Added to one token's logit; may be given several times.",
        metavar="ID=NUMBER",
    ),
    Flag("n", int, "How many answers.", "1"),
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
PANELS = {"Model": ENGINE, "Sampling": SAMPLING, "Server": SERVER}
_SAMPLING_NAMES = {flag.name for flag in SAMPLING}


def shared_options(
    *panels: str, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that adds the options of these panels to a command, which receives the given ones as keywords."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(verb, include_extras=True)
        own = [p for p in inspect.signature(verb).parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [
            flag.parameter(panel) for panel in panels for flag in PANELS[panel] if flag.name not in without
        ]
        shared = {flag.name for flag in flags}

        @functools.wraps(verb)
        def wrapper(**values: Any) -> None:
            given = {
                name: value for name, value in values.items() if name not in shared or value not in (None, [])
            }
            verb(**given)

        own = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in own]
        wrapper.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in [*own, *flags]}
        return wrapper

    return decorate


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into keywords of `load` (including `model`) and sampling keywords, and check the latter."""
    loading = {name: value for name, value in options.items() if name not in _SAMPLING_NAMES}
    sampling = {name: value for name, value in options.items() if name in _SAMPLING_NAMES}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _biases(sampling["logit_bias"])
    SamplingOptions.from_kwargs(**sampling)  # fail before the model is loaded
    return {"model": "nano", **loading}, sampling


def server_settings(options: Mapping[str, Any]) -> tuple[ServerSettings, dict[str, Any]]:
    """Split options into checked `ServerSettings` and keywords of `load`."""
    names = {flag.name for flag in SERVER}
    return (
        ServerSettings(**{name: value for name, value in options.items() if name in names}),
        {name: value for name, value in options.items() if name not in names},
    )


def _biases(given: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in given:
        token, found, value = text.partition("=")
        try:
            if not found or int(token) in biases:
                raise ValueError
            biases[int(token)] = float(value)
        except ValueError:
            raise OptionError(
                f"logit_bias is {quoted(text)}, expected ID=NUMBER with each token id once, such as 42=-5."
            ) from None
    return biases
