"""Format the results of `training.evaluate` as text: losses per file, one line per layer, and samples."""

from __future__ import annotations

from typing import Any

MEASURES = ("cut", "whole", "before_rounding")
COLUMNS = (  # heading, attention key, expert key
    ("write", "attn_write", "ffn_write"),
    ("from identity", "attn_from_identity", "ffn_from_identity"),
    ("from uniform", "attn_from_uniform", "ffn_from_uniform"),
    ("gate x output", "attn_gate_x_output", "ffn_gate_x_output"),
)


def as_text(results: dict[str, Any]) -> str:
    lines = [f"{results['checkpoint']}: {results['bytes'] / 1e6:.2f} MB in all"]
    for name in (measure for measure in MEASURES if measure in results):
        scores = results[name]["files"] | {"both": results[name]["both"]}
        lines += [_score(name, part, score) for part, score in scores.items()]
    lines += alive_table(results["alive"])
    if "exact" in results:
        exact = results["exact"]
        worst = f"{exact['worst_difference']:.1e}"
        lines.append(f"exact model on {exact['records']} records: worst difference {worst} nats")
    for sample in results.get("samples", []):
        how = f"temperature {sample['temperature']}, seed {sample['seed']}, {sample['tokens']} tokens"
        lines += ["", f"> {sample['prompt'][:200]}  [{how}]", sample["text"]]
    return "\n".join(lines)


def _score(name: str, part: str, score: dict[str, float]) -> str:
    loss = f"{score['nats_per_token']:.4f} nats/token  {score['bits_per_byte']:.4f} bits/byte"
    drafts = f"MTP {score['mtp_nats_per_token']:.3f} nats, {score['mtp_acceptance']:.1%} accepted"
    return f"  {name:16} {part:12} {loss}  {drafts}"


def alive_table(alive: list[dict]) -> list[str]:
    """One line per layer; pairs are attention and experts, indexer values are kept, best possible and random."""
    headings = "".join(f"{heading:>16}" for heading, _, _ in COLUMNS)
    lines = [f"  layer  mean share{headings}          experts           index"]
    for entry in alive:
        pairs = "".join(f"{f'{entry[first]:.2f} {entry[second]:.2f}':>16}" for _, first, second in COLUMNS)
        experts = f"{entry['idlest_expert']:.2f}-{entry['busiest_expert']:.2f}"
        index = " ".join(
            f"{entry[key]:.2f}" for key in ("index_kept", "index_best", "index_chance") if key in entry
        )
        lines.append(
            f"  {entry['layer']:5}  {entry['stream_mean_share']:10.3f}{pairs}{experts:>17}{index:>16}"
        )
    return lines
