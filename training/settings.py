"""All settings of a run in one frozen record, and their values at a given moment.

`progress` goes from 0 to 1 over a run, by steps or time, whichever limits the run; warm-up and the first router steps
are counted in steps. `Settings.parse` reads `name=value` pairs, so a probe is the default plus a short text.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from birkhoff.convert.presets import PRESETS
from birkhoff.errors import OptionError

NANO = PRESETS["nano"]


@dataclass(frozen=True)
class Settings:
    batch: int = 32
    length: int = 1024
    seed: int = 0
    # start
    spread: float = 0.02
    mhc_scale: float = 0.5
    stagger: bool = True
    # rates at their peak
    muon_rate: float = 5e-3
    embedding_rate: float = 4e-3
    small_rate: float = 2e-3
    mhc_rate: float = 2e-3
    warmup_steps: int = 150
    final_rate: float = 0.0  # share of the peak at the end
    muon_momentum: float = 0.95
    adam_first: float = 0.9
    adam_second: float = 0.95
    weight_decay: float = 0.1
    embedding_decay: float = 0.1
    clip: float = 1.0
    # data
    mixed_share: float = 0.8  # share of the run that includes general text
    corpus_share: float = 1.0  # share of the core text, to probe settings under many passes
    request_weight: float = 0.1
    # regularisation
    dropout: float = 0.1
    dropout_late: float = 0.15  # second half
    # losses
    mtp_weight: float = 0.3
    mtp_weight_late: float = 0.1  # in the last third
    index_weight: float = 1.0
    balance_weight: float = 1e-4
    bias_rate: float = 5e-3
    bias_rate_late: float = 1e-3
    bias_fast_steps: int = 300
    dense_share: float = 0.1  # share of the run with every entry visible to CSA queries
    round_share: float = 0.1  # last share of the run, with weights rounded as stored
    stream_float32: bool = False

    @classmethod
    def parse(cls, text: str, base: Settings | None = None) -> Settings:
        """Apply `"muon_rate=1e-2,stagger=false"` to a base; an unknown or malformed entry is an error."""
        base = base or cls()
        kinds = {f.name: type(getattr(base, f.name)) for f in fields(cls)}
        changes: dict[str, Any] = {}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = entry.partition("=")
            if name not in kinds:
                raise OptionError(f"setting {name!r} is unknown, expected one of {', '.join(sorted(kinds))}.")
            try:
                changes[name] = _read(value, kinds[name])
            except ValueError:
                raise OptionError(f"setting {name} is {value!r}, expected {kinds[name].__name__}.") from None
        settings = replace(base, **changes)
        settings.check()
        return settings

    def check(self) -> None:
        for name in ("batch", "length"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, expected at least 1.")
        for name in ("mixed_share", "corpus_share", "dense_share", "round_share", "final_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name} is {getattr(self, name)}, expected 0 to 1.")
        for name in ("dropout", "dropout_late"):
            if not 0 <= getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, expected 0 up to but not 1.")


class Moment(NamedTuple):
    """Values that change per step; copied to the device as one small vector, in this order."""

    rate: float  # share of the peak rates
    dropout: float
    dense: float
    mtp_weight: float
    bias_rate: float
    adam_first_correction: float
    adam_second_correction: float


def moment(settings: Settings, step: int, progress: float) -> Moment:
    """Return the values at `step` (from 0) and `progress` (0 to 1)."""
    warm = min(1.0, (step + 1) / max(settings.warmup_steps, 1))
    left = settings.final_rate + (1 - settings.final_rate) * (1 - min(max(progress, 0.0), 1.0))
    return Moment(
        rate=warm * left,
        dropout=settings.dropout if progress < 0.5 else settings.dropout_late,
        dense=1.0 if progress < settings.dense_share else 0.0,
        mtp_weight=settings.mtp_weight if progress < 2 / 3 else settings.mtp_weight_late,
        bias_rate=settings.bias_rate if step < settings.bias_fast_steps else settings.bias_rate_late,
        adam_first_correction=1 - settings.adam_first ** (step + 1),
        adam_second_correction=1 - settings.adam_second ** (step + 1),
    )


def _read(value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(value)
        return value.lower() == "true"
    return kind(value)
