"""Samples tokens from logits, for a batch of independent requests.

Order per row: repetition, presence and frequency penalties; logit bias; the ban on ending before `min_tokens`; the
request's token mask; temperature; top-k; top-p; min-p; sample. Log-probabilities are the model's own: the log-softmax
of the raw logits before any of these steps, so they mean the same at every setting.

Sampling is an exponential race: the token with the largest p_i / E_i wins, with exponential noise E_i hashed from
(seed, step, i), so token i wins with probability p_i. Hashing, dividing and taking a maximum treat every element
separately: a request's tokens are the same bits whatever else is in the batch, and there is no generator state, so any
step can be sampled again. Greedy takes the largest logit, the lowest id on a tie. A row without finite logits yields a
`LogitsError` as its value and does not affect other rows.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from birkhoff.engine.request import Request, TokenLogprob, TokenMask
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import LogitsError
from birkhoff.kernels.row_index import to_device
from birkhoff.kernels.sample.device import LOGPROB, ROW_PARAMS, TOP_IDS, TOP_LOGPROBS, DeviceSampler

_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_MASS = 2**40  # integer weight of the most likely token in top-p


class Sampled(NamedTuple):
    """One sampled token, with log-probabilities if the parameters request them; alternatives most likely first."""

    token: int
    logprob: TokenLogprob | None = None


class SamplingState:
    """Sampler state of one running request: token counts for penalties and the token mask."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        *,
        seed: int,
        prompt_ids: Sequence[int] = (),
        eos_ids: Iterable[int] = (),
        device: torch.device | str = "cpu",
        mask: TokenMask | None = None,
    ) -> None:
        params.check_vocabulary(vocab_size)
        self.params = params
        self.seed = seed
        self.step = 0  # tokens accepted so far
        self._mask = mask
        self._accepted = list[int]()
        # Without waiting for the device: a state is made while the prompt is computed.
        self._ending = to_device(np.array(sorted({*eos_ids, *params.stop_token_ids}), np.int64), device)
        self._bias_ids = to_device(np.array([token for token, _ in params.logit_bias], np.int64), device)
        self._biases = to_device(np.array([bias for _, bias in params.logit_bias], np.float32), device)
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(list(prompt_ids), dtype=torch.long, device=device)] = True
        self._record: np.ndarray[Any, np.dtype[np.void]] | None = None
        self._plain_greedy = params.greedy and not self.reshapes_logits and params.logprobs is None

    @property
    def reshapes_logits(self) -> bool:
        return self.params.reshapes_logits or self._mask is not None

    def plain_greedy(self, ahead: int = 0) -> bool:
        """Whether the sample is the largest logit, with nothing else to compute."""
        return self._plain_greedy and self.step + ahead >= self.params.min_tokens

    def accept(self, token: int) -> None:
        """Update the state with an accepted token."""
        self.step += 1
        if self._mask is not None:
            self._accepted.append(token)
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True

    def ahead(self, token: int, vocab_size: int) -> SamplingState:
        """The state after `token`, which may be rejected: this state stays as it is.

        After a token that the mask forbids, which is rejected in any case, it is this state itself."""
        if self._mask is not None and not bool(self._mask.allowed(self._accepted, vocab_size)[token]):
            return self
        state = copy(self)
        state._accepted = list(self._accepted)
        if self._counts is not None or self._seen is not None:
            state._counts = None if self._counts is None else self._counts.clone()
            state._seen = None if self._seen is None else self._seen.clone()
            state._record = None  # it has the addresses of both
        state.accept(token)
        return state

    def reshape(self, logits: Tensor, ahead: int = 0) -> Tensor:
        """Apply penalties, bias, `min_tokens` and the mask to a copy of one row [vocab]."""
        params = self.params
        if self._seen is not None:
            r = params.repetition_penalty
            logits = torch.where(self._seen, torch.where(logits > 0, logits / r, logits * r), logits)
        if self._counts is not None:
            seen = (self._counts > 0).float()
            logits = logits - params.frequency_penalty * self._counts - params.presence_penalty * seen
        if params.logit_bias:
            logits = logits.index_add(0, self._bias_ids, self._biases)
        if self.num_banned(ahead):
            logits = logits.index_fill(0, self._ending, -math.inf)
        if self._mask is not None:
            allowed = self._mask.allowed(self._accepted, logits.shape[-1]).to(logits.device)
            logits = logits.masked_fill(~allowed, -math.inf)
        return logits

    def device_record(self) -> np.ndarray[Any, np.dtype[np.void]]:
        """This request's parameters for the CUDA kernel; the noise key of a step is filled in separately."""
        if self._record is None:
            params = self.params
            record = np.zeros((), ROW_PARAMS)
            record["inv_temperature"] = 1.0 if params.greedy else 1.0 / params.temperature
            record["top_p"] = params.top_p
            record["min_log_weight"] = math.log(params.min_p) if params.min_p else -math.inf
            record["repetition"] = params.repetition_penalty
            record["presence"] = params.presence_penalty
            record["frequency"] = params.frequency_penalty
            record["top_k"] = params.top_k
            record["greedy"] = params.greedy
            record["logprobs"] = -1 if params.logprobs is None else params.logprobs
            record["num_bias"] = len(self._biases)
            record["seen"] = 0 if self._seen is None else self._seen.data_ptr()
            record["counts"] = 0 if self._counts is None else self._counts.data_ptr()
            record["bias_ids"] = self._bias_ids.data_ptr()
            record["biases"] = self._biases.data_ptr()
            record["banned_ids"] = self._ending.data_ptr()
            self._record = record
        return self._record

    def draft_record(self) -> np.ndarray[Any, np.dtype[np.void]]:
        """The parameters of a draft for the CUDA kernel: temperature and truncation alone."""
        record = self.device_record().copy()
        for name in ("num_bias", "seen", "counts", "bias_ids", "biases", "banned_ids"):
            record[name] = 0
        record["repetition"], record["presence"], record["frequency"], record["logprobs"] = 1.0, 0.0, 0.0, -1
        return record

    @property
    def masked(self) -> bool:
        """Whether a mask decides which tokens are allowed."""
        return self._mask is not None

    def allowed(self, vocab_size: int, device: torch.device) -> Tensor:
        """Tokens that the request's mask allows next, bool [vocab] on `device`."""
        assert self._mask is not None
        return self._mask.allowed(self._accepted, vocab_size).to(device)

    def num_banned(self, ahead: int) -> int:
        """How many ending tokens are banned, `ahead` tokens after the next one."""
        return 0 if self.step + ahead >= self.params.min_tokens else len(self._ending)


class _DeviceBatch:
    """Kernel parameters of the rows of the last launch, reused for the same requests in the same order."""

    def __init__(self, states: Sequence[SamplingState]):
        self.states = list(states)
        self.params = np.empty(len(states), ROW_PARAMS)
        for i, state in enumerate(states):
            self.params[i] = state.device_record()
        self.seeds = np.array([_mix64(state.seed) for state in states], np.uint64)
        self.masked = [i for i, state in enumerate(states) if state.masked]
        self.logprobs = [state.params.logprobs for state in states]

    def matches(self, states: Sequence[SamplingState]) -> bool:
        return len(states) == len(self.states) and all(a is b for a, b in zip(states, self.states))

    def fill(self, logits: Tensor, ahead: int) -> list[Tensor]:
        """Write what changes with every step; returns tensors that must live until the kernel has run."""
        _fill_keys(self.params, self.seeds, [state.step + ahead for state in self.states])
        self.params["num_banned"] = [state.num_banned(ahead) for state in self.states]
        masks = [self.states[i].allowed(logits.shape[-1], logits.device) for i in self.masked]
        for i, mask in zip(self.masked, masks):
            self.params["allowed"][i] = mask.data_ptr()
        return masks


def _fill_keys(
    params: np.ndarray[Any, np.dtype[np.void]],
    seeds: np.ndarray[Any, np.dtype[np.uint64]],
    steps: Sequence[int],
) -> None:
    """Write the noise keys of samples after `steps` tokens."""
    keys = _mix64_array(seeds + (np.array(steps, np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN64))
    params["key_low"] = keys & np.uint64(_MASK32)
    params["key_high"] = keys >> np.uint64(32)


@dataclass(frozen=True, eq=False)
class PendingSample:
    """Tokens that a step samples: `tokens` [n] on the device at once; `read` waits for the samples. A row without
    finite logits yields a `LogitsError`."""

    tokens: Tensor
    read: Callable[[], list[Sampled | LogitsError]]

    def select(self, rows: Sequence[int]) -> Tensor:
        """The tokens of some rows, without waiting for them."""
        return self.tokens[to_device(np.array(rows), self.tokens.device)]


class _DeviceSampling:
    """`sample` in one launch per batch: same order of operations and same noise, weights in float32."""

    def __init__(self, device: torch.device):
        self.kernel = DeviceSampler(device)
        self._batch = _DeviceBatch([])

    def launch(self, logits: Tensor, states: Sequence[SamplingState], ahead: int = 0) -> PendingSample:
        """Sample on the device; `ahead` counts tokens that `states` do not know of yet."""
        if not self._batch.matches(states):
            self._batch = _DeviceBatch(states)
        batch = self._batch
        masks = batch.fill(logits, ahead)
        sample = self.kernel.launch(logits, batch.params)

        def read() -> list[Sampled | LogitsError]:
            result = sample.read()
            masks.clear()  # the kernel has run
            return _results(result, batch.logprobs)

        return PendingSample(sample.tokens, read)

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[Sampled | LogitsError]:
        return self.launch(logits, states).read()


def _results(rows: np.ndarray[Any, Any], logprobs: Sequence[int | None]) -> list[Sampled | LogitsError]:
    """Rows of `DeviceSample.read` as samples; two columns are enough where no log-probabilities are wanted."""
    sampled: list[Sampled | LogitsError] = []
    for i, (token, peak) in enumerate(rows[:, :LOGPROB].tolist()):
        count = logprobs[i]
        if not math.isfinite(peak):
            sampled.append(_unusable(peak))
        elif count is None:
            sampled.append(Sampled(int(token)))
        else:
            ids = rows[i, TOP_IDS : TOP_IDS + count].astype(int).tolist()
            values = rows[i, TOP_LOGPROBS : TOP_LOGPROBS + count].tolist()
            logprob = TokenLogprob(int(token), float(rows[i, LOGPROB]), tuple(zip(ids, values)))
            sampled.append(Sampled(int(token), logprob))
    return sampled


class RowSampling:
    """Samples the rows of one step, of which draft tokens have one each, and then the drafts after them.

    Everything that differs between rows is known before the step has run, so nothing waits for the device unless the
    CUDA kernel cannot be used. Row r is sampled as if the draft tokens before it were right; a draft `ahead` tokens
    after row r has the noise of the sample that will verify it."""

    def __init__(
        self, states: Sequence[SamplingState], logits: Tensor, depth: int, kernel: DeviceSampler | None
    ):
        self._states = states
        self._logits = logits
        self._greedy = all(state.plain_greedy() for state in states)
        self._greedy_drafts = all(state.params.greedy for state in states)
        self._kernel = None if self._greedy and self._greedy_drafts else kernel
        self._masks: list[Tensor] = []
        self._logprobs = [state.params.logprobs for state in states]
        self._on_host: list[Sampled | LogitsError] | None = None
        if self._kernel is not None:
            batch = _DeviceBatch(states)
            self._masks = batch.fill(logits, 0)
            parts = [batch.params]
            records = np.array([state.draft_record() for state in states], ROW_PARAMS)
            for ahead in range(0 if self._greedy_drafts else depth):
                part = records.copy()
                _fill_keys(part, batch.seeds, [state.step + 1 + ahead for state in states])
                parts.append(part)
            self._params = self._kernel.upload(np.concatenate(parts))

    def sample(self) -> tuple[Tensor, Tensor]:
        """The tokens [n] int64 on the device, and what `read` takes, [n, columns] float64."""
        if self._greedy:
            peaks, tokens = self._logits.max(-1)
            return tokens, torch.stack((tokens.double(), peaks.double()), dim=1)
        if self._kernel is not None:
            result = self._kernel.launch_uploaded(self._logits, self._params[: len(self._states)])
            return result[:, 0].long(), result
        self._on_host = sample(self._logits, self._states)
        ids = [0 if isinstance(each, LogitsError) else each.token for each in self._on_host]
        return torch.tensor(ids, device=self._logits.device), self._logits.new_zeros(0, dtype=torch.double)

    def read(self, result: np.ndarray[Any, np.dtype[np.float64]]) -> list[Sampled | LogitsError]:
        """The samples of all rows, from the result on the host."""
        return self._on_host if self._on_host is not None else _results(result, self._logprobs)

    def draft(self, logits: Tensor, ahead: int, rows: Tensor | None = None) -> Tensor:
        """Draft tokens [n] int64 from MTP logits [n, vocab] float32, for all rows or for `rows` [n]."""
        if self._greedy_drafts:
            return logits.argmax(-1)
        if self._kernel is not None:
            count = len(self._states)
            params = self._params[count * (1 + ahead) : count * (2 + ahead)]
            result = self._kernel.launch_uploaded(logits, params if rows is None else params[rows])
            return result[:, 0].long()
        states = self._states if rows is None else [self._states[row] for row in rows.tolist()]
        keys = [_NoiseKey(state.seed, state.step + 1 + ahead) for state in states]
        return _draft(logits, [state.params for state in states], keys)


def seed_for(params: SamplingParams, choice: int = 0) -> int:
    """The seed of one of a request's `n` choices; random when `params` has no seed."""
    seed = secrets.randbits(64) if params.seed is None else params.seed & _MASK64
    return _mix64(seed + choice * _GOLDEN64) if choice else seed


class Sampler:
    """Samples for running requests and keeps their `SamplingState`."""

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Request, SamplingState] = WeakKeyDictionary()
        self._on_device: _DeviceSampling | None = None

    def prepare(self, device: torch.device, vocab_size: int) -> None:
        """Compile and use the CUDA sampling kernel where it supports the device and the vocabulary."""
        if self._on_device is None and DeviceSampler.supported(device, vocab_size):
            self._on_device = _DeviceSampling(device)

    def _sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[Sampled | LogitsError]:
        if self._on_device is None or not logits.is_cuda or all(state.plain_greedy() for state in states):
            return sample(logits, states)
        return self._on_device.sample(logits.float(), states)

    def sample(self, pairs: Sequence[tuple[Request, Tensor]]) -> list[Sampled | LogitsError]:
        """Sample the next token of each request from its row of logits [vocab]; requests are not modified."""
        if not pairs:
            return []
        states = [self._state(request, logits) for request, logits in pairs]
        logits = pairs[0][1][None] if len(pairs) == 1 else torch.stack([row for _, row in pairs])
        return self._sample(logits, states)

    def samples_on_device(self, request: Request) -> bool:
        """Whether the next token can be sampled before the last one is known to the host."""
        params = request.params
        return request.mask is None and not (
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )

    def launch(self, requests: Sequence[Request], logits: Sequence[Tensor], ahead: int) -> PendingSample:
        """Sample one token per request from parts of logits [n, vocab], without waiting for the device.

        The result is for the token `ahead` places after the one that each request gets next."""
        rows = (logits[0] if len(logits) == 1 else torch.cat([*logits])).float()
        states = [self._state(request, rows) for request in requests]
        if self._on_device is not None:
            return self._on_device.launch(rows, states, ahead)
        sampled = sample(rows, states, ahead)
        tokens = [0 if isinstance(each, LogitsError) else each.token for each in sampled]
        return PendingSample(torch.tensor(tokens, device=rows.device), lambda: sampled)

    def verify(
        self, request: Request, logits: Tensor, draft_tokens: Sequence[int]
    ) -> list[Sampled | LogitsError]:
        """Sample one token per row of `logits` [1 + drafts, vocab], up to the first that differs from its draft.

        Each row was computed after the draft tokens before it. The request is not modified."""
        state = self._state(request, logits)
        sampled: list[Sampled | LogitsError] = []
        for row in range(len(logits)):
            (each,) = self._sample(logits[row : row + 1], [state])
            if isinstance(each, LogitsError):
                return [*sampled, each]
            sampled.append(each)
            if row == len(draft_tokens) or each.token != draft_tokens[row]:
                break
            state.accept(each.token)  # ahead of the request, which appends the token later
        return sampled

    def draft(self, pairs: Sequence[tuple[Request, Tensor]], ahead: int) -> list[int]:
        """Sample draft tokens from MTP logits [vocab], `ahead` tokens after each request's next one.

        The noise is that of the sample which will verify the draft, so that similar distributions often agree."""
        logits = torch.stack([row for _, row in pairs]).float()
        requests = [request for request, _ in pairs]
        keys = [_NoiseKey(request.seed, len(request.output_ids) + ahead) for request in requests]
        tokens: list[int] = _draft(logits, [request.params for request in requests], keys).tolist()
        return tokens

    def rows(
        self, requests: Sequence[tuple[Request, Sequence[int]]], logits: Tensor, depth: int
    ) -> RowSampling:
        """Sampling of the rows of `logits` [n, vocab] float32: of each request, its token and its draft tokens. Up to
        `depth` tokens can be drafted after each row. Requests are not modified."""
        states = []
        for request, draft_tokens in requests:
            states.append(self._state(request, logits))
            for token in draft_tokens:
                states.append(states[-1].ahead(token, logits.shape[-1]))
        kernel = None if self._on_device is None or not logits.is_cuda else self._on_device.kernel
        return RowSampling(states, logits, depth, kernel)

    def _state(self, request: Request, logits: Tensor) -> SamplingState:
        """The state of a request, updated with the tokens it has appended since."""
        state = self._states.get(request)
        if state is None or state.step > len(request.output_ids):  # new, or tokens were rejected
            state = self._states[request] = SamplingState(
                request.params,
                logits.shape[-1],
                seed=request.seed,
                prompt_ids=request.prompt_ids,
                eos_ids=request.eos_ids,
                device=logits.device,
                mask=request.mask,
            )
        for token in request.output_ids[state.step :]:
            state.accept(token)
        return state


def sample(logits: Tensor, states: Sequence[SamplingState], ahead: int = 0) -> list[Sampled | LogitsError]:
    """Sample one token per row of `logits` [n, vocab]; a row without finite logits gets a `LogitsError`.

    `ahead` counts sampled tokens that `states` do not know of yet; states must not depend on them."""
    assert logits.ndim == 2 and logits.shape[0] == len(states), (
        f"{tuple(logits.shape)} logits for {len(states)} rows"
    )
    logits = logits.float()
    if all(state.plain_greedy(ahead) for state in states):
        peaks, tokens = logits.max(-1)  # NaN is the maximum of its row
        return [
            Sampled(token) if math.isfinite(peak) else _unusable(peak)
            for peak, token in zip(peaks.tolist(), tokens.tolist())
        ]
    raw = logits
    reshaped = [i for i, state in enumerate(states) if state.reshapes_logits or state.num_banned(ahead)]
    if reshaped:
        logits = logits.clone()
        for i in reshaped:
            logits[i] = states[i].reshape(raw[i], ahead)
    peaks, tokens = logits.max(-1)
    peak_list, token_list = peaks.tolist(), tokens.tolist()
    usable = [math.isfinite(peak) for peak in peak_list]
    random = [i for i, state in enumerate(states) if usable[i] and not state.params.greedy]
    if random:
        log_weights = _truncate(logits[random].double(), [states[i].params for i in random])
        noise = [_NoiseKey(states[i].seed, states[i].step + ahead) for i in random]
        for i, token in zip(random, _race(log_weights, noise).tolist()):
            token_list[i] = token
    results: list[Sampled | LogitsError] = []
    for i, state in enumerate(states):
        if not usable[i]:
            results.append(_unusable(peak_list[i]))
        elif state.params.logprobs is None:
            results.append(Sampled(token_list[i]))
        else:
            results.append(_with_logprobs(raw[i], token_list[i], state.params.logprobs))
    return results


def _draft(logits: Tensor, params: Sequence[SamplingParams], keys: Sequence[_NoiseKey]) -> Tensor:
    """Tokens [n] sampled from rows of [n, vocab] float32 with temperature and truncation alone."""
    tokens = logits.argmax(-1)
    random = [i for i, each in enumerate(params) if not each.greedy]
    if random:
        log_weights = _truncate(logits[random].double(), [params[i] for i in random])
        tokens[random] = _race(log_weights, [keys[i] for i in random])
    return tokens


def _truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply temperature, top-k, top-p and min-p to [m, vocab] float64. Returns log-weights: the largest is 0, excluded
    tokens are -inf."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    scaled = (logits - logits.amax(-1, keepdim=True)) / column([p.temperature for p in params])
    if rows := [i for i, p in enumerate(params) if 0 < p.top_k < logits.shape[-1]]:
        ranks = torch.tensor([[params[i].top_k - 1] for i in rows], device=logits.device)
        best = scaled[rows].topk(max(params[i].top_k for i in rows)).values
        threshold = best.gather(-1, ranks)  # [rows, 1]; ties with the k-th stay
        scaled[rows] = scaled[rows].masked_fill(scaled[rows] < threshold, -math.inf)
    if rows := [i for i, p in enumerate(params) if p.top_p < 1.0]:
        scaled[rows] = _nucleus(scaled[rows], column([params[i].top_p for i in rows]))
    if any(p.min_p for p in params):  # relative to the largest log-weight, which is 0
        floor = column([math.log(p.min_p) if p.min_p else -math.inf for p in params])
        scaled = scaled.masked_fill(scaled < floor, -math.inf)
    return scaled


def _nucleus(log_weights: Tensor, top_p: Tensor) -> Tensor:
    """Keep the fewest most likely tokens whose total probability reaches `top_p`; lower ids first on a tie.

    Weights are integers: integer sums are exact in any order, so the result does not depend on the number of rows or on
    the order in which a device adds.
    """
    ordered, order = log_weights.sort(dim=-1, descending=True, stable=True)
    mass = (ordered.exp() * _MASS).long()
    before = mass.cumsum(-1) - mass  # total weight of the more likely tokens
    beyond = before >= top_p * mass.sum(-1, keepdim=True)
    return log_weights.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -math.inf)


class _NoiseKey(NamedTuple):
    """What the noise of one sample is hashed from, besides the token id."""

    seed: int
    step: int


def _race(log_weights: Tensor, noise_keys: Sequence[_NoiseKey]) -> Tensor:
    """The sampled token of each row of [m, vocab]."""
    keys = [_mix64(_mix64(key.seed) + (key.step + 1) * _GOLDEN64) for key in noise_keys]
    device = log_weights.device
    low = torch.tensor([_signed32(key) for key in keys], dtype=torch.int32, device=device)[:, None]
    high = torch.tensor([_signed32(key >> 32) for key in keys], dtype=torch.int32, device=device)[:, None]
    token = torch.arange(log_weights.shape[-1], dtype=torch.int32, device=device)
    noise = _mix32_(_mix32_(token ^ low) ^ high)  # 32 bits for each (row, token)
    uniform = (noise.double() + (2**31 + 0.5)) / 2**32  # in the open interval (0, 1)
    return (log_weights.exp() / -uniform.log()).argmax(-1)


def _mix32_(x: Tensor) -> Tensor:
    """In-place 32-bit integer hash: a bijection in which every input bit affects every output bit."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # the mask makes the arithmetic shift a logical one
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


def _mix64_array(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`_mix64` of an array of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _with_logprobs(raw: Tensor, token: int, count: int) -> Sampled:
    logprobs = raw.double().log_softmax(-1)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        threshold = logprobs.topk(min(count, raw.numel())).values[-1]
        ids = (logprobs >= threshold).nonzero()[:, 0]  # ascending, so that a stable sort puts lower ids first
        values, order = logprobs[ids].sort(descending=True, stable=True)
        top = tuple(zip(ids[order][:count].tolist(), values[:count].tolist()))
    return Sampled(token, TokenLogprob(token, float(logprobs[token]), top))


def _unusable(peak: float) -> LogitsError:
    seen = "NaN" if math.isnan(peak) else "no token above minus infinity" if peak < 0 else "infinite values"
    return LogitsError(
        f"the logits of this step hold {seen}, expected finite numbers. An edit may be too strong, or every token "
        "is banned; lower its scale or loosen logit_bias and min_tokens."
    )
