"""Sampling parameters of a request, validated once on construction.

`SamplingParams` is the single source of the sampling keywords: the signatures of `generate`, `chat` and `stream`, the
command-line help and `docs/options.md` are made from its fields. After validation every value is finite, in range,
hashable and immutable; lists are bounded; booleans are not accepted as numbers.

The defaults are those of the released model: temperature 1, no truncation. `temperature=0` is greedy decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypedDict

from birkhoff.errors import OptionError, TokenError, did_you_mean, quoted
from birkhoff.option_checks import as_int, check_bool, check_float, check_int

DEFAULT_MAX_TOKENS = 512
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 64, 1024
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 64
MAX_CONTEXT_NAME = 200
_INT32 = 2**31 - 1


def option(default: Any, help: str, shown: str | None = None) -> Any:
    """A dataclass field with a description; `shown` replaces the default in documentation and help texts."""
    return field(default=default, metadata={"help": help, "shown": shown})


class AnswerKwargs(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords, except the number of answers; None selects the default."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    min_tokens: int | None
    ignore_eos: bool | None
    logprobs: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None


class SamplingKwargs(AnswerKwargs, total=False):
    """The fields of `SamplingParams` as keywords; None selects the default."""

    n: int | None
    context: str | None


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of an answer are sampled and when it ends."""

    max_tokens: int = option(
        DEFAULT_MAX_TOKENS, "Maximum number of generated tokens.", f"{DEFAULT_MAX_TOKENS}, or what fits"
    )
    temperature: float = option(1.0, "Sampling temperature, 0 to 100; 0 is greedy.")
    top_p: float = option(1.0, "Sample from the smallest set of tokens with this total probability.")
    top_k: int = option(0, "Sample from the k most likely tokens; 0 or -1 disables it.", "off")
    min_p: float = option(0.0, "Sample from tokens at least this likely relative to the most likely one.")
    seed: int | None = option(None, "Random seed; equal seeds give equal samples.", "random")
    stop: tuple[str, ...] = option((), "Strings that end the answer; they are not part of it.", "none")
    stop_token_ids: tuple[int, ...] = option((), "Token ids that end the answer.", "none")
    min_tokens: int = option(0, "Tokens to generate before the answer may end.")
    ignore_eos: bool = option(False, "Continue after the end-of-text token.", "off")
    logprobs: int | None = option(
        None, "Return log-probabilities of each token and of this many alternatives, up to 20.", "none"
    )
    presence_penalty: float = option(0.0, "Subtracted from the logit of every token generated so far.")
    frequency_penalty: float = option(0.0, "Subtracted once per earlier occurrence of a generated token.")
    repetition_penalty: float = option(1.0, "Divides the logit of every token of the prompt and the answer.")
    logit_bias: tuple[tuple[int, float], ...] = option(
        (), "Added to the logits of single tokens, by token id.", "none"
    )
    n: int = option(1, "Number of answers for each prompt.")
    context: str | None = option(
        None, "Name under which the prompt's cache pages are kept, in memory and on disk.", "none"
    )

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("max_tokens", check_int("max_tokens", self.max_tokens, 1, _INT32))
        put("temperature", check_float("temperature", self.temperature, 0.0, 100.0))
        put("top_p", check_float("top_p", self.top_p, 0.0, 1.0, exclude_low=True))
        put("top_k", max(0, check_int("top_k", self.top_k, -1, _INT32)))
        put("min_p", check_float("min_p", self.min_p, 0.0, 1.0))
        if self.seed is not None:
            put("seed", check_int("seed", self.seed, -(2**63), 2**64 - 1))
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _token_ids(self.stop_token_ids))
        min_tokens = as_int(self.min_tokens)
        if min_tokens is None or not 0 <= min_tokens <= self.max_tokens:
            raise OptionError(
                f"min_tokens is {quoted(self.min_tokens)}, expected a whole number from 0 to "
                f"{self.max_tokens} (max_tokens)."
            )
        put("min_tokens", min_tokens)
        check_bool("ignore_eos", self.ignore_eos)
        if self.logprobs is not None:
            put("logprobs", check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        put("presence_penalty", check_float("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        # Quotients of logits stay finite.
        put("repetition_penalty", check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        put("logit_bias", _biases(self.logit_bias))
        put("n", check_int("n", self.n, 1, MAX_CHOICES))
        _check_context(self.context)

    @classmethod
    def from_kwargs(cls, base: SamplingParams | None = None, /, **options: Any) -> SamplingParams:
        """Build from keywords that override `base`. None means "not given".

        An unknown keyword raises `OptionError` with the nearest known name."""
        if base is not None and not isinstance(base, SamplingParams):
            raise OptionError(f"params is {quoted(base)}, expected a birkhoff.SamplingParams.")
        names = [each.name for each in fields(cls)]
        for name in options:
            if name not in names:
                raise OptionError(
                    f"{quoted(name)} is not a sampling option, expected {', '.join(names)}."
                    + did_you_mean(name, names)
                )
        given = {name: value for name, value in options.items() if value is not None}
        return cls(**given) if base is None else cls(**(asdict(base) | given))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def reshapes_logits(self) -> bool:
        """Whether penalties or biases change the logits before sampling (`min_tokens` aside)."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalties or self.logit_bias)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `TokenError` if a token id is outside the vocabulary."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", [token for token, _ in self.logit_bias]),
        ):
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                raise TokenError(
                    f"{name}: there is no token {outside[0]}, expected 0 to {vocab_size - 1}, this model's ids."
                )


def _check_list(name: str, value: object, limit: int, items: str) -> list[Any]:
    if not isinstance(value, (list, tuple, set, frozenset)) or len(value) > limit:
        size = f" with {len(value)} entries" if isinstance(value, (list, tuple, set, frozenset)) else ""
        raise OptionError(f"{name} is {quoted(value)}{size}, expected a list of at most {limit} {items}.")
    return list(value)


def _stop_strings(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else _check_list("stop", value, MAX_STOP_STRINGS, "strings")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise OptionError(
                f"stop[{index}] is {quoted(stop)}, expected text of 1 to {MAX_STOP_LENGTH} characters."
            )
    return tuple(stops)


def _token_ids(value: object) -> tuple[int, ...]:
    items = _check_list("stop_token_ids", value, MAX_STOP_TOKENS, "token ids")
    return tuple(check_int(f"stop_token_ids[{index}]", item, 0, _INT32) for index, item in enumerate(items))


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    """Normalise a mapping, or the pairs of an already normalised value, to pairs sorted by token id."""
    if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        pairs = list(value)
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        raise OptionError(f"logit_bias is {quoted(value)}, expected a mapping from token id to a number.")
    if len(pairs) > MAX_BIASES:
        raise OptionError(f"logit_bias has {len(pairs)} entries, expected at most {MAX_BIASES}.")
    biases: dict[int, float] = {}
    for key, bias in pairs:
        # JSON objects have string keys; only plain decimal digits are a token id.
        decimal = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
        token = check_int("logit_bias: a token id", int(key) if decimal else key, 0, _INT32)
        if token in biases:
            raise OptionError(f"logit_bias: token {token} stands there twice; give it once.")
        biases[token] = check_float(f"logit_bias[{token}]", bias, -100.0, 100.0)
    return tuple(sorted(biases.items()))


def _check_context(name: object) -> None:
    valid = isinstance(name, str) and 0 < len(name) <= MAX_CONTEXT_NAME and name.isprintable()
    if name is not None and not valid:
        raise OptionError(
            f"context is {quoted(name)}, expected a name of 1 to {MAX_CONTEXT_NAME} printable characters, or None."
        )
