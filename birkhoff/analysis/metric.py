"""Metrics: one number from the logits of a text, for attribution, circuits and sweeps over patches.

    (" Tom", " Ann")                      logit of the first token minus logit of the second, at the last position
    LogitDiff(" Tom", " Ann", position=7) the same at another position
    " Tom"                                logit of a token at the last position
    LogProb(" Tom")                       its log-probability
    lambda logits: ...                    any function of the logits [T, vocab] of one text that returns one number

Tokens are ids, or texts that the tokenizer encodes as one token. `resolve_metric` turns all of these into a
`ResolvedMetric`, which takes the logits of several texts of equal length at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.errors import OptionError, quoted
from birkhoff.option_checks import as_int

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

Token = int | str | torch.Tensor  # an id, also as a tensor of one number, or a text of one token
_FORMS = (
    'a token, a pair of tokens, LogitDiff, Logit, LogProb, or a function of the logits, e.g. (" Tom", " Ann")'
)


@dataclass(frozen=True)
class LogitDiff:
    """Logit of `token` minus logit of `other` at `position`."""

    token: Token
    other: Token
    position: int = -1


@dataclass(frozen=True)
class Logit:
    """Logit of `token` at `position`."""

    token: Token
    position: int = -1


@dataclass(frozen=True)
class LogProb:
    """Log-probability of `token` at `position`."""

    token: Token
    position: int = -1


@dataclass(frozen=True)
class ResolvedMetric:
    """`metric(logits [B, T, vocab])` is one number per text, [B]. `name` says what it is, for reports. `at` is the only
    position whose logits it reads, if there is one: then `compute` takes [B, vocab]."""

    compute: Callable[[torch.Tensor], torch.Tensor]
    name: str
    at: int | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.compute(logits if self.at is None else logits[:, self.at])

    def of_hidden(self, engine: Engine, rows: torch.Tensor) -> float:
        """The metric of one text from its hidden rows [T, d]: only the logits that it reads are computed."""
        if self.at is None:
            return float(self.compute(engine.model.logits(rows).unsqueeze(0)))
        return float(self.compute(engine.model.logits(rows[self.at].unsqueeze(0))))


def resolve_metric(engine: Engine, metric: Any, length: int, gradients: bool = True) -> ResolvedMetric:
    """Check a metric against the model and a text of `length` tokens. Without `gradients` a function may return a plain
    number."""
    if isinstance(metric, ResolvedMetric):
        return metric
    if isinstance(metric, Mapping):
        metric = metric_from_json(metric)
    if isinstance(metric, torch.Tensor) and not metric.is_floating_point():
        metric = metric.tolist()  # one id, or two: logits[-1].topk(2).indices
    if isinstance(metric, tuple | list) and len(metric) == 2:
        metric = LogitDiff(*metric)
    if isinstance(metric, str) or as_int(metric) is not None:
        metric = Logit(metric)
    if isinstance(metric, LogitDiff):
        first, second = token_id(engine, metric.token), token_id(engine, metric.other)
        at = _position(metric.position, length)
        name = f"logit of {_shown(engine, first)} minus logit of {_shown(engine, second)} at {at}"
        return ResolvedMetric(lambda logits: logits[:, first] - logits[:, second], name, at)
    if isinstance(metric, Logit):
        token, at = token_id(engine, metric.token), _position(metric.position, length)
        return ResolvedMetric(
            lambda logits: logits[:, token], f"logit of {_shown(engine, token)} at {at}", at
        )
    if isinstance(metric, LogProb):
        token, at = token_id(engine, metric.token), _position(metric.position, length)
        name = f"log-probability of {_shown(engine, token)} at {at}"
        return ResolvedMetric(lambda logits: logits.log_softmax(-1)[:, token], name, at)
    if callable(metric):
        compute = _per_text(metric, gradients)
        return ResolvedMetric(compute, getattr(metric, "__name__", type(metric).__name__))
    raise OptionError(f"metric is {quoted(metric)}, expected {_FORMS}.")


def metric_from_json(raw: Mapping[str, Any]) -> LogitDiff | LogProb | Logit:
    """From `{"token", "other", "position", "logprob"}`: a logit difference with `other`, otherwise a logit, or with
    `logprob` true a log-probability."""
    unknown = sorted(set(raw) - {"token", "other", "position", "logprob"})
    if unknown or "token" not in raw:
        seen = f"has no field {unknown[0]!r}" if unknown else "has no token"
        raise OptionError(f'metric {seen}, expected {{"token": ..., "other": ..., "position": -1}}.')
    position = raw.get("position", -1)
    if raw.get("other") is None:
        return (LogProb if raw.get("logprob") else Logit)(raw["token"], position)
    if raw.get("logprob"):
        raise OptionError(
            "metric has other and logprob; a difference is one of logits. Leave one of them out."
        )
    return LogitDiff(raw["token"], raw["other"], position)


def metrics_of_texts(metric: Any, count: int) -> list[Any]:
    """The metrics of several texts, from one for all or a list with one for each.

    Two tokens are a difference for all texts; tokens of each text are given as pairs or as `Logit(token)`."""
    if isinstance(metric, torch.Tensor) and metric.dim() == 2:
        metric = metric.tolist()  # [texts, 2]: the ids of a pair for each
    if not isinstance(metric, list | tuple) or not metric or all(_is_token(each) for each in metric):
        return [metric] * count
    if len(metric) != count:
        raise OptionError(
            f"metric has {len(metric)} entries for {count} texts. Give one for all, or one each."
        )
    return list(metric)


def _is_token(value: Any) -> bool:
    single = isinstance(value, torch.Tensor) and value.dim() == 0
    return single or isinstance(value, str) or as_int(value) is not None


def token_id(engine: Engine, token: Any) -> int:
    """A token given by its id (also a tensor of one number, `logits[-1].argmax()`) or by a text that is one token."""
    if isinstance(token, torch.Tensor) and token.dim() == 0 and not token.is_floating_point():
        token = token.item()
    if isinstance(token, str) and token:
        ids = engine.tokenizer.encode(token)
        if len(ids) != 1:
            parts = ", ".join(repr(engine.tokenizer.decode([each])) for each in ids[:8])
            raise OptionError(
                f"{quoted(token)} is {len(ids)} tokens ({parts}), expected one. Give one of them, or its id."
            )
        return int(ids[0])
    index, last = as_int(token), engine.config.vocab_size - 1
    if index is None or not 0 <= index <= last:
        raise OptionError(f"the token is {quoted(token)}, expected a text of one token, or an id 0..{last}.")
    return index


def _shown(engine: Engine, token: int) -> str:
    texts = engine.token_texts([token])
    return f"token {token}" if texts is None else repr(texts[0])


def _position(position: int, length: int) -> int:
    if as_int(position) is None or not -length <= position < length:
        raise OptionError(f"metric: position is {quoted(position)}, the text has {length} tokens.")
    return int(position) % length


def _per_text(fn: Callable[[torch.Tensor], Any], gradients: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def compute(logits: torch.Tensor) -> torch.Tensor:
        numbers = []
        for each in logits:
            number = fn(each)
            if not gradients and isinstance(number, (int, float)):
                number = torch.tensor(float(number))
            if not isinstance(number, torch.Tensor) or number.numel() != 1:
                shown = f"shape {tuple(number.shape)}" if isinstance(number, torch.Tensor) else quoted(number)
                raise OptionError(
                    f"the metric returned {shown}, expected a tensor of one number computed from the logits."
                )
            if not gradients and bool(number.isnan()):
                raise OptionError("the metric returned NaN. Check it with engine.logits(prompt).")
            numbers.append(number.reshape(()))
        return torch.stack(numbers)

    return compute
