"""Broken ports, one mistake each, made inside `transformers` or in files, independently of `birkhoff.validate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from birkhoff.validate.oracle import MtpOracle, build_oracle, run_oracle_model
from birkhoff.validate.runs import ForwardRun
from birkhoff.weights.checkpoint import Checkpoint, open_checkpoint

# Mistakes that are another value in the config; the values of `tiny` are 8, 20, 12, 1.5, 1.0 and 160,000.
OTHER_CONFIG = {
    "yarn-missing": {"rope_scaling": None},
    "window-size": {"sliding_window": 9},
    "sinkhorn-iterations": {"hc_sinkhorn_iters": 19},
    "index-topk": {"index_topk": 11},
    "route-scale-missing": {"routed_scaling_factor": 1.0},
    "swiglu-limit-missing": {"swiglu_limit": 1e6},
    "compress-theta": {"compress_rope_theta": 10000.0},
}


@contextmanager
def other_rotation(rotation) -> Iterator[None]:
    right = theirs.apply_rotary_pos_emb
    theirs.apply_rotary_pos_emb = lambda *args, **options: rotation(right, *args, **options)
    try:
        yield
    finally:
        theirs.apply_rotary_pos_emb = right


def half_split(right, x, cos, sin, unsqueeze_dim=1):
    cos, sin = (torch.cat((part, part), -1).unsqueeze(unsqueeze_dim) for part in (cos, sin))
    width = cos.shape[-1]
    still, turning = x[..., :-width], x[..., -width:].float()
    a, b = turning.chunk(2, -1)
    return torch.cat((still, (turning * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)), -1)


class NeverBack:
    """Skip the inverse rotation: a call whose sine is the negative of an earlier one."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, right, x, cos, sin, **options):
        if any(before.shape == sin.shape and torch.equal(sin, -before) for before in self.seen):
            return x
        self.seen.append(sin)
        return right(x, cos, sin, **options)


def broken_run(
    name: str, path: Path, tokens: list[int], inputs: dict[int, torch.Tensor] | None = None
) -> ForwardRun:
    """Run the checkpoint in a port with this mistake. `inputs` replace the streams that enter layers."""
    checkpoint = open_checkpoint(path)
    config = replace(checkpoint.config, **OTHER_CONFIG.get(name, {}))
    checkpoint = Checkpoint(path, config, checkpoint.dialect, checkpoint._tensors, [], checkpoint.files)
    model = build_oracle(checkpoint)
    if name == "mixer-order":
        with torch.no_grad():
            for block in model.model.layers:
                for mixer in (block.attn_hc, block.ffn_hc):
                    order = [4, 5, 6, 7, 0, 1, 2, 3, *range(8, 24)]
                    mixer.fn.copy_(mixer.fn[order])
                    mixer.base.copy_(mixer.base[order])
                    mixer.scale.copy_(mixer.scale[[1, 0, 2]])
    if name == "mixer-transposed":
        for block in model.model.layers:
            for mixer in (block.attn_hc, block.ffn_hc):
                mixer.register_forward_hook(lambda _, args, out: (out[0], out[1].transpose(-1, -2), out[2]))
    if name == "readout-stream-0":
        model.model.hc_head.register_forward_hook(lambda _, args, out: args[0][:, :, 0])
    if name == "nibble-order":
        with torch.no_grad():
            for block in model.model.layers:
                for stack in (block.mlp.experts.gate_up_proj, block.mlp.experts.down_proj):
                    even, odd = stack[..., 0::2].clone(), stack[..., 1::2].clone()
                    stack[..., 0::2], stack[..., 1::2] = odd, even
    if name == "router-bias-zero":
        with torch.no_grad():
            for block in model.model.layers:
                if getattr(block.mlp.gate, "e_score_correction_bias", None) is not None:
                    block.mlp.gate.e_score_correction_bias.zero_()
    if name == "sink-zero":
        with torch.no_grad():
            for block in model.model.layers:
                block.self_attn.sinks.zero_()
    if name == "shared-expert-missing":
        for block in model.model.layers:
            block.mlp.shared_experts.register_forward_hook(lambda _, args, out: torch.zeros_like(out))
    for layer, streams in (inputs or {}).items():
        model.model.layers[layer].register_forward_pre_hook(
            lambda _, args, streams=streams: (streams.unsqueeze(0).contiguous(), *args[1:])
        )
    rotation = {"rope-half-split": half_split, "output-not-unrotated": NeverBack()}.get(name)
    if rotation is None:
        return run_oracle_model(model, tokens)
    with other_rotation(rotation):
        return run_oracle_model(model, tokens)


def _rms(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def broken_mtp_run(name: str, variant: str, mtp: MtpOracle, oracle: Any, trunk: ForwardRun) -> ForwardRun:
    """Run the MTP block after a correct trunk, in a port with this mistake. The input is joined in plain tensors;
    `oracle` is the model of the trunk."""
    config, tokens = mtp.model.config, torch.tensor(trunk.tokens)
    streams = trunk.sites["mhc_streams_final", max(layer for _, layer in trunk.sites)][:-1]
    table = mtp.model.lm_head.weight if variant == "rows of the head" else mtp.model.model.embed_tokens.weight
    enorm, hnorm = mtp.norms["enorm"].weight, mtp.norms["hnorm"].weight
    e_proj, h_proj = mtp.projections["e_proj"].T, mtp.projections["h_proj"].T
    eps = config.rms_norm_eps
    with torch.no_grad():
        ahead = {"the token itself": 0, "two ahead": 2}.get(variant, 1)
        embedded = table[torch.cat((tokens, tokens[:1]))[ahead : ahead + len(tokens) - 1]]
        if variant == "zero at position 0":
            embedded = torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))
        if variant == "enorm and hnorm swapped":
            enorm, hnorm = hnorm, enorm
        if name == "mtp-projections-swapped":
            e_proj, h_proj = h_proj, e_proj
        if name == "mtp-input-merged":
            row = oracle.model.hc_head(streams.unsqueeze(0))[0]
            row = row if variant == "before the final norm" else oracle.model.norm(row)
            streams = row.unsqueeze(1).expand_as(streams)
        token, state = _rms(embedded, enorm, eps) @ e_proj, _rms(streams, hnorm, eps) @ h_proj
        if variant == "after the projections":
            token, state = _rms(embedded @ e_proj, enorm, eps), _rms(streams @ h_proj, hnorm, eps)
        if variant == "hnorm over all streams":
            state = _rms(streams.flatten(1), 1.0, eps).view_as(streams) * hnorm @ h_proj
        if variant == "no enorm":
            token = embedded @ e_proj
        if variant == "no hnorm":
            state = streams @ h_proj
        token = token.unsqueeze(1).expand(-1, config.hc_mult, -1).clone()
        if name == "mtp-embedding" and variant in ("in stream 0 only", "missing"):
            token[:, 1 if variant == "in stream 0 only" else 0 :] = 0
        own = mtp.model.model
        if "norm" in variant and name == "mtp-head-shared":
            own.norm.load_state_dict(oracle.model.norm.state_dict())
        if "hc_head" in variant:
            own.hc_head.load_state_dict(oracle.model.hc_head.state_dict())
    return mtp.run_joined(token + state, trunk.tokens)
