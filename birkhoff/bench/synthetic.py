"""Random models of full width, created in device memory without any file.

Quantised matrices are random codes with scales such that products preserve the scale of their inputs; the rest is
stored as in the release. If the experts do not fit the device, layers beyond `distinct` reuse the expert weights of
the first layers. A step still reads as many bytes, since the experts of one layer have left the caches by the time
another layer reads them.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.kernels.select import Choice, select
from birkhoff.model.block import Block
from birkhoff.model.linear import Linear, Numerics
from birkhoff.model.moe import Experts
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_layout import PackedExpertLayout
from birkhoff.offload.expert_store import ExpertStore

_FP8_SPREAD, _FP4_SPREAD = 64.0, 2.93  # standard deviations of the random codes


def random_on_device(
    config: V4Config,
    device: torch.device,
    seed: int = 0,
    distinct: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kernels: Choice = "reference",
    mtp: bool = False,
) -> Transformer:
    """A packed model with random weights; `distinct` layers have their own expert weights. `mtp` includes the MTP
    block."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Transformer(config, Numerics(dtype, kernels=select(kernels)), packed=True, mtp=mtp).eval()
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


def _expert_stack(module: Experts, device: torch.device) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, inner in (("gate_up", module.gate_up.shape[-1] * 2), ("down", module.down.shape[-1] * 2)):
        shape, scale = module._buffers[name].shape, module._buffers[f"{name}_scale"].shape  # type: ignore[union-attr]
        tensors[name] = torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
        tensors[f"{name}_scale"] = _scales(scale, inner**-0.5 / _FP4_SPREAD, device)
    return tensors


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
        if name == "codes":
            codes = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device).normal_(0, _FP8_SPREAD)
            module._buffers[name] = codes.clamp_(-448, 448).to(torch.float8_e4m3fn)
        elif name == "scale":
            inner = module._buffers["codes"].shape[1]  # type: ignore[union-attr]
            module._buffers[name] = _scales(tensor.shape, inner**-0.5 / _FP8_SPREAD, device)
        else:
            assert name == "tid2eid", name
            rows = torch.rand(tensor.shape[0], config.n_routed_experts, device=device).argsort(-1)
            module._buffers[name] = rows[:, : tensor.shape[1]].to(torch.int32)


def _plain(name: str, tensor: torch.Tensor, module: nn.Module) -> tuple[float, float, torch.dtype]:
    """Standard deviation, mean and dtype of an unquantised tensor; matrices are bfloat16 as in the release."""
    if isinstance(module, Linear):
        return tensor.shape[1] ** -0.5 * (1.5 if tensor.shape[0] > 100_000 else 1.0), 0.0, torch.bfloat16
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


def filled_state(
    config: V4Config, slots: int, tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> State:
    """A state in which every sequence has `tokens` cached random tokens and space for 256 more."""
    state = State.contiguous(config, slots, tokens + 256, device=device, dtype=dtype)
    for layer in state.layers:
        for tensor in (layer.keys.rows, *(ring.rows for ring in layer.raw.values()), *layer.pages.values()):
            tensor.normal_()
    return state
