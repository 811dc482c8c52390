"""Gain of the prefix cache, of multi-turn reuse and of speculative decoding: ratios within one run.

    prefix       a prompt that shares its first tokens with an earlier one, compared with the same prompt on an engine
                 without prefix cache: milliseconds to the first token; `disk` is an engine that finds the pages on disk
    turns        a conversation of several turns; each prompt is the previous one plus an answer and a question
    speculation  one request decoding with 1 to 3 draft tokens, always or while it pays, compared with plain decoding
    rows         cost of decoding 1 to 4 tokens in one step, and of drafting one token after 1 or 2 of them

The contenders alternate within every round, in changing order; a ratio is the median over rounds of ratios within a
round. Decoding alternates every few tokens, so that other load affects all contenders alike; wall time and CPU time are
measured. The answers of all contenders are compared: `same_tokens` reports whether they agree.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import birkhoff
from birkhoff.bench.report import Progress, Row, check_positive, facts, significant, summary
from birkhoff.bench.timing import torch_threads
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.model_identity import model_identity
from birkhoff.engine.page_files import PageFiles
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import OptionError
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.cache_size import pages_for
from birkhoff.model.state import State

PREFIX_BYTES = 2**28
TOKENS_PER_TURN = 12  # tokens that a contender decodes before the next one continues
STORIES = (
    "Tell me a story about a dog and a red ball.",
    "Write a story about a girl who finds a key.",
    "Tell a story about a boat in a storm.",
    "Write a story about an old clock that stops.",
    "Tell me about a fox who wanted to fly.",
    "Write about two friends and a lost letter.",
    "Tell a story about the last apple on a tree.",
    "Write a story about a quiet mountain.",
)


@dataclass(frozen=True)
class ReuseSetting:
    """Parameters, repeated in every row."""

    shared_tokens: int = 900
    turns: int = 8
    answer_tokens: int = 96
    steps: int = 128
    rounds: int = 5
    threads: int = 2

    def __post_init__(self) -> None:
        check_positive(self)


def bench_reuse(
    model: str | Path = "nano", setting: ReuseSetting | None = None, *, progress: Progress | None = None
) -> Iterator[Row]:
    """Measure a checkpoint that has a tokenizer and an MTP block."""
    setting = setting or ReuseSetting()
    done = 0

    def report() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, 4 * (setting.rounds + 1))

    with birkhoff.load(model, device="cpu", max_requests=1) as engine, torch_threads(setting.threads):
        if engine.v4_model.mtp is None:
            raise OptionError(
                f"{model} has no MTP block, so there is nothing to guess with. Measure another checkpoint."
            )
        common = {"bench": "reuse", "model": str(model), **vars(setting), **facts()}
        yield common | _prefix(engine, setting, report)
        yield common | _turns(engine, setting, report)
        for row in _speculation(engine, setting, report):
            yield common | row
        yield common | _rows(engine, setting, report)


def _core(engine: birkhoff.Engine, tokens: int, **options: Any) -> EngineCore:
    pages = pages_for(tokens)
    return EngineCore(engine.model, max_requests=1, max_context=tokens, num_pages=6 * pages, **options)


def _run(core: EngineCore, ids: Sequence[int], count: int) -> tuple[Request, float, float]:
    """Run one request; the request, milliseconds to its first token and from there to its last."""
    options = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    began = time.perf_counter()
    request = Request(tuple(ids), options, count, seed=0)
    core.submit(request)
    while not request.output_ids:
        core.step()
    first = time.perf_counter()
    while not request.done:
        core.step()
    if request.error is not None:
        raise request.error
    return request, (first - began) * 1e3, (time.perf_counter() - first) * 1e3


def _prefix(engine: birkhoff.Engine, setting: ReuseSetting, report: Callable[[], None]) -> Row:
    length = setting.shared_tokens
    max_context = setting.shared_tokens + 32
    samples = torch.randint(
        2, engine.config.vocab_size, (setting.rounds + 1, length + 16), generator=_seeded()
    )
    milliseconds: dict[str, list[float]] = {"cold": [], "warm": [], "disk": []}
    cached, same_tokens = 0, True
    with tempfile.TemporaryDirectory(prefix="birkhoff-bench-") as folder:
        name = model_identity(engine.v4_model)
        warm = _core(
            engine, max_context, prefix_bytes=PREFIX_BYTES, files=PageFiles(folder, name, PREFIX_BYTES)
        )
        cold = _core(engine, max_context)
        for round_index, ids in enumerate(samples.tolist()):
            shared, suffix = ids[:length], ids[length:]
            _run(warm, [*shared, *suffix[:8]], 1)  # an earlier prompt with the same prefix
            prompt = [*shared, *suffix[8:]]
            results = {}
            for contender in ("cold", "warm") if round_index % 2 else ("warm", "cold"):
                request, first, _ = _run(cold if contender == "cold" else warm, prompt, 1)
                results[contender] = (request, first)
            warm.scheduler.prefix.close()  # type: ignore[union-attr]
            reloaded = _core(
                engine, max_context, prefix_bytes=PREFIX_BYTES, files=PageFiles(folder, name, PREFIX_BYTES)
            )
            results["disk"] = _run(reloaded, prompt, 1)[:2]
            reloaded.close()
            report()
            if round_index == 0:
                continue  # the first round is a warm-up
            for contender, (_, first) in results.items():
                milliseconds[contender].append(first)
            cached = results["warm"][0].cached_tokens or 0
            same_tokens &= len({tuple(request.output_ids) for request, _ in results.values()}) == 1
    cold_ms, warm_ms, disk_ms = milliseconds.values()
    return {
        "kind": "prefix",
        "cached_tokens": cached,
        "cold_ms": summary(cold_ms),
        "warm_ms": summary(warm_ms),
        "disk_ms": summary(disk_ms),
        "times_sooner": summary([c / w for c, w in zip(cold_ms, warm_ms)]),
        "times_sooner_from_disk": summary([c / d for c, d in zip(cold_ms, disk_ms)]),
        "same_tokens": same_tokens,
    }


def _turns(engine: birkhoff.Engine, setting: ReuseSetting, report: Callable[[], None]) -> Row:
    """`cold_ms` and `warm_ms` sum the time to the first token of every turn; `all_…` include the decoding."""
    max_context = engine.max_context
    prefill_ms: dict[str, list[float]] = {"cold": [], "warm": []}
    total_ms: dict[str, list[float]] = {"cold": [], "warm": []}
    tokens = cached = 0
    same_tokens = True
    for round_index in range(setting.rounds + 1):
        transcripts = {}
        for contender in ("cold", "warm") if round_index % 2 else ("warm", "cold"):
            core = _core(engine, max_context, prefix_bytes=PREFIX_BYTES if contender == "warm" else 0)
            messages: list[dict[str, str]] = []
            first_ms = all_ms = 0.0
            tokens = cached = 0
            for turn in range(setting.turns):
                messages.append({"role": "user", "content": STORIES[(turn + round_index) % len(STORIES)]})
                ids = engine.encode_chat(messages)
                request, first, rest = _run(core, ids, setting.answer_tokens)
                messages.append({"role": "assistant", "content": engine.tokenizer.decode(request.output_ids)})
                first_ms, all_ms = first_ms + first, all_ms + first + rest
                tokens = tokens + len(ids)
                cached = cached + (request.cached_tokens or 0)
            transcripts[contender] = [message["content"] for message in messages]
            core.close()
            if round_index:
                prefill_ms[contender].append(first_ms)
                total_ms[contender].append(all_ms)
        same_tokens &= transcripts["cold"] == transcripts["warm"]
        report()
    return {
        "kind": "turns",
        "prompt_tokens": tokens,
        "cold_ms": summary(prefill_ms["cold"]),
        "warm_ms": summary(prefill_ms["warm"]),
        "share_of_recomputation": summary([w / c for w, c in zip(prefill_ms["warm"], prefill_ms["cold"])]),
        "all_cold_ms": summary(total_ms["cold"]),
        "all_warm_ms": summary(total_ms["warm"]),
        "same_tokens": same_tokens,
    }


@dataclass
class _TimedAnswer:
    """The request of one contender, and the cost of its tokens after the first."""

    core: EngineCore
    request: Request
    seconds: float = 0.0
    processor_seconds: float = 0.0
    steps: int = 0
    tokens: int = 0

    def decode(self, tokens: int) -> None:
        before = len(self.request.output_ids)
        began = time.perf_counter()
        processor = time.thread_time()
        while not self.request.done and len(self.request.output_ids) - before < tokens:
            self.core.step()
            self.steps += 1
        self.seconds += time.perf_counter() - began
        self.processor_seconds += time.thread_time() - processor
        self.tokens += len(self.request.output_ids) - before


def _interleaved(
    cores: dict[str, EngineCore], ids: Sequence[int], count: int, order: int
) -> dict[str, _TimedAnswer]:
    """The same prompt on all engines, which then decode a few tokens at a time in rotating order."""
    options = SamplingParams(temperature=0, max_tokens=count + 1, ignore_eos=True)
    results = {
        name: _TimedAnswer(core, Request(tuple(ids), options, count + 1, seed=0))
        for name, core in cores.items()
    }
    for answer in results.values():
        answer.core.submit(answer.request)
        while not answer.request.output_ids:
            answer.core.step()
    names, turn = list(cores), order
    while not all(answer.request.done for answer in results.values()):
        for offset in range(len(names)):
            results[names[(offset + turn) % len(names)]].decode(TOKENS_PER_TURN)
        turn += 1
    for answer in results.values():
        if answer.request.error is not None:
            raise answer.request.error
    return results


def _speculation(engine: birkhoff.Engine, setting: ReuseSetting, report: Callable[[], None]) -> list[Row]:
    max_context = 64 + setting.steps + 8
    cores = {"plain": _core(engine, max_context), "while it pays": _core(engine, max_context, draft_depth=1)}
    cores |= {f"{n} ahead": _core(engine, max_context, draft_depth=n, draft_always=True) for n in (1, 2, 3)}
    rounds: list[dict[str, _TimedAnswer]] = []
    prompts = [engine.encode_chat([{"role": "user", "content": text}]) for text in STORIES]
    for round_index in range(setting.rounds + 1):
        results = _interleaved(cores, prompts[round_index % len(prompts)], setting.steps, round_index)
        rounds += [results] if round_index else []  # the first round is a warm-up
        report()
    pace = cores["while it pays"].controller
    assert pace is not None

    def rate(answer: _TimedAnswer, seconds: str) -> float:
        return float(answer.tokens / getattr(answer, seconds))

    rows = []
    for name in cores:
        own = [results[name] for results in rounds]
        drafted = sum(a.request.drafted for a in own)
        accepted = sum(a.request.accepted for a in own)
        times = {
            key: summary([rate(results[name], of) / rate(results["plain"], of) for results in rounds])
            for key, of in (("times_plain", "seconds"), ("times_plain_by_processor", "processor_seconds"))
        }
        rows.append(
            {
                "kind": "speculation",
                "contender": name,
                "batch": 1,
                "tokens_per_second": summary([rate(a, "seconds") for a in own]),
                "tokens_per_processor_second": summary([rate(a, "processor_seconds") for a in own]),
                **times,
                "tokens_per_step": significant(sum(a.tokens for a in own) / sum(a.steps for a in own)),
                "step_ms": summary([a.processor_seconds / a.steps * 1e3 for a in own]),
                "drafted": drafted,
                "accepted": accepted,
                "acceptance": significant(accepted / drafted) if drafted else None,
                "same_tokens": all(
                    a[name].request.output_ids == a["plain"].request.output_ids for a in rounds
                ),
                **({"pace": pace.report()} if name == "while it pays" else {}),
            }
        )
    return rows


@torch.inference_mode()
def _rows(engine: birkhoff.Engine, setting: ReuseSetting, report: Callable[[], None]) -> Row:
    """CPU milliseconds of one step of 1 to 4 tokens of one sequence including their logits, and of drafting one token
    after 1 or 2 of them including its logits; the median over steps, the minimum over rounds."""
    model = engine.v4_model
    state = State.contiguous(model.config, 1, 128, lookback=3, mtp=True)
    ids = torch.randint(2, engine.config.vocab_size, (80,), generator=_seeded()).tolist()
    model.run(Batch.of([SequenceChunk(0, 0, ids[:64])]), state, NoTap())
    best: dict[str, float] = {}
    for _ in range(setting.rounds + 1):
        milliseconds: dict[str, list[float]] = {}
        for position in range(64, 76):
            for count in (1, 2, 3, 4):
                began = time.thread_time()
                batch = Batch.of([SequenceChunk(0, position + n, [ids[position + n]]) for n in range(count)])
                hidden, streams = model.run(batch, state, NoTap())
                model.logits(hidden)
                milliseconds.setdefault(f"verify_{count}", []).append(time.thread_time() - began)
                if count <= 2:
                    began = time.thread_time()
                    chunks = [SequenceChunk(0, position + n, [ids[position + n + 1]]) for n in range(count)]
                    hidden, _ = model.draft(streams, Batch.of(chunks), state)
                    model.logits(hidden[-1:])
                    milliseconds.setdefault(f"guess_behind_{count}", []).append(time.thread_time() - began)
        for name, values in milliseconds.items():
            best[name] = min(best.get(name, float("inf")), sorted(values)[len(values) // 2] * 1e3)
        report()
    return {
        "kind": "rows",
        "step_ms": {name: significant(ms) for name, ms in best.items()},
        "same_tokens": True,
    }


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
