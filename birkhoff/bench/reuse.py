"""What is saved by not computing things twice, and by guessing: ratios within one run.

    prefix       a prompt that shares its first tokens with an earlier one, beside the same prompt on an engine without
                 a prefix cache: milliseconds to the first token; `disk` is an engine that finds those pages on disk
    turns        a conversation of several turns, each prompt the one before with an answer and a question more
    speculation  one request decoding with guesses 1 to 3 ahead, always or while it pays, beside plain decoding
    rows         what decoding 1 to 4 tokens in one step costs, and guessing one behind 1 or 2 of them

Contenders take turns within every round, in alternating order; a ratio is the median over rounds of ratios within a
round. Decoding goes by turns of a few tokens, so that whatever else the machine does meets everybody alike, and counts
the time on the clock and the processor's. Answers of all contenders are compared: `same_tokens` says whether they
agree.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import birkhoff
from birkhoff.bench.report import facts, significant, summary
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.memory_plan import pages_for
from birkhoff.engine.model_identity import model_identity
from birkhoff.engine.page_files import PageFiles
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import OptionError
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State

Row = dict[str, Any]
Progress = Callable[[int, int], None]
ROOM = 2**28
TURN = 12  # tokens that a contender writes before the next one does
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
    """What is measured; every row repeats it."""

    shared_tokens: int = 900
    turns: int = 8
    answer_tokens: int = 96
    steps: int = 128
    rounds: int = 5
    threads: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise OptionError(f"{name} is {value}, expected a positive whole number.")


def bench_reuse(
    model: str | Path = "nano", setting: ReuseSetting | None = None, *, progress: Progress | None = None
) -> Iterator[Row]:
    """Measure a checkpoint that has a tokenizer and an MTP block."""
    setting = setting or ReuseSetting()
    done = 0

    def tell() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, 4 * (setting.rounds + 1))

    with birkhoff.load(model, device="cpu", max_requests=1) as engine, _threads(setting.threads):
        if engine.model.mtp is None:
            raise OptionError(
                f"{model} has no MTP block, so there is nothing to guess with. Measure another checkpoint."
            )
        common = {"bench": "reuse", "model": str(model), **vars(setting), **facts()}
        yield common | _prefix(engine, setting, tell)
        yield common | _turns(engine, setting, tell)
        for row in _speculation(engine, setting, tell):
            yield common | row
        yield common | _rows(engine, setting, tell)


def _core(engine: birkhoff.Engine, tokens: int, **options: Any) -> EngineCore:
    each = pages_for(tokens)
    return EngineCore(engine.model, max_requests=1, max_context=tokens, num_pages=6 * each, **options)


def _run(core: EngineCore, ids: Sequence[int], count: int) -> tuple[Request, float, float]:
    """The request, milliseconds to its first token, and to its last from there."""
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


def _prefix(engine: birkhoff.Engine, setting: ReuseSetting, tell: Callable[[], None]) -> Row:
    length = setting.shared_tokens
    longest = setting.shared_tokens + 32
    drawn = torch.randint(2, engine.config.vocab_size, (setting.rounds + 1, length + 16), generator=_seeded())
    spent: dict[str, list[float]] = {"cold": [], "warm": [], "disk": []}
    cached, same = 0, True
    with tempfile.TemporaryDirectory(prefix="birkhoff-bench-") as folder:
        name = model_identity(engine.model)
        warm = _core(engine, longest, prefix_bytes=ROOM, files=PageFiles(folder, name, ROOM))
        cold = _core(engine, longest)
        for number, ids in enumerate(drawn.tolist()):
            shared, mine = ids[:length], ids[length:]
            _run(warm, [*shared, *mine[:8]], 1)  # somebody else's prompt
            prompt = [*shared, *mine[8:]]
            answers = {}
            for who in ("cold", "warm") if number % 2 else ("warm", "cold"):
                request, first, _ = _run(cold if who == "cold" else warm, prompt, 1)
                answers[who] = (request, first)
            warm.scheduler.prefix.close()  # type: ignore[union-attr]
            later = _core(engine, longest, prefix_bytes=ROOM, files=PageFiles(folder, name, ROOM))
            answers["disk"] = _run(later, prompt, 1)[:2]
            later.close()
            tell()
            if number == 0:
                continue  # the first round only warms up
            for who, (_, first) in answers.items():
                spent[who].append(first)
            cached = answers["warm"][0].cached_tokens or 0
            same &= len({tuple(request.output_ids) for request, _ in answers.values()}) == 1
    cold_ms, warm_ms, disk_ms = spent.values()
    return {
        "kind": "prefix",
        "cached_tokens": cached,
        "cold_ms": summary(cold_ms),
        "warm_ms": summary(warm_ms),
        "disk_ms": summary(disk_ms),
        "times_sooner": summary([c / w for c, w in zip(cold_ms, warm_ms)]),
        "times_sooner_from_disk": summary([c / d for c, d in zip(cold_ms, disk_ms)]),
        "same_tokens": same,
    }


def _turns(engine: birkhoff.Engine, setting: ReuseSetting, tell: Callable[[], None]) -> Row:
    """Cost of reading is the time to every turn's first token; `all_ms` has the writing too."""
    longest = engine.max_context
    reading: dict[str, list[float]] = {"cold": [], "warm": []}
    whole: dict[str, list[float]] = {"cold": [], "warm": []}
    tokens = cached = 0
    same = True
    for number in range(setting.rounds + 1):
        said = {}
        for who in ("cold", "warm") if number % 2 else ("warm", "cold"):
            core = _core(engine, longest, prefix_bytes=ROOM if who == "warm" else 0)
            messages: list[dict[str, str]] = []
            first_ms = all_ms = 0.0
            tokens = cached = 0
            for turn in range(setting.turns):
                messages.append({"role": "user", "content": STORIES[(turn + number) % len(STORIES)]})
                ids = engine.encode_chat(messages)
                request, first, rest = _run(core, ids, setting.answer_tokens)
                messages.append({"role": "assistant", "content": engine.tokenizer.decode(request.output_ids)})
                first_ms, all_ms = first_ms + first, all_ms + first + rest
                tokens = tokens + len(ids)
                cached = cached + (request.cached_tokens or 0)
            said[who] = [message["content"] for message in messages]
            core.close()
            if number:
                reading[who].append(first_ms)
                whole[who].append(all_ms)
        same &= said["cold"] == said["warm"]
        tell()
    return {
        "kind": "turns",
        "prompt_tokens": tokens,
        "cold_ms": summary(reading["cold"]),
        "warm_ms": summary(reading["warm"]),
        "share_of_recomputation": summary([w / c for w, c in zip(reading["warm"], reading["cold"])]),
        "all_cold_ms": summary(whole["cold"]),
        "all_warm_ms": summary(whole["warm"]),
        "same_tokens": same,
    }


@dataclass
class _TimedAnswer:
    """One contender's request, and what its tokens after the first have cost."""

    core: EngineCore
    request: Request
    seconds: float = 0.0
    processor_seconds: float = 0.0
    steps: int = 0
    tokens: int = 0

    def go_on(self, tokens: int) -> None:
        before = len(self.request.output_ids)
        began = time.perf_counter()
        processor = time.thread_time()
        while not self.request.done and len(self.request.output_ids) - before < tokens:
            self.core.step()
            self.steps += 1
        self.seconds += time.perf_counter() - began
        self.processor_seconds += time.thread_time() - processor
        self.tokens += len(self.request.output_ids) - before


def _in_turns(
    cores: dict[str, EngineCore], ids: Sequence[int], count: int, order: int
) -> dict[str, _TimedAnswer]:
    """The same prompt for everybody, who then write a few tokens at a time in rotating order."""
    options = SamplingParams(temperature=0, max_tokens=count + 1, ignore_eos=True)
    answers = {
        name: _TimedAnswer(core, Request(tuple(ids), options, count + 1, seed=0))
        for name, core in cores.items()
    }
    for answer in answers.values():
        answer.core.submit(answer.request)
        while not answer.request.output_ids:
            answer.core.step()
    names, turn = list(cores), order
    while not all(answer.request.done for answer in answers.values()):
        for place in range(len(names)):
            answers[names[(place + turn) % len(names)]].go_on(TURN)
        turn += 1
    for answer in answers.values():
        if answer.request.error is not None:
            raise answer.request.error
    return answers


def _speculation(engine: birkhoff.Engine, setting: ReuseSetting, tell: Callable[[], None]) -> list[Row]:
    longest = 64 + setting.steps + 8
    cores = {"plain": _core(engine, longest), "while it pays": _core(engine, longest, draft_depth=1)}
    cores |= {f"{n} ahead": _core(engine, longest, draft_depth=n, draft_always=True) for n in (1, 2, 3)}
    rounds: list[dict[str, _TimedAnswer]] = []
    prompts = [engine.encode_chat([{"role": "user", "content": text}]) for text in STORIES]
    for number in range(setting.rounds + 1):
        answers = _in_turns(cores, prompts[number % len(prompts)], setting.steps, number)
        rounds += [answers] if number else []  # the first round only warms up
        tell()
    pace = cores["while it pays"].controller
    assert pace is not None

    def rate(answer: _TimedAnswer, seconds: str) -> float:
        return answer.tokens / getattr(answer, seconds)

    rows = []
    for name in cores:
        own = [answers[name] for answers in rounds]
        drafted = sum(a.request.drafted for a in own)
        accepted = sum(a.request.accepted for a in own)
        times = {
            key: summary([rate(answers[name], of) / rate(answers["plain"], of) for answers in rounds])
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
def _rows(engine: birkhoff.Engine, setting: ReuseSetting, tell: Callable[[], None]) -> Row:
    """Processor milliseconds of one step of 1 to 4 tokens of one sequence with their logits, and of guessing one more
    behind 1 or 2 of them with the logits it is drawn from; the median over steps, the least of the rounds."""
    model = engine.model
    state = State.contiguous(engine.config, 1, 128, lookback=3, mtp=True)
    ids = torch.randint(2, engine.config.vocab_size, (80,), generator=_seeded()).tolist()
    model.run(Batch.of([SequenceChunk(0, 0, ids[:64])]), state, NoTap())
    least: dict[str, float] = {}
    for _ in range(setting.rounds + 1):
        spent: dict[str, list[float]] = {}
        for at in range(64, 76):
            for count in (1, 2, 3, 4):
                began = time.thread_time()
                batch = Batch.of([SequenceChunk(0, at + n, [ids[at + n]]) for n in range(count)])
                hidden, streams = model.run(batch, state, NoTap())
                model.logits(hidden)
                spent.setdefault(f"verify_{count}", []).append(time.thread_time() - began)
                if count <= 2:
                    began = time.thread_time()
                    pieces = [SequenceChunk(0, at + n, [ids[at + n + 1]]) for n in range(count)]
                    hidden, _ = model.draft(streams, Batch.of(pieces), state)
                    model.logits(hidden[-1:])
                    spent.setdefault(f"guess_behind_{count}", []).append(time.thread_time() - began)
        for name, values in spent.items():
            least[name] = min(least.get(name, float("inf")), sorted(values)[len(values) // 2] * 1e3)
        tell()
    return {
        "kind": "rows",
        "step_ms": {name: significant(ms) for name, ms in least.items()},
        "same_tokens": True,
    }


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
