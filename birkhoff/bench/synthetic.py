"""Random models of full width, created in device memory without any file.

Quantised matrices are random codes with scales such that products preserve the scale of their inputs; the rest is
stored as in the release. Other packed types may be given. If the experts do not fit the device, layers beyond
`distinct` reuse the expert weights of the first layers. A step still reads as many bytes, since the experts of one
layer have left the caches by the time another layer reads them.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.kernels.packed import Q8_ROWS, TYPES, PackedType, dequantise, from_blocks, gpu_type, stored_type
from birkhoff.kernels.select import Choice, select
from birkhoff.model.block import Block
from birkhoff.model.linear import Linear, Numerics
from birkhoff.model.moe import Experts
from birkhoff.model.state import LayerState, State
from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_layout import PackedExpertLayout
from birkhoff.offload.expert_store import ExpertStore
from birkhoff.sae.dictionary import Sae

_FP8_SPREAD, _FP4_SPREAD = 64.0, 2.93  # standard deviations of the random codes
# First bytes of the float16 numbers in a block; MXFP4 has an exponent instead.
_HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
# The second of them scales minima; this multiple of the first makes the mean zero. Otherwise all rows of a matrix would
# be alike, and all tokens would be routed to the same experts.
_MINIMA = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}

WeightTypes = tuple[PackedType, PackedType, PackedType]  # of gate and up, of down, of the other projections


def random_on_device(
    config: V4Config,
    device: torch.device,
    seed: int = 0,
    distinct: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kernels: Choice = "reference",
    mtp: bool = False,
    types: WeightTypes | None = None,
    released: bool = False,
) -> Transformer:
    """A packed model with random weights; `distinct` layers have their own expert weights. `mtp` includes the MTP
    block. `types` are by default those of the release; `released` rounds activations as it does."""
    torch.manual_seed(seed)
    numerics = Numerics(dtype, released, select(kernels))
    with torch.device("meta"):
        model = Transformer(config, numerics, packed=types is None, mtp=mtp).eval()
        if types is not None:
            model.store_as(_types_by_name(model, types))
    stacks: list[dict[str, torch.Tensor]] = []
    expert_modules = [module for module in model.modules() if isinstance(module, Experts)]
    for index, experts in enumerate(expert_modules):
        if index < (distinct or len(expert_modules)):
            stacks.append(_expert_stack(experts, device))
        experts._buffers.update(stacks[index % len(stacks)])
    for module in model.modules():
        if not isinstance(module, Experts):
            _fill(module, device, config)
    return model


def random_placed(
    config: V4Config,
    device: torch.device,
    resident: torch.Tensor,
    *,
    spare: int = 64,
    kernels: Choice = "reference",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Transformer, ExpertStore]:
    """As `random_on_device`, with experts in a store; as many layers as `resident` has rows have their own experts.
    These are copies of a few random ones: a step reads as many bytes as if all were different."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Transformer(config, Numerics(dtype, kernels=select(kernels)), packed=True, mtp=False).eval()
    store = ExpertStore(PackedExpertLayout.of(config), resident, device, spare)
    for index, stack in enumerate(model.expert_stacks()):
        stack.move_to_store(store, index % store.layers)
    samples = torch.randint(0, 256, (16, store.slot_bytes), dtype=torch.uint8, device=device)
    for packed in samples:
        _, gate_up_scales, _, down_scales = store.layouts[0].parts(packed)
        for scales, inner in (
            (gate_up_scales, config.hidden_size),
            (down_scales, config.moe_intermediate_size),
        ):
            scales.copy_(_scales(scales.shape, inner**-0.5 / _FP4_SPREAD, device))
    for layer in range(store.layers):
        for index in range(store.experts):
            values = store.layouts[0].parts(samples[(layer * 7 + index) % len(samples)])
            for target, value in zip(store.home_parts((layer, index)), values):
                target.copy_(value, non_blocking=True)
    for module in model.modules():
        if not isinstance(module, Experts):
            _fill(module, device, config)
    store.copy_stream.wait_current_stream()
    return model, store


def skew_routing(model: Transformer, strength: float) -> None:
    """Make experts unequally popular, as with text: scores are lowered by `strength` times the logarithm of a random
    rank per layer, and hash tables are sampled with probabilities of 1 / rank."""
    g = torch.Generator().manual_seed(0)
    for block in model.layers:
        assert isinstance(block, Block)
        gate = block.ffn.gate
        experts = model.config.n_routed_experts
        rank = torch.randperm(experts, generator=g).float() + 1
        if gate.bias is not None:
            gate.bias.data.copy_(-strength * rank.log())
        elif gate.tid2eid is not None:
            vocabulary, topk = gate.tid2eid.shape
            samples = torch.multinomial((1 / rank).expand(vocabulary, -1), topk, generator=g)
            gate.tid2eid.copy_(samples.to(torch.int32))


def _types_by_name(model: Transformer, types: WeightTypes) -> dict[str, PackedType]:
    """The type of every matrix: projections as given, what computes in float32 as bfloat16."""
    named = {}
    for destination in model.destinations():
        if isinstance(destination.owner, Experts):
            named[destination.name] = types[destination.name.endswith("w2.weight")]
        elif isinstance(destination.owner, Linear):
            projection = destination.owner.role == "fp8"
            named[destination.name] = (
                gpu_type(types[2], destination.owner.fan_in) if projection else TYPES["BF16"]
            )
    return named


def _expert_stack(module: Experts, device: torch.device) -> dict[str, torch.Tensor]:
    assert module.types is not None
    tensors = {}
    for name, kind, inner in zip(("gate_up", "down"), module.types, (module.hidden, module.inner)):
        codes = module.get_buffer(name)
        tensors[name] = random_codes(kind, codes, inner, device)
        if kind.tile is not None:
            shape = module.get_buffer(f"{name}_scale").shape
            tensors[f"{name}_scale"] = _scales(shape, inner**-0.5 / _spread_of(kind), device)
    return tensors


def _spread_of(kind: PackedType) -> float:
    return _FP8_SPREAD if kind.name == "FP8" else _FP4_SPREAD


def random_codes(kind: PackedType, like: torch.Tensor, inner: int, device: torch.device) -> torch.Tensor:
    """Random codes of the shape and dtype of `like`, rows of `inner` columns. Types with their scales in the codes have
    values of standard deviation `inner ** -0.5`."""
    if kind.name == "FP8":
        codes = torch.empty(like.shape, dtype=torch.bfloat16, device=device).normal_(0, _FP8_SPREAD)
        return codes.clamp_(-448, 448).to(torch.float8_e4m3fn)
    if kind.dtype is not None:
        shape = (*like.shape[:-1], like.shape[-1] // kind.dtype.itemsize)
        values = torch.empty(shape, dtype=kind.dtype, device=device).normal_(0, inner**-0.5)
        return values.view(torch.uint8)
    if kind == Q8_ROWS:
        return from_blocks(kind, random_codes(stored_type(kind), like, inner, device))
    codes = torch.randint(0, 256, like.shape, dtype=torch.uint8, device=device)
    if kind.tile is None:
        blocks = codes.view(-1, kind.block_bytes)
        sample = blocks[:64].clone()
        _write_steps(kind, sample, 0.01)
        _write_steps(kind, blocks, 0.01 * inner**-0.5 / float(dequantise(kind, sample).std()))
    return codes.view(like.dtype)


def _write_steps(kind: PackedType, blocks: torch.Tensor, step: float) -> None:
    """Set the scales of blocks to random numbers around `step`."""
    if kind.name == "MXFP4":
        blocks[:, 0] = 127 + math.floor(math.log2(step))
    for place, first in enumerate(_HALVES.get(kind.name, (0,))):
        steps = step * (0.5 + torch.rand(len(blocks), 1, device=blocks.device))
        if place:
            steps *= _MINIMA[kind.name]
        blocks[:, first : first + 2] = steps.half().view(torch.uint8)


def _scales(shape: torch.Size, spread: float, device: torch.device) -> torch.Tensor:
    """Powers of two near `spread`, half of them twice the others."""
    return torch.randint(0, 2, shape, dtype=torch.uint8, device=device) + (
        127 + math.floor(math.log2(spread))
    )


def _fill(module: nn.Module, device: torch.device, config: V4Config) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        spread, mean, dtype = _plain(name, parameter, module)
        values = torch.empty(parameter.shape, dtype=dtype, device=device).normal_(mean, spread)
        module._parameters[name] = nn.Parameter(values, requires_grad=False)
    for name, tensor in list(module.named_buffers(recurse=False)):
        if name in ("codes", "scale"):
            assert isinstance(module, Linear) and module.code_type is not None
            kind, inner = module.code_type, module.fan_in
            if name == "codes":
                module._buffers[name] = random_codes(kind, tensor, inner, device)
            else:
                module._buffers[name] = _scales(tensor.shape, inner**-0.5 / _spread_of(kind), device)
        else:
            assert name == "tid2eid", name
            rows = torch.rand(tensor.shape[0], config.n_routed_experts, device=device).argsort(-1)
            module._buffers[name] = rows[:, : tensor.shape[1]].to(torch.int32)


def _plain(name: str, tensor: torch.Tensor, module: nn.Module) -> tuple[float, float, torch.dtype]:
    """Standard deviation, mean and dtype of an unquantised tensor; matrices are bfloat16 as in the release."""
    if isinstance(module, Linear):
        dtype = tensor.dtype if tensor.dtype is torch.float16 else torch.bfloat16
        return tensor.shape[1] ** -0.5 * (1.5 if tensor.shape[0] > 100_000 else 1.0), 0.0, dtype
    if name == "embed":
        return 1.0, 0.0, tensor.dtype
    if tensor.dim() == 1 and name == "weight":
        return 0.1, 1.0, torch.float32
    if name == "fn":
        return tensor.shape[1] ** -0.5, 0.0, torch.float32
    return (
        {"scale": 0.1, "base": 0.4, "attn_sink": 1.0, "ape": 0.5, "bias": 0.1}[name],
        (0.6 if name == "scale" else 0.0),
        torch.float32,
    )


def cache_tensors(layer: LayerState) -> list[torch.Tensor]:
    """All tensors of the cache of a layer."""
    return [layer.keys.rows, *(ring.rows for ring in layer.raw.values()), *layer.pages.values()]


def random_dictionary(features: int, width: int, hook: str, layer: int) -> Sae:
    """A dictionary of random rows, for timing."""
    weights = torch.randn(2, features, width, generator=torch.Generator().manual_seed(2)) / width**0.5
    return Sae(weights[0], torch.full((features,), -1.0), weights[1], hook=hook, layer=layer)


def filled_state(
    config: V4Config, slots: int, tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> State:
    """A state in which every sequence has `tokens` cached random tokens and space for 256 more."""
    state = State.contiguous(config, slots, tokens + 256, device=device, dtype=dtype)
    for layer in state.layers:
        for tensor in cache_tensors(layer):
            tensor.normal_()
    return state
