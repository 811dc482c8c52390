"""Known mistakes in ports of V4, each identified by reproducing it.

When two runs differ, each mistake is built into the model of one side, and the faulty run is compared with the other.
The mistake that removes the difference is its explanation. Each has variants: a mixer can be transposed before or
after Sinkhorn, and nibbles can be permuted in several ways. Nothing is inferred from the shape of the error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from birkhoff.config import V4Config
from birkhoff.kernels.norm.reference import round_key
from birkhoff.kernels.rope import Phases
from birkhoff.kernels.select import KernelSet
from birkhoff.model.transformer import Transformer
from birkhoff.validate import mtp_faults
from birkhoff.validate.compare import Explanation, relative_error
from birkhoff.validate.runs import (
    Fault,
    ForwardRun,
    next_token_input,
    run_layer,
    run_model,
    run_mtp,
    with_fault,
)

CERTAIN = 1e-4  # below this share, no further mistakes are tried
DISTANCE_SITES = ("mhc_streams_pre_attn", "mhc_streams_pre_mlp", "post_attn", "mlp_out", "final_hidden")


TEXTS = {
    "mixer-transposed": "the 4x4 stream mixer is applied transposed: out[k] sums mix[j, k] * streams[j] over j, the "
    "first index",
    "mixer-order": "the rows of hc_*_fn and hc_*_base are read in another order than pre (4), post (4), comb (16)",
    "rope-half-split": "rotary pairs are taken as (i, i + half) instead of neighbouring channels (2i, 2i + 1)",
    "yarn-missing": "YaRN is missing on the compressed layers (ratio 4 and 128), or applied where it should not be",
    "nibble-order": "the two 4-bit codes of a byte, or the 32 of a block, are taken in another order",
    "readout-stream-0": "the head reads stream 0 instead of the sigmoid-weighted sum of all streams",
    "output-not-unrotated": "attention's output is not rotated back by the query's position before the output "
    "projection",
    "router-bias-zero": "the router's bias is zero or not added when experts are chosen (layers after the hash-routed "
    "ones)",
    "sink-zero": "the attention sink is zero or missing: every head adds exp(attn_sink) to the sum of its weights",
    "compress-theta": "layers with compressed entries (ratio 4 and 128) rotate with rope_theta instead of "
    "compress_rope_theta",
    "sinkhorn-iterations": "Sinkhorn runs another number of iterations than hc_sinkhorn_iters; the softmax and one "
    "column normalisation are the first",
    "window-size": "the sliding window is one token off: it holds sliding_window tokens, the query's own included",
    "index-topk": "the indexer keeps another number of blocks than index_topk",
    "route-scale-missing": "the weights of experts are not multiplied by routed_scaling_factor",
    "swiglu-limit-missing": "the gate and up projections of experts are not clamped to swiglu_limit",
    "shared-expert-missing": "the shared expert's output is not added to that of the routed ones",
    **mtp_faults.TEXTS,
}


def faults() -> list[tuple[str, Fault]]:
    """Return (variant, fault) for every form of every mistake, the most common first."""
    return [
        ("after Sinkhorn", Fault("mixer-transposed", kernels=_transposed_write)),
        ("before Sinkhorn", Fault("mixer-transposed", weights=_transposed_rows)),
        ("pre and post swapped", Fault("mixer-order", weights=_reordered((1, 0, 2)))),
        ("pre, comb, post in the file", Fault("mixer-order", weights=_reordered((0, 2, 1)))),
        ("pre, comb, post in the reader", Fault("mixer-order", weights=_misread)),
        ("half-split", Fault("rope-half-split", kernels=_half_split)),
        ("none", Fault("yarn-missing", config=lambda c: replace(c, rope_scaling=None))),
        (
            "rope_theta",
            Fault("compress-theta", config=lambda c: replace(c, compress_rope_theta=c.rope_theta)),
        ),
        ("one more", Fault("window-size", config=_shifted("sliding_window", 1))),
        ("one fewer", Fault("window-size", config=_shifted("sliding_window", -1))),
        ("one more", Fault("sinkhorn-iterations", config=_shifted("hc_sinkhorn_iters", 1))),
        ("one fewer", Fault("sinkhorn-iterations", config=_shifted("hc_sinkhorn_iters", -1))),
        ("all", Fault("index-topk", config=lambda c: replace(c, index_topk=c.max_position_embeddings))),
        ("one fewer", Fault("index-topk", config=_shifted("index_topk", -1))),
        ("1", Fault("route-scale-missing", config=lambda c: replace(c, routed_scaling_factor=1.0))),
        ("none", Fault("swiglu-limit-missing", config=lambda c: replace(c, swiglu_limit=1e30))),
        ("high nibble first", Fault("nibble-order", weights=_columns(_swapped_pairs))),
        (
            "blocks of MXFP4 read as bytes of the release",
            Fault("nibble-order", weights=_columns(_blocks_as_bytes)),
        ),
        (
            "bytes of the release read as blocks of MXFP4",
            Fault("nibble-order", weights=_columns(_bytes_as_blocks)),
        ),
        ("stream 0", Fault("readout-stream-0", weights=_first_stream)),
        ("left rotated", Fault("output-not-unrotated", kernels=_no_inverse_rotation)),
        ("rotated again", Fault("output-not-unrotated", kernels=_forward_rotation)),
        ("zero", Fault("router-bias-zero", weights=_filled(".ffn.gate.bias", 0.0))),
        ("zero", Fault("sink-zero", weights=_filled(".attn.attn_sink", 0.0))),
        ("missing", Fault("sink-zero", weights=_filled(".attn.attn_sink", -1e30))),
        ("missing", Fault("shared-expert-missing", weights=_filled(".shared_experts.w2.weight", 0.0))),
    ]


class RunPair(NamedTuple):
    """Two runs whose difference is to be explained; `where` is added to the form of a mistake that explains it."""

    plain: ForwardRun
    other: ForwardRun
    where: str = ""


def explain(
    model: Transformer, plain: ForwardRun, other: ForwardRun, layer: int | None = None
) -> list[Explanation]:
    """Return the mistakes that, built into `model` (correct run: `plain`), reproduce `other`, best first.

    If none does completely, those that leave less than half of the difference. A mistake is also tried in `layer`
    alone, on the streams of the correct run: a port of single layers starts there, and an error of one layer does."""
    pairs = [RunPair(_sites(plain, DISTANCE_SITES), _sites(other, DISTANCE_SITES))]
    if layer is not None:
        entering = plain.sites["mhc_streams_pre_attn", layer]
        correct = run_layer(model, layer, entering, plain.tokens, plain.label)
        kept = {key: other.sites[key] for key in correct.sites if key in other.sites and key[0] != "moe_topk"}
        local = ForwardRun(other.label, other.tokens, kept, None)
        pairs.append(RunPair(correct, local, f", in layer {layer} alone"))

    def faulty_runs(fault: Fault) -> Iterator[ForwardRun]:
        faulty = with_fault(model, fault)
        yield run_model(faulty, plain.tokens, fault.name)
        if layer is not None:
            yield run_layer(faulty, layer, entering, plain.tokens, fault.name)

    return _explain(pairs, faults(), faulty_runs)


def explain_mtp(model: Transformer, plain: ForwardRun, other: ForwardRun) -> list[Explanation]:
    """`explain` for the MTP block, run over the trunk's streams of `plain`; `other` is a run of the block alone.

    A mistake of the trunk may be one of the block only, such as a mixer that is transposed there."""
    assert plain.mtp is not None
    streams = plain.sites["mhc_streams_final", model.config.num_hidden_layers - 1]
    rows = len(other.tokens) - 1  # the last row is not compared: it has no token two ahead

    def faulty_runs(fault: Fault) -> Iterator[ForwardRun]:
        only_input = fault.mtp_input is not next_token_input
        faulty = model if only_input else with_fault(model, fault, mtp=True)
        yield run_mtp(faulty, streams, plain.tokens, fault.name, fault.mtp_input).leading(rows)

    pair = RunPair(plain.mtp.leading(rows), _sites(other, DISTANCE_SITES).leading(rows))
    return _explain([pair], mtp_faults.mtp_faults(model) + faults(), faulty_runs)


def _explain(
    pairs: Sequence[RunPair],
    tried: Sequence[tuple[str, Fault]],
    faulty_runs: Callable[[Fault], Iterator[ForwardRun]],
) -> list[Explanation]:
    """Return the explanations of the first pair, and the complete ones of the others."""
    differences = [distance(pair.plain, pair.other) for pair in pairs]
    if not any(before > 0 for before in differences):
        return []
    explanations: dict[str, Explanation] = {}
    for variant, fault in tried:
        for pair, before, run in zip(pairs, differences, faulty_runs(fault)):
            after = distance(run, pair.other)
            if not before > 0 or after != after or after >= 0.5 * before:
                continue
            found = Explanation(
                fault.name, variant + pair.where, after / before, before, after, TEXTS[fault.name]
            )
            best = explanations.get(fault.name)
            if (found.complete or not pair.where) and (best is None or found.left < best.left):
                explanations[fault.name] = found
            if found.complete:
                break
        if fault.name in explanations and explanations[fault.name].left <= CERTAIN:
            break
    explained = [e for e in explanations.values() if e.complete]
    return sorted(explained or explanations.values(), key=lambda e: e.left)


def _sites(run: ForwardRun, names: Collection[str]) -> ForwardRun:
    """The run with these sites only."""
    return replace(run, sites={key: x for key, x in run.sites.items() if key[0] in names})


def distance(a: ForwardRun, b: ForwardRun) -> float:
    """Return the mean relative error over the sites of `b` and the logits; 0 if they have none in common."""
    errors = [relative_error(a.sites[key], x) for key, x in b.sites.items() if key in a.sites]
    if a.logits is not None and b.logits is not None:
        errors.append(relative_error(a.logits, b.logits))
    return sum(errors) / len(errors) if errors else 0.0


def _shifted(field: str, by: int) -> Callable[[V4Config], V4Config]:
    """Change a count of the config, to at least 1."""

    def change(config: V4Config) -> V4Config:
        values: dict[str, Any] = {field: max(1, getattr(config, field) + by)}
        return replace(config, **values)

    return change


def _transposed_write(kernels: KernelSet) -> KernelSet:
    def write(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = kernels.mhc_write(streams, y, post, mix.transpose(-1, -2).contiguous())
        return out

    return replace(kernels, mhc_write=write)


def _half_split(kernels: KernelSet) -> KernelSet:
    def rotate(x: torch.Tensor, phases: Phases, inverse: bool = False, own: bool = False) -> torch.Tensor:
        dim = 2 * phases.cos.shape[-1]
        unrotated, rotary = x[..., :-dim], x[..., -dim:]
        pairs = rotary.reshape(*x.shape[:-1], 2, dim // 2).transpose(-1, -2).flatten(-2)
        rotated = kernels.rotate(pairs.contiguous(), phases, inverse)
        halves = rotated.reshape(*x.shape[:-1], dim // 2, 2).transpose(-1, -2).flatten(-2)
        return torch.cat((unrotated, halves), dim=-1)

    return _with_rotation(kernels, rotate)


def _with_rotation(kernels: KernelSet, rotate: Callable[..., torch.Tensor]) -> KernelSet:
    """Rotate with this function wherever the model rotates: alone, and after the norm of queries and keys."""

    def norm_rotate(
        x: torch.Tensor, weight: torch.Tensor | None, eps: float, phases: Phases, keep: int | None = None
    ) -> torch.Tensor:
        return round_key(rotate(kernels.rms_norm(x, weight, eps), phases), keep)

    return replace(kernels, rotate=rotate, norm_rotate=norm_rotate)


def _no_inverse_rotation(kernels: KernelSet) -> KernelSet:
    def rotate(x: torch.Tensor, phases: Phases, inverse: bool = False, own: bool = False) -> torch.Tensor:
        return x if inverse else kernels.rotate(x, phases)

    return _with_rotation(kernels, rotate)


def _forward_rotation(kernels: KernelSet) -> KernelSet:
    def rotate(x: torch.Tensor, phases: Phases, inverse: bool = False, own: bool = False) -> torch.Tensor:
        rotated: torch.Tensor = kernels.rotate(x, phases)
        return rotated

    return _with_rotation(kernels, rotate)


def _mixer_part(name: str) -> str | None:
    """Return `fn`, `base` or `scale` for a sublayer's mixer weight; None for any other name."""
    leaf = name.rsplit(".", 1)[-1]
    return leaf.rsplit("_", 1)[-1] if leaf.startswith(("hc_attn_", "hc_ffn_")) else None


def _stream_count(rows: int) -> int:
    return int((rows + 1) ** 0.5) - 1  # (2 + m) m rows


def _transposed_rows(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    if _mixer_part(name) not in ("fn", "base"):
        return None
    m = _stream_count(len(tensor))
    comb = tensor[2 * m :].view(m, m, *tensor.shape[1:]).transpose(0, 1).flatten(0, 1)
    return torch.cat((tensor[: 2 * m], comb))


def _reordered(order: tuple[int, int, int]) -> Callable[[str, torch.Tensor], torch.Tensor | None]:
    def change(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        part = _mixer_part(name)
        if part is None:
            return None
        if part == "scale":
            return tensor[list(order)]
        m = _stream_count(len(tensor))
        parts = torch.split(tensor, [m, m, m * m])
        return torch.cat([parts[index] for index in order])

    return change


def _misread(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """A correct file read as pre, comb, post."""
    part = _mixer_part(name)
    if part is None:
        return None
    if part == "scale":
        return tensor[[0, 2, 1]]
    m = _stream_count(len(tensor))
    pre, comb, post = torch.split(tensor, [m, m * m, m])
    return torch.cat((pre, post, comb))


def _columns(order: Callable[[int], torch.Tensor]) -> Callable[[str, torch.Tensor], torch.Tensor | None]:
    """Permute the columns of every routed expert."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if ".ffn.experts." not in name or tensor.dim() != 2 or tensor.shape[1] % 32:
            return None
        return tensor[:, order(tensor.shape[1]).to(tensor.device)]

    return change


def _swapped_pairs(width: int) -> torch.Tensor:
    return torch.arange(width).view(-1, 2).flip(1).flatten()


def _blocks_as_bytes(width: int) -> torch.Tensor:
    """Position 2j reads element j, and 2j + 1 element j + 16, of each group of 32."""
    return torch.arange(width).view(-1, 2, 16).transpose(1, 2).flatten()


def _bytes_as_blocks(width: int) -> torch.Tensor:
    return torch.arange(width).view(-1, 16, 2).transpose(1, 2).flatten()


def _filled(ending: str, value: float) -> Callable[[str, torch.Tensor], torch.Tensor | None]:
    """Set every weight whose name has this ending to one value."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        return torch.full_like(tensor, value) if name.endswith(ending) else None

    return change


def _first_stream(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    if name.removeprefix("mtp.0.") == "hc_head_fn":
        return torch.zeros_like(tensor)
    if name.removeprefix("mtp.0.") == "hc_head_base":
        base = torch.full_like(tensor, -40.0)
        base[0] = 40.0
        return base
    return None
