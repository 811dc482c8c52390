"""The reference implementation: `transformers`' DeepseekV4ForCausalLM with the weights of one of our models."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from birkhoff.config import V4Config
from birkhoff.hooks import sites
from birkhoff.hooks.tap import EagerTap
from birkhoff.model.transformer import Transformer

_RENAME = (
    (r"^embed\.weight$", "model.embed_tokens.weight"),
    (r"^head\.weight$", "lm_head.weight"),
    (r"^norm\.weight$", "model.norm.weight"),
    (r"^hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    (r"^layers\.", "model.layers."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"(compressor(?:\.indexer)?)\.norm\.", r"\1.kv_norm."),
    (r"\.attn\.attn_sink$", ".self_attn.sinks"),
    (r"\.attn\.", ".self_attn."),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.ape$", ".position_bias"),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.ffn\.", ".mlp."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"shared_experts\.w1\.", "shared_experts.gate_proj."),
    (r"shared_experts\.w3\.", "shared_experts.up_proj."),
    (r"shared_experts\.w2\.", "shared_experts.down_proj."),
)


class InDouble(TorchFunctionMode):
    """Everything that asks for float32 gets float64, also inside of a model: a model of float64 that is built and run
    in this mode rounds nothing to float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wider(value):
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        kwargs = {name: wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(wider, args), **kwargs)


def arithmetic(dtype: torch.dtype) -> AbstractContextManager[object]:
    """The mode to build and run a model of this dtype in."""
    return InDouble() if dtype == torch.float64 else nullcontext()


def oracle_name(name: str) -> str:
    for pattern, replacement in _RENAME:
        name = re.sub(pattern, replacement, name)
    return name


def oracle_config(config: V4Config) -> DeepseekV4Config:
    raw = config.to_dict()
    scaling = raw.pop("rope_scaling", None)
    for key in ("model_type", "architectures", "expert_dtype", "quantization_config"):
        raw.pop(key, None)
    raw["compress_ratios"] = list(config.compress_ratios)
    if scaling:
        scaling["rope_type"] = scaling.pop("type")
        raw["rope_parameters"] = scaling
    if isinstance(raw["eos_token_id"], tuple):
        raw["eos_token_id"] = list(raw["eos_token_id"])
    theirs = DeepseekV4Config(**raw, attn_implementation="eager", experts_implementation="eager")
    assert (
        theirs.qk_rope_head_dim == config.qk_rope_head_dim
    )  # computed there from a fraction, which may round down
    return theirs


def build_oracle(ours: Transformer) -> DeepseekV4ForCausalLM:
    """The reference model with the same weights (trunk only; it has no MTP block), in float32; in float64 if it is
    built in `InDouble`."""
    theirs = DeepseekV4ForCausalLM(oracle_config(ours.config)).float().eval()
    given: dict[str, torch.Tensor] = {}
    stacks: dict[str, list] = {}
    for d in ours.destinations():
        if d.name.startswith("mtp."):
            continue
        name, tensor = (
            oracle_name(d.name),
            d.tensor.detach().float() if d.kind == "value" else d.tensor.long(),
        )
        match = re.match(r"(.*\.experts)\.(\d+)\.(w[123])\.weight$", name)
        if match:
            stacks.setdefault(match[1], []).append((int(match[2]), match[3], tensor))
        else:
            given[name] = tensor
    for prefix, parts in stacks.items():
        by = {(e, w): t for e, w, t in parts}
        count = 1 + max(e for e, _ in by)
        given[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat((by[e, "w1"], by[e, "w3"])) for e in range(count)]
        )
        given[f"{prefix}.down_proj"] = torch.stack([by[e, "w2"] for e in range(count)])
    missing, unexpected = theirs.load_state_dict(given, strict=False)
    missing = [name for name in missing if "rotary" not in name]
    assert not missing and not unexpected, (missing, unexpected)
    return theirs


@dataclass
class Choice:
    """What one layer of the oracle selected: `picked` [T, options], and the gap [T] to the best option left out."""

    picked: torch.Tensor
    margin: torch.Tensor


def _kept_and_gap(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, options] -> mask of the `count` best finite ones, and the gap between the last kept and the next."""
    ranked = scores.sort(dim=-1, descending=True)
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ranked.indices[:, :count], True)
    gap = torch.full(scores.shape[:1], torch.inf)
    if scores.shape[-1] > count:
        gap = ranked.values[:, count - 1] - ranked.values[:, count]
        gap = gap.nan_to_num(nan=torch.inf)  # fewer options than `count`: nothing was left out
    return kept & scores.isfinite(), gap


@contextmanager
def oracle_choices(theirs: DeepseekV4ForCausalLM) -> Iterator[dict[tuple[str, int], Choice]]:
    """Record, in a forward pass of one sequence, the entries and experts that each layer selects."""
    choices: dict[tuple[str, int], Choice] = {}
    handles = []

    def index_scores(layer, topk):
        def hook(module, args, scores):
            finished = (torch.arange(scores.shape[1]) + 1) // 4
            future = torch.arange(scores.shape[2]) >= finished.unsqueeze(-1)
            choices["index", layer] = Choice(*_kept_and_gap(scores[0].masked_fill(future, -torch.inf), topk))

        return hook

    def routing(layer, topk):
        def hook(module, args, out):
            biased = torch.nn.functional.softplus(out[0]).sqrt() + module.e_score_correction_bias
            choices["route", layer] = Choice(*_kept_and_gap(biased, topk))

        return hook

    for layer, block in enumerate(theirs.model.layers):
        if hasattr(block.self_attn.compressor, "indexer"):
            scorer = block.self_attn.compressor.indexer.scorer
            handles.append(scorer.register_forward_hook(index_scores(layer, theirs.config.index_topk)))
        if not block.mlp.is_hash:
            handles.append(
                block.mlp.gate.register_forward_hook(routing(layer, theirs.config.num_experts_per_tok))
            )
    try:
        yield choices
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def our_choices(ours: Transformer) -> Iterator[tuple[dict[tuple[str, int], torch.Tensor], EagerTap]]:
    """The same for our model, which must be run with the tap that is yielded."""
    picked: dict[tuple[str, int], torch.Tensor] = {}
    handles = []

    def seen(site, layer, x):
        if site is sites.MOE_TOPK and not ours.config.is_hash_routed(layer):
            chosen = torch.zeros(len(x), ours.config.n_routed_experts, dtype=torch.bool)
            picked["route", layer] = chosen.scatter_(-1, x[..., 0].long(), True)

    def index(layer):
        def hook(module, args, out):
            if out is not None:
                picked["index", layer] = out[0]

        return hook

    for layer, block in enumerate(ours.layers):
        if block.attn.indexer is not None:
            handles.append(block.attn.indexer.register_forward_hook(index(layer)))
    try:
        yield picked, EagerTap(seen=seen)
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Agreement:
    """How far two runs of one sequence agree. `flip` is the first selection that differs, at position `compared`."""

    error: float
    compared: int
    flip: tuple[str, int] | None = None
    margin: float = math.inf


def oracle_logits(theirs: DeepseekV4ForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), arithmetic(theirs.lm_head.weight.dtype):
        return theirs(tokens.unsqueeze(0), use_cache=False).logits[0]


def agreement(ours: Transformer, theirs: DeepseekV4ForCausalLM, tokens: torch.Tensor) -> Agreement:
    """Largest logit difference over the positions before the first selection that differs, usually all of them.

    Two options whose scores differ by less than float32 resolution may be selected either way; everything after such a
    position legitimately differs. The caller compares `margin` with the resolution of float32.
    """
    with torch.no_grad(), our_choices(ours) as (picked, tap), oracle_choices(theirs) as expected:
        with arithmetic(ours.numerics.dtype):
            mine = ours(tokens, tap)
        other = oracle_logits(theirs, tokens)
    first = Agreement(0.0, len(tokens))
    for key, choice in expected.items():
        if key not in picked:  # no entry exists yet
            continue
        differs = (picked[key] != choice.picked).any(-1).nonzero()
        if len(differs) and (at := int(differs[0])) < first.compared:
            first = Agreement(0.0, at, key, float(choice.margin[at]))
    gap = (mine - other).abs()[: first.compared]
    first.error = float(gap.max()) if len(gap) else 0.0
    return first


def oracle_sites(theirs: DeepseekV4ForCausalLM, tokens: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
    """Tensors of the oracle at each of our sites, by (site name, layer), for one sequence.

    The read-in and read-out weights (12..14) are internal to its modules and missing here.
    """
    sites: dict[tuple[str, int], torch.Tensor] = {}
    handles = []

    def keep(name, layer, take):
        def hook(module, args, out):
            sites[name, layer] = take(args, out).squeeze(0)

        return hook

    def watch(module, layer, **takes):
        handles.extend(module.register_forward_hook(keep(name, layer, take)) for name, take in takes.items())

    for i, block in enumerate(theirs.model.layers):
        for kind, inputs, module in (("attn", "pre_attn", block.attn_hc), ("ffn", "mlp_in", block.ffn_hc)):
            watch(
                module,
                i,
                **{
                    f"mhc_streams_pre_{'attn' if kind == 'attn' else 'mlp'}": lambda args, out: args[0],
                    f"mhc_{kind}_post_mix": lambda args, out: out[0],
                    f"mhc_{kind}_res_mix": lambda args, out: out[
                        1
                    ],  # consumed transposed there, so [from, to] as ours
                    inputs: lambda args, out: out[2],
                },
            )
        watch(block.self_attn, i, post_attn=lambda args, out: out[0])
        heads, channels = theirs.config.num_attention_heads, theirs.config.head_dim
        watch(
            block.self_attn.o_a_proj,
            i,
            attn_head_out=lambda args, out, shape=(heads, channels): args[0].flatten(2).unflatten(2, shape),
        )
        watch(block.mlp, i, mlp_out=lambda args, out: out)
        watch(
            block.mlp.gate,
            i,
            moe_router_logits=lambda args, out: out[0],
            moe_topk=lambda args, out: torch.stack((out[2].float(), out[1]), dim=-1),
        )
    last = len(theirs.model.layers) - 1
    watch(
        theirs.model.hc_head,
        last,
        mhc_streams_final=lambda args, out: args[0],
        final_hidden=lambda args, out: out,
    )
    try:
        with torch.no_grad():
            theirs(tokens.unsqueeze(0), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return sites
