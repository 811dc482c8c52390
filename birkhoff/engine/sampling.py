"""What a caller may ask of the sampler, checked once when it is made.

Every value is refused here or nowhere: a field that passes is finite, in range and of the right type (a bool is not a
number, a string is not a list), lists are bounded, and what the rest of the engine sees is hashable and cannot change.
`from_kwargs` is the door for callers' keywords; it names the nearest option when one is misspelt.

Defaults are the release's: temperature 1, no truncation. `temperature=0` is greedy.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from birkhoff.errors import OptionError, TokenError, quoted

DEFAULT_MAX_TOKENS = 512
MOST_STOPS, LONGEST_STOP = 64, 1024
MOST_STOP_TOKENS = 1024
MOST_BIASES = 1024
MOST_LOGPROBS = 20
MOST_CHOICES = 64
_INT32 = 2**31 - 1


@dataclass(frozen=True)
class SamplingOptions:
    """The sampling keywords of `generate`, `chat` and `stream`."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives beside the chosen token
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # given as a mapping, kept sorted
    n: int = 1

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("max_tokens", _whole(self.max_tokens, "max_tokens", 1, _INT32))
        put("temperature", _number(self.temperature, "temperature", 0.0, 100.0))
        put("top_p", _number(self.top_p, "top_p", 0.0, 1.0, low_open=True))
        put("top_k", max(0, _whole(self.top_k, "top_k", -1, _INT32)))
        put("min_p", _number(self.min_p, "min_p", 0.0, 1.0))
        if self.seed is not None:
            put("seed", _whole(self.seed, "seed", -(2**63), 2**64 - 1))
        put("stop", _stops(self.stop))
        put("stop_token_ids", _token_ids(self.stop_token_ids))
        put("min_tokens", _whole(self.min_tokens, "min_tokens", 0, self.max_tokens, hint="max_tokens"))
        if not isinstance(self.ignore_eos, bool):
            raise OptionError(f"ignore_eos is {quoted(self.ignore_eos)}, expected True or False.")
        if self.logprobs is not None:
            put("logprobs", _whole(self.logprobs, "logprobs", 0, MOST_LOGPROBS))
        put("presence_penalty", _number(self.presence_penalty, "presence_penalty", -2.0, 2.0))
        put("frequency_penalty", _number(self.frequency_penalty, "frequency_penalty", -2.0, 2.0))
        put(
            "repetition_penalty",
            _number(self.repetition_penalty, "repetition_penalty", 0.0, 100.0, low_open=True),
        )
        put("logit_bias", _biases(self.logit_bias))
        put("n", _whole(self.n, "n", 1, MOST_CHOICES))

    @classmethod
    def from_kwargs(cls, **options: Any) -> SamplingOptions:
        """Options by keyword; an unknown one is refused with the nearest known name. None means the default."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise OptionError(
                    f"{quoted(name)} is not a sampling option, expected {', '.join(known)}.{hint}"
                )
        return cls(**{name: value for name, value in options.items() if value is not None})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def reshapes_logits(self) -> bool:
        """Whether the model's logits are changed before the draw, minimum length aside."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalties or self.logit_bias)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids the model does not have."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", [i for i, _ in self.logit_bias]),
        ):
            outside = [i for i in ids if i >= vocab_size]
            if outside:
                raise TokenError(
                    f"{name} names token {outside[0]}, expected 0 to {vocab_size - 1}, this model's ids."
                )


def _whole(value: object, name: str, low: int, high: int, hint: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        limit = f"{high} ({hint})" if hint else str(high)
        raise OptionError(f"{name} is {quoted(value)}, expected a whole number from {low} to {limit}.")
    return int(value)


def _number(value: object, name: str, low: float, high: float, *, low_open: bool = False) -> float:
    number = (
        float(value) if isinstance(value, Real) and not isinstance(value, bool) and _fits(value) else math.nan
    )
    if not low <= number <= high or (low_open and number == low):
        bounds = f"above {low:g} and up to {high:g}" if low_open else f"from {low:g} to {high:g}"
        raise OptionError(f"{name} is {quoted(value)}, expected a number {bounds}.")
    return number


def _fits(value: Real) -> bool:
    try:
        float(value)
    except OverflowError:  # an integer beyond every float
        return False
    return True


def _items(value: object, name: str, most: int, what: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple, set, frozenset)) or len(value) > most:
        size = f" with {len(value)} entries" if isinstance(value, (list, tuple, set, frozenset)) else ""
        raise OptionError(f"{name} is {quoted(value)}{size}, expected a list of at most {most} {what}.")
    return list(value)


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else _items(value, "stop", MOST_STOPS, "strings")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not 0 < len(stop) <= LONGEST_STOP:
            raise OptionError(
                f"stop[{i}] is {quoted(stop)}, expected text of 1 to {LONGEST_STOP} characters."
            )
    return tuple(stops)


def _token_ids(value: object) -> tuple[int, ...]:
    items = _items(value, "stop_token_ids", MOST_STOP_TOKENS, "token ids")
    return tuple(_whole(item, f"stop_token_ids[{i}]", 0, _INT32) for i, item in enumerate(items))


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        pairs = list(value)  # our own form, as `dataclasses.replace` hands it back
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        raise OptionError(f"logit_bias is {quoted(value)}, expected a mapping from token id to a number.")
    if len(pairs) > MOST_BIASES:
        raise OptionError(f"logit_bias has {len(pairs)} entries, expected at most {MOST_BIASES}.")
    out: dict[int, float] = {}
    for key, bias in pairs:
        # JSON objects have string keys; only plain decimal ones name a token
        token = (
            int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10 else key
        )
        token = _whole(token, "a token id of logit_bias", 0, _INT32)
        if token in out:
            raise OptionError(f"logit_bias names token {token} twice; give it once.")
        out[token] = _number(bias, f"logit_bias[{token}]", -100.0, 100.0)
    return tuple(sorted(out.items()))
