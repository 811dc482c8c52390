"""Decode speed by stored format: the same full-width model with weights of different packed types, in one run.

A format is `EXPERTS+DENSE`: the type of the routed experts (`GATE/DOWN` if down has another one) and of the other
projections, such as `MXFP4+Q8_0` or `IQ2_XXS/Q2_K+Q8_0`. The released `FP4+FP8` always runs first, as the measure of
the others. Per format `bench_formats` yields `agreement` (a few layers, kernels against the plain path) and per batch
size `format`: milliseconds, tokens per second, the bytes a step reads, the share of the speed that these bytes allow
at the measured bandwidth, and the speed relative to the released format. Everything also runs on a CPU, for the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from birkhoff.bench.decode import agreement, device_facts, floor_bytes, greedy_step, reading_speed, set_inputs
from birkhoff.bench.report import Row, facts, significant, summary
from birkhoff.bench.synthetic import filled_state, random_on_device
from birkhoff.bench.timing import capture_graph, cuda_seconds, median, milliseconds, release_memory
from birkhoff.config import V4Config
from birkhoff.convert.presets import preset
from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.decode.gpu import Decoder
from birkhoff.errors import OptionError, quoted
from birkhoff.kernels.packed import TYPES, PackedType

RELEASED = "FP4+FP8"
CHECKED_LAYERS = 4
CHECKED_LENGTHS = (2, 5, 64, 126, 127, 131, 511, 2303)


@dataclass(frozen=True)
class WeightFormat:
    """Types of gate and up, of down, and of the other projections. MXFP4 is held in the order of FP4, as by `load`."""

    name: str
    gate: PackedType
    down: PackedType
    dense: PackedType

    @property
    def types(self) -> tuple[PackedType, PackedType, PackedType]:
        return self.gate, self.down, self.dense


def parse_format(text: str) -> WeightFormat:
    """Parse `EXPERTS+DENSE` or `GATE/DOWN+DENSE`; without a second part the projections are Q8_0."""
    experts, _, dense = text.partition("+")
    gate, _, down = experts.partition("/")
    kinds = []
    for name in (gate, down or gate, dense or "Q8_0"):
        if name not in TYPES or name == "F32":
            known = ", ".join(each for each in TYPES if each != "F32")
            raise OptionError(
                f"the format {quoted(text)} names the type {quoted(name)}, expected EXPERTS+DENSE or GATE/DOWN+DENSE "
                f"of {known}."
            )
        kinds.append(TYPES["FP4" if name == "MXFP4" else name])
    return WeightFormat(text, *kinds)


def bench_formats(
    formats: Sequence[str],
    batches: Sequence[int] = (1, 8),
    context: int = 4096,
    layers: int = 43,
    distinct: int = 38,
    steps: int = 100,
    config: V4Config | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Row]:
    """All rows, at V4-Flash width unless `config` is given. `distinct` layers have their own experts."""
    parsed = [parse_format(text) for text in dict.fromkeys((RELEASED, *formats))]
    device = device or torch.device("cuda")
    on_gpu = device.type == "cuda"
    checked = config or preset("flash", CHECKED_LAYERS, False)
    lengths = CHECKED_LENGTHS if on_gpu else (2, 5)
    config = config or preset("flash", layers, False)
    common = {"bench": "formats", **(device_facts(device) if on_gpu else facts())}
    common["read_bytes_per_second"] = significant(reading_speed(device) if on_gpu else 1e10)
    released: dict[int, float] = {}
    for each in parsed:
        row = agreement(checked, device, lengths, 4 if on_gpu else 1, None, each.types, dtype)
        yield common | row | {"format": each.name}
        release_memory()
        model = random_on_device(config, device, distinct=distinct, dtype=dtype, types=each.types)
        for batch in batches:
            decoder = Decoder(model, filled_state(config, batch, context, device, dtype))
            row, ms = format_row(decoder, batch, context, steps, common["read_bytes_per_second"])
            released.setdefault(batch, ms)
            times = {"times_released": significant(released[batch] / ms)}
            yield (
                common | {"format": each.name, "layers_with_own_experts": min(distinct, layers)} | row | times
            )
            del decoder
            release_memory()
        del model
        release_memory()


@torch.inference_mode()
def format_row(decoder: Decoder, batch: int, context: int, steps: int, speed: float) -> tuple[Row, float]:
    """One batch size of one format, and its median milliseconds per step."""
    buffers = decoder.buffers(batch, context + 256)
    ms = step_milliseconds(decoder, buffers, context, steps)
    typical = median(ms)
    read = sum(floor_bytes(decoder, buffers).values())
    limit = read / speed * 1e3
    row = {
        "kind": "format",
        "batch": batch,
        "context": context,
        "layers": decoder.config.num_hidden_layers,
        "kernels": decoder.kernels.name,
        "ms": summary(ms),
        "tokens_per_second": significant(batch / typical * 1e3),
        "bytes_per_step": round(read),
        "limit_ms": significant(limit),
        "share_of_limit": significant(limit / typical),
    }
    return row, typical


def step_milliseconds(decoder: Decoder, buffers: DecodeBuffers, context: int, steps: int) -> list[float]:
    """Milliseconds of greedy steps from position `context` on: a CUDA graph on a GPU, plain launches elsewhere."""
    tokens = torch.randint(decoder.config.vocab_size, (buffers.rows,)).tolist()
    positions = [context] * buffers.rows
    set_inputs(buffers, tokens, positions)
    run = partial(greedy_step, decoder, buffers)
    if decoder.state.device.type != "cuda":
        return milliseconds(run, decoder.state.device, steps, warm=0)
    graph = capture_graph(run, warm=2)
    set_inputs(buffers, tokens, positions)
    return [1e3 * span for span in cuda_seconds(graph.replay, steps, warm=2)]
