"""A causal language model of Transformers whose sites are tapped: captured and edited like those of our own model.

Every site of the family's table (`families.py`) has a forward hook that hands the tensor to the tap of the running
forward pass, flattened to one row per token. Without a tap the hooks return at once. Forward passes of several threads
do not share a tap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from birkhoff.dtype_names import dtype_name
from birkhoff.hf.families import Family, Point, points_of
from birkhoff.hooks.schema import HookSchema, ordinary_schema
from birkhoff.hooks.sites import BY_NAME, FINAL_HIDDEN, MHC_STREAMS_FINAL, MOE_TOPK, Site
from birkhoff.hooks.tap import NoTap, Tap

_ROW_AXES = {"md": 2, "mm": 2}  # dimensions of a row, by shape; others have one


@dataclass(frozen=True)
class HfConfig:
    """The `ModelConfig` of a model of Transformers. `raw` is its own config as a dictionary."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    raw: Mapping[str, Any]

    @property
    def num_attention_heads(self) -> int:
        return int(self.raw.get("num_attention_heads") or self.raw["n_head"])


class HfModel:
    """`network` is the Transformers model, `family` its row of the table."""

    def __init__(self, network: Any, family: Family, config: HfConfig):
        self.network = network.eval()
        self.family = family
        self.config = config
        self.layers: nn.ModuleList = network.get_submodule(family.layers)
        self.points = points_of(family, config.raw, dense_layers=not self._all_sparse())
        self._norm: nn.Module = network.get_submodule(family.norm)
        self._head: nn.Module = network.get_output_embeddings()
        self._cap: float | None = config.raw.get("final_logit_softcapping")
        self._running = threading.local()  # the tap of this thread's forward pass
        for layer, module in enumerate(self.layers):
            for name, point in self.points.items():
                self._hook(module.get_submodule(point.module), BY_NAME[name], layer, point)
        at_end = {FINAL_HIDDEN: self._norm}
        if family.stream_merge:
            at_end[MHC_STREAMS_FINAL] = network.get_submodule(family.stream_merge)
        for site, module in at_end.items():
            self._hook(module, site, len(self.layers) - 1, Point("", "input"))
        self._sites = [*self.points, *(site.name for site in at_end)]

    @property
    def device(self) -> torch.device:
        return self._head.weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self._head.weight.dtype  # type: ignore[return-value]

    @property
    def schema(self) -> dict[str, HookSchema]:
        raw, hidden = self.config.raw, self.config.hidden_size
        sizes: dict[str, tuple[int, ...]] = {"d": (hidden,)}
        if "attn_z" in self.points:
            sizes["z"] = (self._attention_width(),)
        if "moe_topk" in self.points:
            names = ("num_experts", "num_local_experts", "n_routed_experts")
            experts = next(int(raw[name]) for name in names if raw.get(name))
            sizes |= {"E": (experts,), "k2": (int(raw["num_experts_per_tok"]), 2)}
        if "hc_mult" in raw:
            streams = int(raw["hc_mult"])
            sizes |= {"m": (streams,), "md": (streams, hidden), "mm": (streams, streams)}
        schema = ordinary_schema(self._sites, dtype_name(self.dtype), sizes)
        fixed = {hook: replace(schema[hook], steerable=False) for hook in self.family.capture_only}
        return schema | fixed

    @property
    def settings(self) -> dict[str, Any]:
        """What besides weights and text determines the bits of a row."""
        from transformers import __version__

        return {
            "backend": "transformers",
            "transformers": __version__,
            "attention": self.network.config._attn_implementation,
        }

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.network.state_dict().items()

    def __call__(self, token_ids: torch.Tensor, tap: Tap | None = None) -> torch.Tensor:
        """Next-token logits at every position of texts [T] or [B, T], float32 [..., T, vocab]."""
        hidden = self.run(token_ids if token_ids.dim() == 2 else token_ids.unsqueeze(0), tap=tap)
        return self.logits(hidden if token_ids.dim() == 2 else hidden[0])

    def run_texts(
        self, texts: Sequence[Sequence[int]], tap: Callable[[Sequence[int]], Tap]
    ) -> list[torch.Tensor]:
        """Several whole texts in one pass -> normed residuals [T, d] of each; `tap` is called with the row of each
        text's first token. Shorter texts are padded at the end, where causal attention does not look."""
        width = max(map(len, texts))
        padded = [[*ids, *[0] * (width - len(ids))] for ids in texts]
        hidden = self.run(
            torch.tensor(padded, device=self.device), tap=tap([index * width for index in range(len(texts))])
        )
        return [rows[: len(ids)] for rows, ids in zip(hidden, texts)]

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: Any = None,
        cache: Any = None,
        tap: Tap | None = None,
    ) -> torch.Tensor:
        """Token ids [B, Q] to the normed residual [B, Q, d]; row `b * Q + q` of every site is token (b, q)."""
        self._running.tap = None if type(tap) is NoTap else tap  # taps of steps derive from it
        try:
            output = self.network.base_model(
                input_ids=token_ids,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        finally:
            self._running.tap = None
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def merge_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """Residual streams [T, m, d] of DeepSeek-V4, at any depth, to the residual [T, d] before the final norm."""
        merged: torch.Tensor = self.network.get_submodule(self.family.stream_merge)(streams.unsqueeze(0))[0]
        return merged

    def norm(self, residual: torch.Tensor) -> torch.Tensor:
        """The final norm of residuals [..., d]."""
        normed: torch.Tensor = self._norm(residual)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed residuals [..., d] to float32 logits."""
        logits: torch.Tensor = self._head(hidden).float()
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits

    def masks(self, positions: torch.Tensor, length: int) -> Any:
        """What tokens at `positions` [B, Q] attend to among keys 0..length: [B, 1, Q, length], by layer type if the
        model has several."""
        keys = torch.arange(length, device=positions.device)
        seen = keys <= positions.unsqueeze(-1)
        window = self.config.raw.get("sliding_window")
        near = seen if window is None else seen & (keys > positions.unsqueeze(-1) - window)
        if self.family.sliding == "by_type":
            return {"full_attention": self._mask(seen), "sliding_attention": self._mask(near)}
        return self._mask(near if self.family.sliding == "all" else seen)

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        visible = visible.unsqueeze(1)
        if self.network.config._attn_implementation != "eager":
            return visible
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(visible.shape, dtype=self.dtype, device=visible.device).masked_fill_(
            ~visible, lowest
        )

    def _all_sparse(self) -> bool:
        return all(hasattr(getattr(layer, "mlp", None), "gate") for layer in self.layers)

    def _attention_width(self) -> int:
        module: Any = self.layers[0].get_submodule(self.points["attn_z"].module)
        return int(module.in_features if hasattr(module, "in_features") else module.weight.shape[0])  # Conv1D

    def _hook(self, module: nn.Module, site: Site, layer: int, point: Point) -> None:
        if point.side == "output":
            module.register_forward_hook(_OutputHook(self._running, site, layer, point.part))
        else:
            hook = _InputHook(self._running, site, layer, point.side == "residual")
            module.register_forward_pre_hook(hook, with_kwargs=True)


class _SiteHook:
    def __init__(self, running: threading.local, site: Site, layer: int):
        self._running = running
        self._site = site
        self._layer = layer

    @property
    def tap(self) -> Tap | None:
        tap: Tap | None = getattr(self._running, "tap", None)
        return None if tap is None else tap.at(self._layer)

    def pass_through(self, tap: Tap, x: torch.Tensor) -> torch.Tensor:
        flat = self.flat(x)
        new = tap(self._site, flat)
        return x if new is flat else new.view(x.shape)

    def flat(self, x: torch.Tensor, axes: int | None = None) -> torch.Tensor:
        """One row per token; a row of the site has `axes` dimensions."""
        axes = _ROW_AXES.get(self._site.shape, 1) if axes is None else axes
        return x.flatten(0, -axes - 1) if x.dim() > axes + 1 else x


class _InputHook(_SiteHook):
    """A site that is a module's first argument."""

    def __init__(self, running: threading.local, site: Site, layer: int, in_place: bool):
        super().__init__(running, site, layer)
        self._in_place = in_place

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tap = self.tap
        if tap is None:
            return None
        old = args[0] if args else kwargs["hidden_states"]
        new = self.pass_through(tap, old)
        if new is old:
            return None
        if self._in_place:
            old.copy_(new)  # the layer carries this tensor past the module
            return None
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})


class _OutputHook(_SiteHook):
    """A site that is a module's output, or a part of it."""

    def __init__(self, running: threading.local, site: Site, layer: int, part: int):
        super().__init__(running, site, layer)
        self._part = part

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        tap = self.tap
        if tap is None:
            return None
        if self._site is MOE_TOPK:
            tap.see(self._site, self.flat(output[self._part], 1), self.flat(output[1], 1))
            return None
        old = output[self._part] if isinstance(output, tuple) else output
        if not self._site.edit:
            tap.see(self._site, self.flat(old).float())
            return None
        new = self.pass_through(tap, old)
        if new is old:
            return None
        return (*output[: self._part], new, *output[self._part + 1 :]) if isinstance(output, tuple) else new
