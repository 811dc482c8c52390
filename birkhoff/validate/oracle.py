"""Run a checkpoint in `transformers`' DeepseekV4ForCausalLM as an independent reference.

The oracle receives exactly dequantised weights and interprets the config itself; forward hooks read its activations as
our sites. It does not round activations. The pre and head mixing weights stay inside its modules and are not compared.
It has no MTP block: that is a second oracle of one sliding layer, with the block's layer, head mixer and norm, whose
input is joined here with its norms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from birkhoff.config import V4Config
from birkhoff.errors import OptionError
from birkhoff.validate.runs import MTP, ForwardRun, Sites, finished_blocks, mtp_config
from birkhoff.weights.checkpoint import Checkpoint
from birkhoff.weights.layout import ModelTensor, model_tensors
from birkhoff.weights.tensor_ref import read_values, value_strips

# Released name patterns -> transformers names, applied in this order (spec 10).
_RENAMES = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"^layers\.", "model.layers."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"(compressor|indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.attn\.attn_sink$", ".self_attn.sinks"),
    (r"\.attn\.", ".self_attn."),
    (r"\.wq_([ab])\.", r".q_\1_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.ape$", ".position_bias"),
    (r"\.wo_([ab])\.", r".o_\1_proj."),
    (r"\.ffn\.", ".mlp."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"shared_experts\.w1\.", "shared_experts.gate_proj."),
    (r"shared_experts\.w3\.", "shared_experts.up_proj."),
    (r"shared_experts\.w2\.", "shared_experts.down_proj."),
)
_EXPERT = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.weight")


def run_oracle(checkpoint: Checkpoint, tokens: Sequence[int]) -> ForwardRun:
    """Return the oracle's sites and logits over one sequence, float32."""
    trunk = run_oracle_model(build_oracle(checkpoint), tokens)
    if not checkpoint.has_mtp or len(tokens) < 2:
        return trunk
    streams = trunk.sites["mhc_streams_final", checkpoint.config.num_hidden_layers - 1]
    return replace(trunk, mtp=build_mtp_oracle(checkpoint).run(streams, tokens))


def run_oracle_model(model: Any, tokens: Sequence[int]) -> ForwardRun:
    """Run one forward pass of a built oracle."""
    sites: Sites = {}
    handles = list(_watch(model, sites))
    try:
        with torch.no_grad():
            logits = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
    finally:
        for handle in handles:
            handle.remove()
    return ForwardRun("transformers", tuple(tokens), sites, logits)


@dataclass(frozen=True)
class MtpOracle:
    """The MTP block: `model` is its layer and head; `norms` and `projections` join its input."""

    model: Any
    norms: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]  # enorm, hnorm
    projections: Mapping[str, torch.Tensor]  # e_proj, h_proj [d, d]

    def run(self, streams: torch.Tensor, tokens: Sequence[int]) -> ForwardRun:
        """One forward pass over the trunk's streams [T, m, d]."""
        with torch.no_grad():
            embedded = self.model.model.embed_tokens(torch.tensor(list(tokens)[1:]))
            joined = self.join(streams[:-1], embedded)
        return self.run_joined(joined, tokens)

    def join(self, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Streams [n, m, d] and embeddings [n, d] to the input [n, m, d] of the layer."""
        token = self.norms["enorm"](embedded) @ self.projections["e_proj"].T
        return token.unsqueeze(1) + self.norms["hnorm"](streams) @ self.projections["h_proj"].T

    def run_joined(self, joined: torch.Tensor, tokens: Sequence[int]) -> ForwardRun:
        """One forward pass from the joined input [T - 1, m, d] on."""

        def replace_input(layer: Any, args: Any) -> Any:
            return (joined.unsqueeze(0), *args[1:])

        handle = self.model.model.layers[0].register_forward_pre_hook(replace_input)
        try:
            run = run_oracle_model(self.model, list(tokens)[1:])
        finally:
            handle.remove()
        return replace(run, sites={(site, MTP): x for (site, _), x in run.sites.items()})


def build_mtp_oracle(checkpoint: Checkpoint) -> MtpOracle:
    """Build a `transformers` model of the MTP block and fill it with the checkpoint's values."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

    def own_name(name: str) -> str:
        inside = name.removeprefix("layers.0.")
        return f"mtp.0.{inside}" if name not in ("embed.weight", "head.weight") else name

    norms = {}
    for name in ("enorm", "hnorm"):
        norm: Any = DeepseekV4RMSNorm  # untyped
        norms[name] = norm(checkpoint.config.hidden_size, checkpoint.config.rms_norm_eps)
        norms[name].weight.data.copy_(checkpoint[f"mtp.0.{name}.weight"].read())
    width = checkpoint.config.hidden_size
    projections = {
        name: read_values(checkpoint, f"mtp.0.{name}.weight", 0, width) for name in ("e_proj", "h_proj")
    }
    return MtpOracle(_build(checkpoint, mtp_config(checkpoint.config), own_name), norms, projections)


def build_oracle(checkpoint: Checkpoint) -> Any:
    """Build the `transformers` model and fill it with the checkpoint's values, without the MTP block."""
    return _build(checkpoint, replace(checkpoint.config, num_nextn_predict_layers=0), lambda name: name)


def _build(checkpoint: Checkpoint, config: V4Config, stored_name: Callable[[str], str]) -> Any:
    """Build a model of a config; `stored_name` is the checkpoint's name of a tensor of the config."""
    try:
        from transformers import DeepseekV4ForCausalLM
    except ImportError:
        raise OptionError(
            "the oracle needs the package transformers (5.17 or newer), which is not installed. "
            "Install it, or compare with another checkpoint or with goldens."
        ) from None
    model_class: Any = DeepseekV4ForCausalLM  # untyped
    model = model_class(oracle_config(config)).float().eval()
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    filled: set[str] = set()
    with torch.no_grad():
        for tensor in model_tensors(config):
            filled.add(_fill(targets, checkpoint, tensor, stored_name(tensor.name)))
    unfilled = [name for name in model.state_dict() if name not in filled and "rotary" not in name]
    if unfilled:
        raise OptionError(
            f"this transformers has weights we know nothing of: {unfilled[0]}. Use version 5.17 to 5.22."
        )
    return model


def oracle_name(name: str) -> str:
    """Return the `transformers` name of a released tensor name."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def oracle_config(config: V4Config) -> Any:
    """Return the `transformers` config of a V4Config."""
    from transformers import DeepseekV4Config

    raw = config.to_dict()
    scaling = raw.pop("rope_scaling", None)
    for key in ("model_type", "architectures", "expert_dtype", "quantization_config"):
        raw.pop(key, None)
    raw["compress_ratios"] = list(config.compress_ratios)  # theirs has no MTP entry
    if scaling:
        raw["rope_parameters"] = {"rope_type": "yarn", **{k: v for k, v in scaling.items() if k != "type"}}
    raw |= {"attn_implementation": "eager", "experts_implementation": "eager"}
    return DeepseekV4Config(**raw)


def _fill(targets: dict[str, torch.Tensor], checkpoint: Checkpoint, tensor: ModelTensor, stored: str) -> str:
    """Copy one tensor into the oracle and return the name filled; experts are slices of two stacked tensors."""
    match = _EXPERT.fullmatch(tensor.name)
    if match:
        part = "down_proj" if match[3] == "w2" else "gate_up_proj"
        name = f"model.layers.{match[1]}.mlp.experts.{part}"
        target = targets[name][int(match[2])]
        if part == "gate_up_proj":  # gate rows, then up rows
            half = target.shape[0] // 2
            target = target[:half] if match[3] == "w1" else target[half:]
    else:
        name = oracle_name(tensor.name)
        target = targets[name]
    if tensor.storage == "ids":
        target.copy_(checkpoint[stored].read())
    else:
        for start, values in value_strips(checkpoint, stored):
            target.view(tensor.shape)[start : start + len(values)].copy_(values)
    return name


def _watch(model: Any, sites: Sites) -> Iterator[Any]:
    """Register hooks that record our sites from the oracle's modules."""

    def on(module: Any, layer: int, **readers: Callable[[Any, Any], torch.Tensor]) -> Iterator[Any]:
        for name, read in readers.items():

            def keep(_: Any, args: Any, out: Any, name: str = name, read: Any = read) -> None:
                sites[name, layer] = read(args, out).squeeze(0).detach().float()

            yield module.register_forward_hook(keep)

    for i, block in enumerate(model.model.layers):
        for kind, streams, inputs, module in (
            ("attn", "mhc_streams_pre_attn", "pre_attn", block.attn_hc),
            ("ffn", "mhc_streams_pre_mlp", "mlp_in", block.ffn_hc),
        ):
            yield from on(
                module,
                i,
                **{
                    streams: lambda args, out: args[0],
                    inputs: lambda args, out: out[2],
                    f"mhc_{kind}_post_mix": lambda args, out: out[0],
                    f"mhc_{kind}_res_mix": lambda args, out: out[1],
                },
            )
        indexer = getattr(getattr(block.self_attn, "compressor", None), "indexer", None)
        if indexer is not None:
            yield from on(indexer.scorer, i, index_scores=lambda args, out: _finished(out))
        yield from on(block.self_attn, i, post_attn=lambda args, out: out[0])
        yield from on(block.mlp, i, mlp_out=lambda args, out: out)
        yield from on(
            block.mlp.gate,
            i,
            moe_router_logits=lambda args, out: out[0],
            moe_topk=lambda args, out: torch.stack((out[2].float(), out[1]), dim=-1),
        )
    last = len(model.model.layers) - 1
    yield from on(
        model.model.hc_head,
        last,
        mhc_streams_final=lambda args, out: args[0],
        final_hidden=lambda args, out: out,
    )


def _finished(scores: torch.Tensor) -> torch.Tensor:
    """Scores [1, tokens, blocks] with zeros for unfinished blocks."""
    return scores.masked_fill(~finished_blocks(scores.shape[1]), 0.0)
