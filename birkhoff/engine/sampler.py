"""Logits to tokens, for a batch of requests that know nothing of each other.

Order, per row: repetition, presence and frequency penalties; logit bias; ban on ending before `min_tokens`; what the
request's mask forbids; temperature; top-k; top-p; min-p; draw. Log-probabilities are the model's own: the log-softmax
of the raw logits, before any of that, so they mean the same at every setting.

The draw is an exponential race: token i wins with probability p_i when it has the largest p_i / E_i, with E_i
exponential noise hashed from (seed, step, i). Hashing, dividing and finding a maximum treat every element alone, so a
request's tokens are the same bits whoever its neighbours are, and need no generator state: step 7 can be drawn twice,
or first. Greedy is the largest logit, lowest id on a tie. Rows whose logits are not numbers fail alone, as a value.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from birkhoff.engine.request import Request, TokenLogprob, TokenMask
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import LogitsError
from birkhoff.kernels.sample.device import LOGPROB, ROW_PARAMS, TOP_IDS, TOP_LOGPROBS, DeviceSampler

_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_MASS = 2**40  # what the likeliest token weighs when a nucleus is counted out, in whole numbers


@dataclass(frozen=True, slots=True)
class Sampled:
    """One drawn token. Log-probabilities are there when the options ask for them; alternatives best first."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class RowState:
    """What the sampler has to know of one running request. `accept` each token that is kept."""

    def __init__(
        self,
        options: SamplingParams,
        vocab_size: int,
        *,
        seed: int,
        prompt_ids: Sequence[int] = (),
        eos_ids: Iterable[int] = (),
        device: torch.device | str = "cpu",
        mask: TokenMask | None = None,
    ) -> None:
        options.check_vocabulary(vocab_size)
        self.options = options
        self.seed = seed
        self.step = 0  # tokens accepted so far
        self._mask = mask
        self._accepted = list[int]()
        self._ending = torch.tensor(
            sorted({*eos_ids, *options.stop_token_ids}), dtype=torch.long, device=device
        )
        bias_ids = [token for token, _ in options.logit_bias]
        self._bias_ids = torch.tensor(bias_ids, dtype=torch.long, device=device)
        self._biases = torch.tensor(
            [bias for _, bias in options.logit_bias], dtype=torch.float32, device=device
        )
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        if options.presence_penalty or options.frequency_penalty:
            self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        if options.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(list(prompt_ids), dtype=torch.long, device=device)] = True
        self._record: np.ndarray | None = None
        self._plain_greedy = options.greedy and not self.reshapes_logits and options.logprobs is None

    @property
    def reshapes_logits(self) -> bool:
        return self.options.reshapes_logits or self._mask is not None

    @property
    def may_end(self) -> bool:
        return self.step >= self.options.min_tokens

    @property
    def plain_greedy(self) -> bool:
        """Whether the answer is simply the largest logit."""
        return self._plain_greedy and self.may_end

    def accept(self, token: int) -> None:
        self.step += 1
        if self._mask is not None:
            self._accepted.append(token)
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True

    def reshape(self, logits: Tensor) -> Tensor:
        """Penalties, bias and the ban on ending, on a copy of one row [vocab]."""
        options = self.options
        if self._seen is not None:
            r = options.repetition_penalty
            logits = torch.where(self._seen, torch.where(logits > 0, logits / r, logits * r), logits)
        if self._counts is not None:
            seen = (self._counts > 0).float()
            logits = logits - options.frequency_penalty * self._counts - options.presence_penalty * seen
        if options.logit_bias:
            logits = logits.index_add(0, self._bias_ids, self._biases)
        if not self.may_end:
            logits = logits.index_fill(0, self._ending, -math.inf)
        if self._mask is not None:
            allowed = self._mask.allowed(self._accepted, logits.shape[-1]).to(logits.device)
            logits = logits.masked_fill(~allowed, -math.inf)
        return logits

    def device_record(self) -> np.ndarray:
        """This request's parameters for the CUDA kernel; the noise key of a step is filled in separately."""
        if self._record is None:
            options = self.options
            record = np.zeros((), ROW_PARAMS)
            record["inv_temperature"] = 1.0 if options.greedy else 1.0 / options.temperature
            record["top_p"] = options.top_p
            record["min_log_weight"] = math.log(options.min_p) if options.min_p else -math.inf
            record["repetition"] = options.repetition_penalty
            record["presence"] = options.presence_penalty
            record["frequency"] = options.frequency_penalty
            record["top_k"] = options.top_k
            record["greedy"] = options.greedy
            record["logprobs"] = -1 if options.logprobs is None else options.logprobs
            record["num_bias"] = len(self._biases)
            record["seen"] = 0 if self._seen is None else self._seen.data_ptr()
            record["counts"] = 0 if self._counts is None else self._counts.data_ptr()
            record["bias_ids"] = self._bias_ids.data_ptr()
            record["biases"] = self._biases.data_ptr()
            record["banned_ids"] = self._ending.data_ptr()
            self._record = record
        return self._record

    @property
    def masked(self) -> bool:
        """Whether a mask decides which tokens are allowed."""
        return self._mask is not None

    def allowed(self, vocab_size: int, device: torch.device) -> Tensor:
        """Tokens that the request's mask allows next, bool [vocab] on `device`."""
        assert self._mask is not None
        return self._mask.allowed(self._accepted, vocab_size).to(device)

    @property
    def num_banned(self) -> int:
        """How many ending tokens are banned at this step."""
        return 0 if self.may_end else len(self._ending)


class _DeviceBatch:
    """Parameters of the rows of the last launch, kept while the same requests are sampled in the same order."""

    def __init__(self, rows: Sequence[RowState]):
        self.rows = list(rows)
        self.params = np.empty(len(rows), ROW_PARAMS)
        for i, row in enumerate(rows):
            self.params[i] = row.device_record()
        self.seeds = np.array([_mix64(row.seed) for row in rows], np.uint64)
        self.masked = [i for i, row in enumerate(rows) if row.masked]
        self.logprobs = [row.options.logprobs for row in rows]

    def matches(self, rows: Sequence[RowState]) -> bool:
        return len(rows) == len(self.rows) and all(a is b for a, b in zip(rows, self.rows))

    def fill(self, logits: Tensor) -> list[Tensor]:
        """Write what changes with every step; returns tensors that must live until the kernel has run."""
        steps = np.array([row.step + 1 for row in self.rows], np.uint64)
        keys = _mix64_array(self.seeds + steps * np.uint64(_GOLDEN64))
        self.params["key_low"] = keys & np.uint64(_MASK32)
        self.params["key_high"] = keys >> np.uint64(32)
        self.params["num_banned"] = [row.num_banned for row in self.rows]
        masks = [self.rows[i].allowed(logits.shape[-1], logits.device) for i in self.masked]
        for i, mask in zip(self.masked, masks):
            self.params["allowed"][i] = mask.data_ptr()
        return masks


class _DeviceSampling:
    """`sample` in one launch per batch: same order of operations and same noise, weights in float32."""

    def __init__(self, device: torch.device):
        self._kernel = DeviceSampler(device)
        self._batch = _DeviceBatch([])

    def sample(self, logits: Tensor, rows: Sequence[RowState]) -> list[Sampled | LogitsError]:
        if not self._batch.matches(rows):
            self._batch = _DeviceBatch(rows)
        batch = self._batch
        masks = batch.fill(logits)
        result = self._kernel.run(logits, batch.params)
        del masks  # the kernel has run
        out: list[Sampled | LogitsError] = []
        for i, (token, peak, logprob) in enumerate(result[:, : LOGPROB + 1].tolist()):
            count = batch.logprobs[i]
            if not math.isfinite(peak):
                out.append(_unusable(peak))
            elif count is None:
                out.append(Sampled(int(token)))
            else:
                ids = result[i, TOP_IDS : TOP_IDS + count].astype(int).tolist()
                values = result[i, TOP_LOGPROBS : TOP_LOGPROBS + count].tolist()
                out.append(Sampled(int(token), logprob, tuple(zip(ids, values))))
        return out


def seed_for(options: SamplingParams, choice: int = 0) -> int:
    """The seed of one of a request's `n` choices; fresh entropy when the options name none."""
    seed = secrets.randbits(64) if options.seed is None else options.seed & _MASK64
    return _mix64(seed + choice * _GOLDEN64) if choice else seed


class Sampler:
    """Draws for running requests, and remembers what their penalties have to know."""

    def __init__(self) -> None:
        self._rows: WeakKeyDictionary[Request, RowState] = WeakKeyDictionary()
        self._on_device: _DeviceSampling | None = None

    def prepare(self, device: torch.device, vocab_size: int) -> None:
        """Compile and use the CUDA sampling kernel where it supports the device and the vocabulary."""
        if self._on_device is None and DeviceSampler.supported(device, vocab_size):
            self._on_device = _DeviceSampling(device)

    def _sample(self, logits: Tensor, rows: Sequence[RowState]) -> list[Sampled | LogitsError]:
        if self._on_device is None or not logits.is_cuda or all(row.plain_greedy for row in rows):
            return sample(logits, rows)
        return self._on_device.sample(logits.float(), rows)

    def draw(
        self, pairs: Sequence[tuple[Request, Tensor]]
    ) -> list[tuple[int, TokenLogprob | None] | LogitsError]:
        """The next token of each request, from its row of logits [vocab]; nothing is booked."""
        if not pairs:
            return []
        rows = [self._row(request, logits) for request, logits in pairs]
        logits = pairs[0][1][None] if len(pairs) == 1 else torch.stack([row for _, row in pairs])
        return [
            drawn if isinstance(drawn, LogitsError) else (drawn.token, _token_logprob(drawn))
            for drawn in self._sample(logits, rows)
        ]

    def draw_along(
        self, request: Request, logits: Tensor, draft_tokens: Sequence[int]
    ) -> list[tuple[int, TokenLogprob | None] | LogitsError]:
        """The tokens that would be drawn one after the other from rows [1 + guesses, vocab], where each row was
        computed behind the guesses before it: up to the first that is not what was guessed. Nothing is booked."""
        row = self._row(request, logits)
        out: list[tuple[int, TokenLogprob | None] | LogitsError] = []
        for number in range(len(logits)):
            (drawn,) = self._sample(logits[number : number + 1], [row])
            if isinstance(drawn, LogitsError):
                return [*out, drawn]
            out.append((drawn.token, _token_logprob(drawn)))
            if number == len(draft_tokens) or drawn.token != draft_tokens[number]:
                break
            row.accept(drawn.token)  # ahead of its request until the token is booked there
        return out

    def guess(self, pairs: Sequence[tuple[Request, Tensor]], ahead: int) -> list[int]:
        """What each request would draw from a guessed row [vocab], `ahead` tokens behind its next one.

        The noise is that of the very draw which will judge the guess, so that similar distributions agree often."""
        logits = torch.stack([row for _, row in pairs]).float()
        tokens = logits.argmax(-1).tolist()
        drawn = [i for i, (request, _) in enumerate(pairs) if not request.options.greedy]
        if drawn:
            log_weights = _truncate(logits[drawn].double(), [pairs[i][0].options for i in drawn])
            races = [_Race(pairs[i][0].seed, len(pairs[i][0].output_ids) + ahead) for i in drawn]
            for i, token in zip(drawn, _race(log_weights, races).tolist()):
                tokens[i] = token
        return tokens

    def _row(self, request: Request, logits: Tensor) -> RowState:
        """The request's state, brought up to the tokens it has accepted since."""
        row = self._rows.get(request)
        if row is None or row.step > len(request.output_ids):  # new, or tokens were taken back
            row = self._rows[request] = RowState(
                request.options,
                logits.shape[-1],
                seed=request.seed,
                prompt_ids=request.prompt_ids,
                eos_ids=request.eos_ids,
                device=logits.device,
                mask=request.mask,
            )
        for token in request.output_ids[row.step :]:
            row.accept(token)
        return row


def sample(logits: Tensor, rows: Sequence[RowState]) -> list[Sampled | LogitsError]:
    """One token per row of `logits` [n, vocab]; a row without a number to choose by gets an error in its place."""
    assert logits.ndim == 2 and logits.shape[0] == len(rows), (
        f"{tuple(logits.shape)} logits for {len(rows)} rows"
    )
    logits = logits.float()
    if all(row.plain_greedy for row in rows):
        peaks, tokens = logits.max(-1)  # a NaN would win
        return [
            Sampled(token) if math.isfinite(peak) else _unusable(peak)
            for peak, token in zip(peaks.tolist(), tokens.tolist())
        ]
    raw = logits
    changed = [i for i, row in enumerate(rows) if row.reshapes_logits or not row.may_end]
    if changed:
        logits = logits.clone()
        for i in changed:
            logits[i] = rows[i].reshape(raw[i])
    peaks, tokens = logits.max(-1)
    peak_list, token_list = peaks.tolist(), tokens.tolist()
    usable = [math.isfinite(peak) for peak in peak_list]
    drawn = [i for i, row in enumerate(rows) if usable[i] and not row.options.greedy]
    if drawn:
        log_weights = _truncate(logits[drawn].double(), [rows[i].options for i in drawn])
        for i, token in zip(drawn, _race(log_weights, [rows[i] for i in drawn]).tolist()):
            token_list[i] = token
    out: list[Sampled | LogitsError] = []
    for i, row in enumerate(rows):
        if not usable[i]:
            out.append(_unusable(peak_list[i]))
        elif row.options.logprobs is None:
            out.append(Sampled(token_list[i]))
        else:
            out.append(_with_logprobs(raw[i], token_list[i], row.options.logprobs))
    return out


def _truncate(logits: Tensor, options: Sequence[SamplingParams]) -> Tensor:
    """Temperature, top-k, top-p, min-p on [m, vocab] float64: log-weights, largest 0, refused tokens -inf."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    scaled = (logits - logits.amax(-1, keepdim=True)) / column([o.temperature for o in options])
    if rows := [i for i, o in enumerate(options) if 0 < o.top_k < logits.shape[-1]]:
        places = torch.tensor([[options[i].top_k - 1] for i in rows], device=logits.device)
        best = scaled[rows].topk(max(options[i].top_k for i in rows)).values
        last_in = best.gather(-1, places)  # [rows, 1]
        scaled[rows] = scaled[rows].masked_fill(
            scaled[rows] < last_in, -math.inf
        )  # ties with the last one stay
    if rows := [i for i, o in enumerate(options) if o.top_p < 1.0]:
        scaled[rows] = _nucleus(scaled[rows], column([options[i].top_p for i in rows]))
    if any(o.min_p for o in options):  # relative to the largest, which is 0
        floor = column([math.log(o.min_p) if o.min_p else -math.inf for o in options])
        scaled = scaled.masked_fill(scaled < floor, -math.inf)
    return scaled


def _nucleus(log_weights: Tensor, top_p: Tensor) -> Tensor:
    """Keep the fewest most likely tokens that reach `top_p` together; lower ids first on a tie.

    Weights are counted in whole numbers: integer sums are exact in any order, so neither the number of rows nor the
    device's way of adding can move the border.
    """
    ordered, order = log_weights.sort(dim=-1, descending=True, stable=True)
    mass = (ordered.exp() * _MASS).long()
    before = mass.cumsum(-1) - mass  # what the better ones have already
    beyond = before >= top_p * mass.sum(-1, keepdim=True)
    return log_weights.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -math.inf)


class _Race(NamedTuple):
    """Which noise a draw uses."""

    seed: int
    step: int


def _race(log_weights: Tensor, rows: Sequence[RowState | _Race]) -> Tensor:
    """The winning token of each row [m, vocab]."""
    keys = [_mix64(_mix64(row.seed) + (row.step + 1) * _GOLDEN64) for row in rows]
    device = log_weights.device
    low = torch.tensor([_signed32(key) for key in keys], dtype=torch.int32, device=device)[:, None]
    high = torch.tensor([_signed32(key >> 32) for key in keys], dtype=torch.int32, device=device)[:, None]
    token = torch.arange(log_weights.shape[-1], dtype=torch.int32, device=device)
    noise = _mix32_(_mix32_(token ^ low) ^ high)  # 32 bits for each (row, token)
    uniform = (noise.double() + (2**31 + 0.5)) / 2**32  # inside (0, 1)
    return (log_weights.exp() / -uniform.log()).argmax(-1)


def _mix32_(x: Tensor) -> Tensor:
    """In place: a bijection of 32-bit numbers in which every input bit reaches every output bit."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # the mask makes the shift of a signed number a logical one
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed32(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _signed32(x: int) -> int:
    return ((x + 2**31) & _MASK32) - 2**31


def _mix64(x: int) -> int:
    """The output function of SplitMix64."""
    x &= _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def _mix64_array(x: np.ndarray) -> np.ndarray:
    """`_mix64` of an array of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _with_logprobs(raw: Tensor, token: int, count: int) -> Sampled:
    logprobs = raw.double().log_softmax(-1)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        last_in = logprobs.topk(min(count, raw.numel())).values[-1]
        ids = (logprobs >= last_in).nonzero()[:, 0]  # in id order, so that a stable sort puts lower ids first
        values, order = logprobs[ids].sort(descending=True, stable=True)
        top = tuple(zip(ids[order][:count].tolist(), values[:count].tolist()))
    return Sampled(token, float(logprobs[token]), top)


def _token_logprob(drawn: Sampled) -> TokenLogprob | None:
    return None if drawn.logprob is None else TokenLogprob(drawn.token, drawn.logprob, drawn.top_logprobs)


def _unusable(peak: float) -> LogitsError:
    seen = "NaN" if math.isnan(peak) else "no token above minus infinity" if peak < 0 else "infinite values"
    return LogitsError(
        f"the logits of this step hold {seen}, expected finite numbers. An edit may be too strong, or every token "
        "is banned; lower its scale or loosen logit_bias and min_tokens."
    )
