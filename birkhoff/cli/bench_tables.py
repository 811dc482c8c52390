"""What `birkhoff bench …` prints on a terminal: rows of a measurement as tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Row = dict[str, Any]


def machine_line(row: Row) -> str:
    return f"{row['machine']['cpu']}, load {row['machine']['load']}; commit {row['commit']}"


def cost_cells(row: Row, ratio: Mapping[str, float]) -> tuple[str, str, str, str, str]:
    ms = row["ms"]
    spread = f"{ms['p10']:g} to {ms['p90']:g}"
    return row["phase"], row["contender"], f"{ms['median']:g}", spread, f"{ratio['median']:.3f}"


def reuse_line(row: Row, turns: int) -> str:
    if row["kind"] == "prefix":
        return (
            f"{row['cached_tokens']} tokens cached: first token {row['times_sooner']['median']:g} times sooner, "
            f"{row['times_sooner_from_disk']['median']:g} from disk"
        )
    if row["kind"] == "turns":
        return f"{turns} turns: {row['share_of_recomputation']['median']:g} of recomputing every prompt"
    if row["kind"] == "rows":
        return ", ".join(f"{name.replace('_', ' ')}: {ms:g} ms" for name, ms in row["step_ms"].items())
    return (
        f"{row['contender']}: {row['tokens_per_second']['median']:g} tokens/s, "
        f"{row['times_plain']['median']:g} times plain ({row['times_plain_by_processor']['median']:g} by the "
        f"processor's time), accepted {row['accepted']} of {row['drafted']}"
    )


def print_model(rows: list[Row], console: Console) -> None:
    from rich.table import Table

    first = rows[0]
    machine = f"{first['machine']['cpu']}, {first['threads']} threads, load {first['machine']['load']}"
    console.print(
        f"{machine}; commit {first['commit']}; {first['model']}, prompts of {first['prompt_tokens']} tokens"
    )
    table = Table("dtype", "phase", "batch", "contender", "tokens/s", "p10 to p90", "times transformers")
    for row in rows:
        if row["kind"] == "speed":
            speed = row["tokens_per_second"]
            times = row.get("times_transformers")
            variant = f" ({row['experts_implementation']})" if "experts_implementation" in row else ""
            table.add_row(
                row["dtype"],
                row["phase"],
                str(row["batch"]),
                row["contender"] + variant,
                f"{speed['median']:g}",
                f"{speed['p10']:g} to {speed['p90']:g}",
                f"{times['median']:.2f}" if times else "",
            )
    console.print(table)
    for row in rows:
        if row["kind"] == "shares":
            parts = ", ".join(f"{part} {ms:g}" for part, ms in row["model_ms"].items())
            step = ", ".join(f"{part} {ms:g}" for part, ms in row["engine_step_ms"].items())
            console.print(
                f"{row['dtype']} decode of {row['batch']}: ms in the model: {parts}; in a step: {step}"
            )
        elif row["kind"] == "agreement":
            verdict = {True: "[green]same model[/]", False: "[red]not the same model[/]", None: "not judged"}
            console.print(
                f"{row['dtype']} against transformers: {verdict[row['passed']]}, {row['logits']}, {row['tokens']}"
            )


def print_attribution(rows: list[Row], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("over", "baseline", "method", "nodes", "rank correlation", "of the top 20", "times exact"):
        table.add_column(name, justify="left" if name in ("over", "baseline", "method") else "right")
    for row in rows:
        table.add_row(
            row["over"],
            row["baseline"],
            row["method"],
            str(row["nodes"]),
            f"{row['spearman']:.3f}",
            f"{row['overlap']:.1f}",
            f"{row['times_exact']:.3f}",
        )
    console.print(table)
