"""The memory and speed plans printed by `inspect --gpu`, `inspect --ram` and `pull`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from birkhoff.byte_size import format_bytes
from birkhoff.config import V4Config
from birkhoff.errors import CapacityError

if TYPE_CHECKING:
    from birkhoff.model.transformer import Transformer
    from birkhoff.weights.inspect import Inspection
    from birkhoff.weights.memory_size import MemoryEstimate

RELEASES = ("flash", "pro")
UNLIMITED = 1 << 62  # bytes of a host that is not part of the plan


def find_config(model: Path) -> V4Config | None:
    """Return the config if there are no tensors: a JSON file, a directory with only config.json, or a release name."""
    if str(model) in RELEASES and not model.exists():
        from birkhoff.convert.presets import preset

        return preset(str(model))
    path = model.expanduser()
    if path.is_file() and path.suffix == ".json":
        return V4Config.from_file(path)
    if path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors*")):
        return V4Config.from_file(path / "config.json")
    return None


def plan_or_refusal(
    model: Path | V4Config,
    device_bytes: int,
    context: int | None,
    requests: int,
    speeds: tuple[float, float],
    host_bytes: int | None = None,
) -> dict[str, Any] | None:
    """The plan of `load` on a GPU with this much free memory and the speed bounds that follow, or
    `{"refused": reason}`; None if the weights would be expanded there. A config stands for a checkpoint in the released
    formats. `speeds`: device and bus bytes/s."""
    from birkhoff.api.options import EngineOptions
    from birkhoff.api.run_plan import device_network, plan_device
    from birkhoff.engine.speed_bounds import forecast
    from birkhoff.weights.checkpoint import open_checkpoint

    options = EngineOptions(
        max_requests=requests, max_batch_tokens=max(2048, requests + 1), max_context=context
    )
    try:
        if isinstance(model, V4Config):
            network: Transformer | None = _released_model(model)
        else:
            network = device_network(open_checkpoint(model), options, device_bytes)
        if network is None:
            return None
        available = UNLIMITED if host_bytes is None else host_bytes
        budget = plan_device(
            network, options.placement, device_bytes, available, options.cache_bytes, requests, context
        )
    except CapacityError as error:
        return {"refused": str(error)}
    return forecast(
        network, budget, context=context, requests=requests, device_speed=speeds[0], bus_speed=speeds[1]
    )


def _released_model(config: V4Config, gpu: bool = True) -> Transformer:
    """A model in the released formats, without memory: as a GPU holds it, or a CPU."""
    import torch

    from birkhoff.kernels.packed import TYPES
    from birkhoff.model.linear import Numerics
    from birkhoff.model.transformer import Transformer
    from birkhoff.weights.layout import model_tensors

    with torch.device("meta"):
        if gpu:
            return Transformer(config, Numerics(torch.bfloat16), packed=True, mtp=False)
        network = Transformer(config, Numerics())
        stored = {"dense": TYPES["FP8"], "expert": TYPES["FP4"], "bf16": TYPES["BF16"]}
        network.store_as(
            {each.name: stored[each.storage] for each in model_tensors(config) if each.storage in stored}
        )
    return network


def host_plan(model: Path | V4Config, host_bytes: int, context: int | None, requests: int) -> dict[str, Any]:
    """The plan of `load` on a CPU with this much free memory, or `{"refused": reason}`. A config stands for a
    checkpoint in the released formats."""
    from birkhoff.api.options import EngineOptions
    from birkhoff.api.run_plan import host_budget, plan_cpu
    from birkhoff.weights.checkpoint import open_checkpoint

    options = EngineOptions(device="cpu", max_requests=requests, max_context=context)
    try:
        if isinstance(model, V4Config):
            budget = plan_cpu(options, _released_model(model, gpu=False), host_bytes)
        else:
            budget = host_budget(open_checkpoint(model), options, host_bytes)
    except CapacityError as error:
        return {"refused": str(error)}
    return {**budget.to_dict(), "requests": requests, "experts_text": str(budget)}


def host_lines(plan: dict[str, Any]) -> list[str]:
    """Format a plan for a CPU as text lines."""
    if "refused" in plan:
        return [f"ram         does not fit: {plan['refused']}"]
    rows = [
        ("weights without experts", plan["dense_bytes"]),
        ("experts in memory", 0 if plan["mapped"] else plan["expert_bytes"]),
        ("cache", plan["cache_bytes"]),
        ("working space (allowed)", plan["working_bytes"]),
        ("left for page cache", plan["left_bytes"]),
    ]
    total = plan["host_bytes"]
    count = "1 request" if plan["requests"] == 1 else f"{plan['requests']} requests"
    lines = [f"ram         {format_bytes(total)}: on the CPU, {count}"]
    lines += [
        f"            {name:<26}{format_bytes(size):>12}{100 * size / total:7.1f} %" for name, size in rows
    ]
    return [*lines, f"experts     {plan['experts_text']}"]


@dataclass(frozen=True)
class DevicePlan:
    """What fits a device: an estimate for dense weights, and the plan and its forecast for weights as stored."""

    memory: dict[str, MemoryEstimate]
    forecast: dict[str, Any] | None

    @property
    def refused(self) -> bool:
        return self.forecast is not None and "refused" in self.forecast

    def to_dict(self) -> dict[str, Any]:
        memory = {form: estimate.to_dict() for form, estimate in self.memory.items()}
        return ({"memory": memory} if memory else {}) | ({"gpu": self.forecast} if self.forecast else {})

    def lines(self) -> list[str]:
        lines = [_memory_line(form, estimate) for form, estimate in self.memory.items()]
        return lines + (plan_lines(self.forecast) if self.forecast is not None else [])


def device_plan(
    report: Inspection,
    device_bytes: int | None,
    context: int | None,
    requests: int,
    speeds: tuple[float, float],
    host_bytes: int | None = None,
) -> DevicePlan:
    """Plan an inspected checkpoint for a device with this much memory; an empty plan without a device."""
    if device_bytes is None:
        return DevicePlan({}, None)
    forecast = None
    if not report.problems:
        path = Path(report.path)
        forecast = plan_or_refusal(path, device_bytes, context, requests, speeds, host_bytes)
    memory = report.memory(device_bytes, context, requests)
    memory.pop("stored", None)  # has a forecast
    return DevicePlan(memory, forecast)


def plan_lines(forecast: dict[str, Any]) -> list[str]:
    """Format a forecast as text lines: memory by kind, experts, context, and speed limits by expert miss rate."""
    if "refused" in forecast:
        return [f"gpu         does not fit: {forecast['refused']}"]
    plan = forecast["plan"]
    context = forecast["context"]
    speeds = forecast["speeds"]
    total = plan["device_bytes"]

    def line(name: str, size: int) -> str:
        return f"            {name:<26}{format_bytes(size):>12}{100 * size / total:7.1f} %"

    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in context["bytes_by_kind"].items())
    per_token = ", ".join(
        f"{kind} {size:g} B" for kind, size in context["bytes_per_token_by_kind"].items() if size
    )
    lines = [
        f"gpu         {format_bytes(total)}: {context['requests']} x {context['tokens']} tokens of context, "
        "weights as stored",
        *(line(kind, size) for kind, size in plan["weights"].items()),
        line("cache", plan["cache_bytes"]),
        line("working space (allowed)", plan["working_bytes"]),
        line("hot experts, spare slots", plan["hot_bytes"]),
        line("left", plan["left_bytes"]),
        f"experts     {plan['hot']} of {plan['experts']} on the GPU ({100 * plan['share']:.1f} %) and {plan['spare']} "
        f"spare slots of {format_bytes(plan['expert_bytes'])}; {format_bytes(plan['host_bytes'])} of host memory "
        "for the others",
        f"context     {kinds} for one request ({per_token} a token)",
        f"limits      by bytes: {speeds['device'] / 1e12:g} TB/s of the GPU, {speeds['bus'] / 1e9:g} GB/s of the bus",
    ]
    for index, limit in enumerate(forecast["limits"]):
        if not limit["misses"]:
            assumption = "no misses"
        else:
            assumption = "random placement" if index == 0 else "by usage counts"
        speed = ", ".join(
            f"{value:.0f} at batch {batch}" for batch, value in limit["tokens_per_second"].items()
        )
        lines.append(
            f"            {100 * limit['misses']:5.1f} % of reads over the bus ({assumption}): {speed} tokens/s"
        )
    return lines


def _memory_line(form: str, plan: MemoryEstimate) -> str:
    fixed = (
        f"always there {format_bytes(plan.always_bytes)}, cache {format_bytes(plan.cache_bytes)}, "
        f"working {format_bytes(plan.working_bytes)}"
    )
    target = f"memory      {form} on {format_bytes(plan.device_bytes)}"
    if not plan.fits:
        return f"{target}: does not fit even without experts ({fixed})"
    if plan.experts_resident < plan.experts:
        return (
            f"{target}: does not fit: {fixed}, experts {format_bytes(plan.expert_bytes)}, which are divided between "
            "GPU and host only as stored"
        )
    return (
        f"{target}: {fixed}, experts {format_bytes(plan.expert_bytes)}; {format_bytes(plan.left_bytes)} left"
    )
