"""Memory for experts that are divided between a GPU and the host, and where decode steps compute the cold ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from birkhoff.api.options import PlacementOptions
from birkhoff.api.run_plan import is_divided, plan_device
from birkhoff.decode.step_time import step_seconds
from birkhoff.engine.memory_plan import MemoryBudget
from birkhoff.errors import OptionError
from birkhoff.kernels.packed import native
from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_layout import PackedExpertLayout
from birkhoff.offload.expert_store import ExpertStore
from birkhoff.offload.expert_usage import ExpertCounts, ExpertUsage
from birkhoff.offload.host_experts import Rates, measure_rates


@dataclass(frozen=True)
class PlacedExperts:
    """Memory for experts that are divided between the device and the host."""

    budget: MemoryBudget
    store: ExpertStore
    usage: ExpertUsage


def place_experts(
    network: Transformer,
    options: PlacementOptions,
    device: torch.device,
    free_bytes: int,
    host_bytes: int,
    cache_bytes: int | None,
    requests: int,
    context: int | None,
) -> PlacedExperts | MemoryBudget:
    """Carry out `plan_device`: allocate memory for the experts, unless all of them go to the device with the model."""
    config = network.config
    budget = plan_device(network, options, free_bytes, host_bytes, cache_bytes, requests, context)
    if not is_divided(budget, options):
        return budget
    layers = budget.experts // config.n_routed_experts
    counts = None
    if options.counts_file is not None and options.counts_file.exists():
        counts = ExpertCounts.load(options.counts_file, layers, config.n_routed_experts)
    usage = ExpertUsage(layers, config.n_routed_experts, counts)
    layouts = [PackedExpertLayout.of(config, stack.types) for stack in network.expert_stacks() if stack.types]
    store = ExpertStore(layouts, usage.hottest(budget.hot), device, budget.spare)
    return PlacedExperts(budget, store, usage)


def choose_side(network: Transformer, placed: PlacedExperts, experts_on: str) -> None:
    """Decide where decode steps compute cold experts, by measured steps unless requested, and say so in a line.

    The experts must be loaded. Without cold experts or native kernels they stay on the GPU, unless the CPU is asked for
    without the latter."""
    if experts_on == "cpu" and not native.available():
        raise OptionError("experts_on is 'cpu', which needs a C++ compiler, and there is none. Use 'auto'.")
    if network.numerics.released:
        if experts_on == "cpu":
            raise OptionError(
                "experts_on is 'cpu', where inputs are not rounded as numerics='released' asks. Use 'gpu' or 'auto'."
            )
        return
    store = placed.store
    if experts_on == "gpu" or not native.available() or bool(store.resident().all()):
        return
    config = network.config
    with torch.inference_mode():
        rates = measure_rates(
            store, network.stored_expert_types(), config.hidden_size, config.moe_intermediate_size
        )
        if experts_on == "auto":
            outcome = _use_fastest_share(network, store.device, rates)
        elif network.compute_cold_experts_on_host():
            outcome = "cold experts of decode steps are computed on the CPU"
        else:
            raise OptionError(
                "experts_on is 'cpu', but host functions of this GPU's driver gave other results than a direct "
                "call. Use 'gpu'."
            )
    print(f"birkhoff: {rates}: {outcome}", file=sys.stderr)


def _use_fastest_share(network: Transformer, device: torch.device, rates: Rates) -> str:
    """Time decode steps with no cold expert on the CPU, with the share that takes CPU and bus equally long, and with
    all; keep the fastest. Returns what was found, in words."""
    seconds = {}
    for share in sorted({0.0, rates.balanced_share, 1.0}):
        if not network.compute_cold_experts_on_host(share):
            break  # host functions do not work here
        seconds[share] = step_seconds(network, device)
    best = min(seconds, key=seconds.__getitem__)
    network.compute_cold_experts_on_host(best)
    times = ", ".join(f"{100 * share:.0f} % {1e3 * span:.3g} ms" for share, span in seconds.items())
    return (
        f"decode steps leave {100 * best:.0f} % of the cold experts to the CPU (a step with {times}) and read the "
        "others over the bus"
    )
