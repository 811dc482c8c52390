"""Direct logit attribution: a logit as a sum over everything that was written to the residual streams.

V4 writes a sublayer's output y to stream k with weight `post[k]` and mixes the streams with a matrix; the head reads
them with weights of its own. All these weights are tensors of the same forward pass, so given them the merged residual
is linear in every output, and so is the logit once the scale of the final norm is given. Going backwards from the head,

    c <- head mix            the weight of each stream in the merged residual
    term of y = sum_k c[k] post[k] <u, y>,      c[j] <- sum_k res_mix[j, k] c[k]

with u the direction of the token behind the final norm. All tensors are those after the edits of the pass: an output
that is ablated has no term. What is not an output of a sublayer (rounding, and edits of the streams) is the difference
between the streams of the pass and what its outputs make of them; it is a term too, so the terms always sum to the
logit. On an ordinary model there is one stream, and every weight is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from birkhoff import notebook
from birkhoff.analysis.forward import one_text, trace
from birkhoff.analysis.metric import token_id
from birkhoff.errors import OptionError, SiteError, UnsupportedModel, quoted
from birkhoff.model.block import Block
from birkhoff.option_checks import as_int
from birkhoff.records import Tabular
from birkhoff.result_file import FileParts, SavedResult
from birkhoff.trace import Trace

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.hf.model import HfModel

UNITS = ("layer", "sublayer", "head", "expert", "stream")
_V4_HOOKS = (
    "attn_head_out",
    "post_attn",
    "mlp_in",
    "mlp_out",
    "moe_topk",
    "mhc_streams_pre_attn",
    "mhc_streams_pre_mlp",
    "mhc_streams_final",
    "mhc_attn_post_mix",
    "mhc_attn_res_mix",
    "mhc_ffn_post_mix",
    "mhc_ffn_res_mix",
    "mhc_head_mix",
    "final_hidden",
)


@dataclass(frozen=True, eq=False)
class LogitAttribution(SavedResult, Tabular):
    """A logit (or a difference of two) at one position as a sum of terms, in float64.

    `embedding` [streams], `attention` and `experts` [layers, streams]: the terms of the embedding and of the sublayers,
    by the stream they were written to. `rest` [streams]: what no sublayer wrote: rounding, biases, edits. `heads`
    [layers, heads]: the terms of the attention sublayers by head, all streams together. `routed`: for each layer the
    terms of the chosen experts by id, and of the shared expert under "shared". `heads` and `routed` are None where the
    model does not show them. `mlp` is the name of the sublayers after attention: "experts" or, in dense models, "mlp".
    """

    kind: ClassVar[str] = "logit attribution"
    logit: float
    tokens: tuple[int, ...]
    position: int
    embedding: torch.Tensor
    attention: torch.Tensor
    experts: torch.Tensor
    rest: torch.Tensor
    heads: torch.Tensor | None
    routed: list[dict[int | str, float]] | None
    names: tuple[str, ...]
    missing: dict[str, str]
    mlp: str = "experts"

    @property
    def total(self) -> float:
        """The sum of all terms: the logit."""
        return float(self.embedding.sum() + self.attention.sum() + self.experts.sum() + self.rest.sum())

    def by(self, unit: str = "sublayer") -> dict[str, float]:
        """The terms by name, for one kind of unit: "layer", "sublayer", "head", "expert" or "stream". They sum to the
        logit: what is not divided further is one term, as the embedding and the rest are."""
        if unit not in UNITS:
            raise OptionError(f"unit is {quoted(unit)}, expected one of {', '.join(UNITS)}.")
        if unit in self.missing:
            raise UnsupportedModel(self.missing[unit])
        layers = range(len(self.attention))
        if unit == "stream":
            total = self.embedding + self.attention.sum(0) + self.experts.sum(0) + self.rest
            return {f"stream[{index}]": float(value) for index, value in enumerate(total)}
        terms = {"embedding": float(self.embedding.sum())}
        for layer in layers:
            attention, experts = float(self.attention[layer].sum()), float(self.experts[layer].sum())
            if unit == "layer":
                terms[f"layer[{layer}]"] = attention + experts
                continue
            if unit == "head" and self.heads is not None:
                heads = self.heads[layer].tolist()
                terms |= {f"head[{layer}, {head}]": value for head, value in enumerate(heads)}
                terms[f"attention[{layer}] rest"] = attention - sum(heads)
            else:
                terms[f"attention[{layer}]"] = attention
            if unit == "expert" and self.routed is not None:
                routed = self.routed[layer]
                terms |= {f"expert[{layer}, {expert}]": value for expert, value in routed.items()}
                terms[f"{self.mlp}[{layer}] rest"] = experts - sum(routed.values())
            else:
                terms[f"{self.mlp}[{layer}]"] = experts
        terms["rest"] = float(self.rest.sum())
        return terms

    def top(self, unit: str = "sublayer", k: int = 10) -> list[tuple[str, float]]:
        """The k largest terms of a unit by absolute value."""
        return sorted(self.by(unit).items(), key=lambda term: -abs(term[1]))[:k]

    def records(self, unit: str = "sublayer") -> list[dict[str, Any]]:
        """A row for each term of a unit (see `by`): its name and its value."""
        return [{"term": name, "value": value} for name, value in self.by(unit).items()]

    def to_json(self) -> dict[str, Any]:
        """All fields, and the sum of the terms."""
        tensors, facts = self.file_parts()
        lists = {name: tensor.tolist() for name, tensor in tensors.items()}
        return {**facts, "heads": None, **lists, "total": self.total}

    def file_parts(self) -> FileParts:
        """The tensors by their names (`heads` if there are any); facts: everything else."""
        names = ("embedding", "attention", "experts", "rest", "heads")
        tensors = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        facts = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in names}
        return FileParts(tensors, facts)

    @classmethod
    def from_file_parts(cls, parts: FileParts) -> LogitAttribution:
        facts = dict(parts.facts)
        if facts["routed"] is not None:  # JSON has no numbers as keys
            facts["routed"] = [
                {int(name) if name.isdecimal() else name: value for name, value in terms.items()}
                for terms in facts["routed"]
            ]
        tuples = {name: tuple(facts[name]) for name in ("tokens", "names")}
        return cls(**{"heads": None, **parts.tensors, **facts, **tuples})

    def _repr_html_(self) -> str:
        name = " - ".join(repr(name) for name in self.names)
        return notebook.bars(self.top(k=24), f"Logit of {name} at {self.position}: {self.logit:.4f}")

    def __repr__(self) -> str:
        name = " - ".join(repr(name) for name in self.names)
        terms = ", ".join(f"{term} {value:+.3f}" for term, value in self.top(k=4))
        return f"LogitAttribution({name} at {self.position}: {self.logit:.4f} = {terms}, ...)"


def logit_attribution(
    engine: Engine, prompt: Any, token: Any = None, position: int = -1, steer: Any = None
) -> LogitAttribution:
    """The terms of the logit of `token` after the token at `position`; by default of the most likely token. Two tokens
    give the terms of the difference of their logits."""
    ids = one_text(engine, prompt, "logit_attribution")
    if as_int(position) is None or not -len(ids) <= position < len(ids):
        raise SiteError(f"position is {quoted(position)}, the text has {len(ids)} tokens.")
    at = position % len(ids)
    if isinstance(token, torch.Tensor) and not token.is_floating_point():
        token = token.tolist()
    pair = () if token is None else tuple(token) if isinstance(token, (list, tuple)) else (token,)
    if len(pair) > 2:
        raise OptionError(f"token is {quoted(token)}, expected one token, or two to subtract.")
    tokens = [token_id(engine, each) for each in pair]
    whole = engine.num_streams is not None
    if whole:
        engine.v4_model  # noqa: B018  the mixers of a V4 of another backend are not all visible
    hooks: Sequence[str] = _V4_HOOKS if whole else _ordinary_hooks(engine)
    recorded = trace(engine, [ids], hooks, None if steer is None else [steer], "carried")[0]
    tokens = tokens or [int(recorded.logits[at].argmax())]
    with torch.no_grad():
        parts = (
            _v4_terms(engine, recorded, at, tokens)
            if whole
            else _ordinary_terms(engine, recorded, at, tokens)
        )
    names = engine.token_texts(tokens) or [str(each) for each in tokens]
    return LogitAttribution(tokens=tuple(tokens), position=at, names=tuple(names), **parts)


def _subtract(rows: torch.Tensor) -> torch.Tensor:
    """One row, or the difference of two."""
    return rows[0] - rows[1] if len(rows) == 2 else rows[0]


def _v4_terms(engine: Engine, recorded: Trace, at: int, tokens: list[int]) -> dict[str, Any]:
    model = engine.v4_model
    count, streams = len(model.layers), model.config.hc_mult

    def row(hook: str, layer: int) -> torch.Tensor:
        return recorded[hook, layer][at].double()

    head = model.head
    weight = _subtract((head.dense() if head.packed else head.weight)[tokens].double())
    final = row("final_hidden", -1)
    scale = (final.square().mean() + model.norm.eps).rsqrt()
    direction = weight * model.norm.weight.double() * scale
    logit = float(_subtract(recorded.logits[at, tokens].double()))
    share = row("mhc_head_mix", -1)
    attention, experts = torch.zeros(2, count, streams, dtype=torch.float64)
    heads = torch.zeros(count, model.config.num_attention_heads, dtype=torch.float64)
    routed: list[dict[int | str, float]] = [{} for _ in range(count)]
    rest = torch.zeros(streams, dtype=torch.float64)
    after = row("mhc_streams_final", -1)
    # Rounding of merge, norm and head, and edits there.
    rest += (logit - float(share @ (after @ direction))) / streams
    for layer in reversed(range(count)):
        block = model.blocks()[layer]
        for name, hook, output, terms in (
            ("ffn", "mhc_streams_pre_mlp", "mlp_out", experts),
            ("attn", "mhc_streams_pre_attn", "post_attn", attention),
        ):
            before, y = row(hook, layer), row(output, layer)
            post, mix = row(f"mhc_{name}_post_mix", layer), row(f"mhc_{name}_res_mix", layer)
            written = share * post
            terms[layer] = (written * (y @ direction)).cpu()
            made = mix.T @ before + post.unsqueeze(-1) * y
            rest += (share * ((after - made) @ direction)).cpu()
            if name == "attn":
                outputs = recorded["attn_head_out", layer][at]
                heads[layer] = (written.sum() * _head_products(block, outputs, direction)).cpu()
            else:
                products = _expert_products(block, recorded, layer, at, direction)
                routed[layer] = {expert: float(written.sum()) * value for expert, value in products.items()}
            share, after = mix @ share, before
    embedding = (share * (after @ direction)).cpu()
    return {
        "logit": logit,
        "embedding": embedding,
        "attention": attention,
        "experts": experts,
        "rest": rest,
        "heads": heads,
        "routed": routed,
        "missing": {},
    }


def _head_products(block: Block, heads: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Products [heads] of `direction` with what each head, [heads, c], adds to the output of the sublayer."""
    attn = block.attn
    latent = attn.wo_b.dense().double().T @ direction  # [groups * rank]
    first = attn.wo_a.dense().double().view(attn.groups, attn.group_rank, -1)
    # -> [groups, heads / groups * c]
    back = torch.einsum("gr,gri->gi", latent.view(attn.groups, attn.group_rank), first)
    products: torch.Tensor = (heads.double() * back.view(attn.heads, attn.head_dim)).sum(-1)
    return products


def _expert_products(
    block: Block, recorded: Trace, layer: int, at: int, direction: torch.Tensor
) -> dict[int | str, float]:
    """Products of `direction` with the weighted output of each expert of the token at `at`."""
    ffn = block.ffn
    x = block.ffn_norm(recorded["mlp_in", layer][at : at + 1])
    chosen = recorded["moe_topk", layer][at]  # [k, 2]
    ids, weights = chosen[:, :1].long(), chosen[:, 1:].contiguous()
    outputs = ffn.experts(x.expand(len(ids), -1).contiguous(), ids, weights).double() @ direction
    _, gate_up = ffn.in_proj(x)
    shared = float(ffn.shared_experts(gate_up)[0].double() @ direction)
    products: dict[int | str, float] = dict(zip(ids[:, 0].tolist(), outputs.tolist()))
    return products | {"shared": shared}


def _ordinary_hooks(engine: Engine) -> list[str]:
    wanted = ("pre_attn", "attn_z", "attn_out", "mlp_out", "final_hidden")
    missing = [hook for hook in ("attn_out", "mlp_out") if hook not in engine.schema]
    if missing:
        raise UnsupportedModel(
            f"{engine.name} has no hook {', '.join(missing)}, whose outputs are the terms of a logit here. "
            f"Its hooks are {', '.join(engine.schema)}."
        )
    return [hook for hook in wanted if hook in engine.schema]


def _ordinary_terms(engine: Engine, recorded: Trace, at: int, tokens: list[int]) -> dict[str, Any]:
    model = cast("HfModel", engine.model)
    count = engine.config.num_hidden_layers
    final = recorded["final_hidden", -1][at].double()
    normed = model.norm(recorded["final_hidden", -1][at : at + 1])[0].double()
    output = model.network.get_output_embeddings()
    weight = _subtract(output.weight[tokens].double())
    bias = 0.0 if getattr(output, "bias", None) is None else float(_subtract(output.bias[tokens].double()))
    logit = float(weight @ normed) + bias  # before a cap, if the model has one
    direction = _behind_norm(model.network.get_submodule(model.family.norm), weight, final)
    embedding = recorded["pre_attn", 0][at].double() @ direction
    attention = torch.stack([recorded["attn_out", layer][at].double() @ direction for layer in range(count)])
    experts = torch.stack([recorded["mlp_out", layer][at].double() @ direction for layer in range(count)])
    rest = torch.tensor([logit - float(embedding + attention.sum() + experts.sum())], dtype=torch.float64)
    reason = (
        f"the experts of {engine.name} run inside one module of Transformers and are not visible one by one."
        if model.family.moe
        else f"{engine.name} has no experts. Attribute by sublayer."
    )
    missing = {"expert": reason}
    heads = None
    if "attn_z" in recorded.hooks and model.points["attn_out"].module in ("self_attn", "attn", "attention"):
        heads = torch.stack(
            [_ordinary_heads(model, recorded, layer, at, direction) for layer in range(count)]
        ).cpu()
    else:
        missing["head"] = (
            f"{engine.name} normalises the output of its attention, which is then not the sum of its heads. "
            "Attribute by sublayer."
        )
    return {
        "logit": logit,
        "embedding": embedding.view(1).cpu(),
        "attention": attention.unsqueeze(-1).cpu(),
        "experts": experts.unsqueeze(-1).cpu(),
        "rest": rest,
        "heads": heads,
        "routed": None,
        "missing": missing,
        "mlp": "experts" if model.family.moe else "mlp",
    }


def _behind_norm(norm: Any, weight: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
    """The direction d with <d, x> = <weight, norm(x)> up to a constant, for residuals x scaled as `final` is.

    A LayerNorm also removes the mean. The gain of an RMSNorm is its weight or, in Gemma, one more: whichever is nearer
    to what the norm does to a row of equal entries."""
    eps = next(
        float(value)
        for name in ("variance_epsilon", "eps")
        if (value := getattr(norm, name, None)) is not None
    )
    gain: torch.Tensor = norm.weight.double()
    if isinstance(norm, torch.nn.LayerNorm):
        scaled = weight * gain / (final.var(correction=0) + eps).sqrt()
        return scaled - scaled.mean()
    seen = norm(torch.full_like(norm.weight, 1e3)).double()
    if (seen - gain - 1).abs().sum() < (seen - gain).abs().sum():
        gain = gain + 1
    return weight * gain * (final.square().mean() + eps).rsqrt()


def _ordinary_heads(
    model: Any, recorded: Trace, layer: int, at: int, direction: torch.Tensor
) -> torch.Tensor:
    """Products [heads] of `direction` with the output of each head."""
    count = model.config.num_attention_heads
    module = model.layers[layer].get_submodule(model.points["attn_z"].module)
    weight = module.weight.double()
    # Conv1D is [in, out].
    back = weight.T @ direction if hasattr(module, "in_features") else weight @ direction
    products: torch.Tensor = (recorded["attn_z", layer][at].double() * back).view(count, -1).sum(-1)
    return products
