"""The plan that `inspect --gpu` prints: a device's memory by kind, experts on both sides, and limits of speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from birkhoff.byte_size import format_bytes
from birkhoff.config import V4Config
from birkhoff.errors import CapacityError

RELEASES = ("flash", "pro")


def config_alone(model: Path) -> V4Config | None:
    """The config where there are no tensors: a JSON file, a directory with config.json alone, a release."""
    if str(model) in RELEASES and not model.exists():
        from birkhoff.convert.presets import preset

        return preset(str(model))
    path = model.expanduser()
    if path.is_file() and path.suffix == ".json":
        return V4Config.from_file(path)
    if path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors*")):
        return V4Config.from_file(path / "config.json")
    return None


def planned(
    config: V4Config, device_bytes: int, context: int | None, requests: int, speeds: tuple[float, float]
) -> dict[str, Any]:
    """The plan, or why there is none; both are answers."""
    from birkhoff.engine.forecast import forecast

    try:
        return forecast(
            config,
            device_bytes,
            context=context,
            requests=requests,
            device_speed=speeds[0],
            bus_speed=speeds[1],
        )
    except CapacityError as error:
        return {"refused": str(error)}


def plan_lines(found: dict[str, Any]) -> list[str]:
    if "refused" in found:
        return [f"gpu         does not fit: {found['refused']}"]
    plan = found["plan"]
    context = found["context"]
    speeds = found["speeds"]
    total = plan["device_bytes"]

    def line(name: str, count: int) -> str:
        return f"            {name:<26}{format_bytes(count):>12}{100 * count / total:7.1f} %"

    kinds = ", ".join(f"{kind} {format_bytes(count)}" for kind, count in context["bytes_by_kind"].items())
    each = ", ".join(
        f"{kind} {count:g} B" for kind, count in context["bytes_per_token_by_kind"].items() if count
    )
    lines = [
        f"gpu         {format_bytes(total)}: {context['requests']} x {context['tokens']} tokens of context, released formats",
        *(line(kind, count) for kind, count in plan["weights"].items()),
        line("cache", plan["cache_bytes"]),
        line("working space (allowed)", plan["working_bytes"]),
        line("hot experts, spare places", plan["hot_bytes"]),
        line("left", plan["left_bytes"]),
        f"experts     {plan['hot']} of {plan['experts']} on the GPU ({100 * plan['share']:.1f} %) and {plan['spare']} "
        f"spare places of {format_bytes(plan['expert_bytes'])}; {format_bytes(plan['host_bytes'])} of host memory for the others",
        f"context     {kinds} for one request ({each} a token)",
        f"limits      by bytes: {speeds['device'] / 1e12:g} TB/s of the GPU, {speeds['bus'] / 1e9:g} GB/s of the bus",
    ]
    for number, row in enumerate(found["limits"]):
        what = (
            "random placement"
            if number == 0 and row["misses"]
            else "by counts, if so"
            if row["misses"]
            else "no misses"
        )
        speed = ", ".join(
            f"{value:.0f} at batch {batch}" for batch, value in row["tokens_per_second"].items()
        )
        lines.append(
            f"            {100 * row['misses']:5.1f} % of reads over the bus ({what}): {speed} tokens/s"
        )
    return lines
