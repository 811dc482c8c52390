"""Decoding at full V4-Flash width on this CPU from packed weights, beside the speed of its memory.

A few layers with random codes are built in memory without any file, with fewer experts than V4-Flash: a token reads as
many of them, and they exceed the caches. `read_gb_per_s` is how fast all threads read memory, measured in turns with
the steps; `share_of_bandwidth` divides the bytes that a step must read by its time and by that speed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from birkhoff.bench.baselines import OurModel
from birkhoff.bench.report import Row, check_positive, facts, summary
from birkhoff.bench.timing import torch_threads
from birkhoff.convert.presets import preset
from birkhoff.decode.cpu import install_cpu_decode
from birkhoff.errors import OptionError
from birkhoff.kernels.packed import TYPES, PackedType, native
from birkhoff.kernels.select import select
from birkhoff.model.linear import Linear, Numerics
from birkhoff.model.moe import Experts
from birkhoff.model.transformer import Transformer

READ_BYTES = 1 << 28
MAX_CODE = 31  # of random bytes: float16 scales made of them are small and finite


@dataclass(frozen=True)
class PackedSetting:
    """Parameters, repeated in every row. `experts` and `dense` are packed types."""

    experts: str = "MXFP4"
    dense: str = "Q8_0"
    layers: int = 2
    num_experts: int = 48
    context: int = 256
    steps: int = 8
    rounds: int = 5
    threads: int = 2

    def __post_init__(self) -> None:
        check_positive(self, "layers", "num_experts", "context", "steps", "rounds", "threads")
        for name in (self.experts, self.dense):
            if name not in TYPES:
                raise OptionError(f"the type is {name!r}, expected one of {', '.join(TYPES)}.")


def bench_packed(setting: PackedSetting | None = None) -> Iterator[Row]:
    """One row: tokens per second at batch 1 and the share of the memory bandwidth."""
    setting = setting or PackedSetting()
    if not native.available():
        raise OptionError(
            "packed weights on a CPU need a C++ compiler, and there is none. Install g++ or clang++."
        )
    with torch_threads(setting.threads), torch.inference_mode():
        model = random_model(setting)
        step_bytes = bytes_per_token(model)
        ours = OurModel(model, 1, setting.context, 4 * setting.rounds * setting.steps)
        tokens = ours.prefill([list(range(setting.context))])
        for _ in range(2):
            tokens = ours.step(tokens)
        words = torch.ones(READ_BYTES // 8, dtype=torch.int64)
        seconds, bandwidth = [], []
        for _ in range(setting.rounds):
            began = time.perf_counter()
            for _ in range(setting.steps):
                tokens = ours.step(tokens)
            seconds.append((time.perf_counter() - began) / setting.steps)
            bandwidth.append(native.read_speed(words))
        shares = [step_bytes / each / speed for each, speed in zip(seconds, bandwidth)]
        yield {
            "bench": "packed",
            **vars(setting),
            "bytes_per_token": step_bytes,
            "tokens_per_second": summary([1 / each for each in seconds]),
            "gb_per_s": summary([step_bytes / each / 1e9 for each in seconds]),
            "read_gb_per_s": summary([speed / 1e9 for speed in bandwidth]),
            "share_of_bandwidth": summary(shares),
            **facts(),
        }


def random_model(setting: PackedSetting) -> Transformer:
    """Layers of V4-Flash width with random codes; the last layers of each kind come first: CSA, HCA, then others."""
    flash = preset("flash", mtp=False)
    kinds = [4, 128] * setting.layers
    config = replace(
        flash,
        num_hidden_layers=setting.layers,
        compress_ratios=tuple(kinds[: setting.layers]),
        num_hash_layers=0,
        n_routed_experts=setting.num_experts,
        vocab_size=4096,
        num_nextn_predict_layers=0,
        max_position_embeddings=65_536,
    )
    with torch.device("meta"):
        model = Transformer(config, Numerics(kernels=select("cpu"))).eval()
        kinds_of = {"fp8": TYPES[setting.dense], "f32": TYPES["BF16"], "bf16": TYPES["BF16"]}
        types: dict[str, PackedType] = {}
        for destination in model.destinations():
            if isinstance(destination.owner, Linear):
                types[destination.name] = kinds_of[destination.owner.role]
            elif isinstance(destination.owner, Experts):
                types[destination.name] = TYPES[setting.experts]
        model.store_as(types)
    model = model.allocate(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
            tensor.view(torch.uint8).random_(0, MAX_CODE + 1, generator=generator)
        elif tensor.is_floating_point():
            tensor.normal_(0, 0.02, generator=generator)
    for name, tensor in model.named_buffers():
        if name.endswith("scale"):
            tensor.fill_(118)
    return install_cpu_decode(model)


def bytes_per_token(model: Transformer) -> int:
    """Bytes of weights that decoding one token reads: all but the embedding and the experts that are not selected."""
    total = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) - model.embed.nbytes
    for stack in model.expert_stacks():
        size = sum(tensor.nbytes for tensor in stack.buffers())
        total -= size - size * model.config.num_experts_per_tok // stack.count
    return total
