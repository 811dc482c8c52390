"""Speculative decoding at full width on a GPU, at a chosen acceptance rate, next to plain decoding in the same run.

Random weights never agree on a token, so the rate is forced, by means that leave the engine as it is:

- `make_predictable` rearranges embedding and head such that each token has one clear successor, and gives the MTP
  block the matrix that predicts the same one. Drafts are then right, whatever the other weights are.
- `SpoiledSpeculator` replaces each draft with probability 1 - rate by another token, between two steps.

Everything else runs as it does for a user: scheduling, sampling, verification and drafting. All engines must give the
same tokens. Three of them are timed: without speculation, with it (`always`), and with it while it is faster (`auto`),
after a round in which graphs are recorded and `auto` has decided.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import torch

from birkhoff.bench.decode import device_facts
from birkhoff.bench.report import Row, significant
from birkhoff.bench.synthetic import random_on_device
from birkhoff.bench.timing import median, release_memory, synchronize
from birkhoff.config import PAGE_TOKENS
from birkhoff.convert.presets import preset
from birkhoff.engine.draft_chain import PendingSamples
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.request import Request
from birkhoff.engine.runner import ModelOutput
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.engine.scheduler import ScheduledChunk
from birkhoff.engine.speculation import Speculator
from birkhoff.model.mtp import MTP
from birkhoff.model.transformer import Transformer

CLEAR = 64.0  # how much larger embeddings are than what a layer adds to the streams
ROUNDS = 3  # timed generations of each engine, by turns
MODES = ("off", "always", "auto")


def make_predictable(model: Transformer, seed: int = 0) -> torch.Tensor:
    """Give each token one clear successor in the trunk and in the MTP block; returns the successors [vocab].

    Embeddings dominate the streams, and the head has the embedding of token t in the row of its successor. The MTP
    block passes on the embedding of its token. Must be called before a decoder reads the weights."""
    assert isinstance(model.mtp, MTP), "the model was built without its MTP block"
    generator = torch.Generator().manual_seed(seed)
    successors = torch.randperm(model.config.vocab_size, generator=generator)
    with torch.no_grad():
        head = torch.empty_like(model.head.weight)
        head[successors.to(head.device)] = (model.embed * model.config.hidden_size**-0.5).to(head.dtype)
        model.head.weight.copy_(head)
        model.embed.mul_(CLEAR)
        projection = model.mtp.e_proj
        identity = CLEAR * torch.eye(len(projection.codes), device=projection.codes.device)
        projection.codes.copy_(identity.to(projection.codes.dtype))
        projection.scale.fill_(127)  # 2^0
    return successors


class SpoiledSpeculator(Speculator):
    """Replaces drafts by other tokens with probability 1 - `rate`."""

    rate = 1.0
    random = random.Random(0)

    def draft(
        self,
        chunks: Sequence[ScheduledChunk],
        outputs: Sequence[ModelOutput | None],
        pending: PendingSamples | None = None,
    ) -> int:
        count = super().draft(chunks, outputs, pending)
        vocab_size = self.model.config.vocab_size
        for chunk in chunks:
            chunk.request.draft_tokens = tuple(
                token if self.random.random() < self.rate else (token + 1) % vocab_size
                for token in chunk.request.draft_tokens
            )
        return count


def make_engine(
    model: Transformer, mode: str, batch: int, tokens: int, depth: int, rate: float, device: torch.device
) -> EngineCore:
    """An engine for `batch` requests of `tokens` tokens."""
    core = EngineCore(
        model,
        max_requests=batch,
        max_context=tokens,
        num_pages=batch * -(-tokens // PAGE_TOKENS),
        max_batch_tokens=2048,
        draft_depth=0 if mode == "off" else depth,
        draft_always=mode == "always",
        device=device,
    )
    given = core.speculator
    if given is not None:
        spoiled = SpoiledSpeculator(
            model, given.state, given.sampler, given.depth, given.controller, given.chain
        )
        spoiled.rate, spoiled.random = rate, random.Random(1)
        core.speculator = core.runner.speculator = spoiled
    return core


class Generation:
    """One timed round: prompts are read first, then every request generates `steps` tokens."""

    def __init__(self, core: EngineCore, prompts: Sequence[Sequence[int]], steps: int):
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        requests = [Request(tuple(prompt), params, steps, seed=0) for prompt in prompts]
        core.submit(*requests)
        while any(not request.output_ids for request in requests):
            core.step()
        before = sum(len(request.output_ids) for request in requests)
        synchronize(core.runner.state.device)
        began = time.perf_counter()
        self.num_steps = 0
        while core.step():
            self.num_steps += 1
        self.seconds = time.perf_counter() - began
        for request in requests:
            if request.error is not None:
                raise request.error
        self.outputs = [request.output_ids for request in requests]
        self.num_tokens = sum(map(len, self.outputs)) - before
        self.drafted = sum(request.drafted for request in requests)
        self.accepted = sum(request.accepted for request in requests)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def speculation_rows(
    model: Transformer,
    batch: int,
    context: int,
    rate: float,
    depth: int,
    steps: int,
    device: torch.device,
    rounds: int = ROUNDS,
) -> Iterator[Row]:
    """One row per mode for `batch` requests with prompts of `context` tokens; `model` must be predictable."""
    generator = torch.Generator().manual_seed(batch)
    prompts = [
        torch.randint(model.config.vocab_size, (context,), generator=generator).tolist() for _ in range(batch)
    ]
    engines = {mode: make_engine(model, mode, batch, context + steps, depth, rate, device) for mode in MODES}
    for core in engines.values():
        Generation(core, prompts, steps)  # records graphs; `auto` decides
    runs: dict[str, list[Generation]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode, core in engines.items():
            runs[mode].append(Generation(core, prompts, steps))
    plain = runs["off"]
    for mode, own in runs.items():
        drafted, accepted = sum(run.drafted for run in own), sum(run.accepted for run in own)
        ratios = [run.tokens_per_second / other.tokens_per_second for run, other in zip(own, plain)]
        controller = engines[mode].controller
        yield {
            "kind": "speculation",
            "speculative": mode,
            "depth": 0 if mode == "off" else depth,
            "rate": rate,
            "batch": batch,
            "context": context,
            "layers": model.config.num_hidden_layers,
            "steps": steps,
            "tokens_per_second": significant(median([run.tokens_per_second for run in own])),
            "ms_per_step": significant(median([run.seconds / run.num_steps for run in own]) * 1e3),
            "times_plain": significant(median(ratios)),
            "drafted": drafted,
            "accepted_share": significant(accepted / drafted) if drafted else None,
            "pace": None if controller is None else controller.report(),
            "passed": all(run.outputs == plain[0].outputs for run in own),
        }
    for core in engines.values():
        core.close()


def bench_speculation(
    batches: Sequence[int] = (1, 4, 8),
    context: int = 4096,
    layers: int = 43,
    distinct: int = 38,
    rate: float = 0.8,
    depth: int = 1,
    steps: int = 256,
) -> Iterator[Row]:
    """All rows, of a random model of full width on a GPU."""
    device = torch.device("cuda")
    common = {"bench": "decode", "model": "synth flash", **device_facts(device)}
    distinct = min(distinct, 36)  # three engines need memory as well
    model = random_on_device(preset("flash", layers), device, distinct=distinct, kernels="triton", mtp=True)
    make_predictable(model)
    for batch in batches:
        for row in speculation_rows(model, batch, context, rate, depth, steps, device):
            yield common | row | {"layers_with_own_experts": min(distinct, layers)}
        release_memory()
