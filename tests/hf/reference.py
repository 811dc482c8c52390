"""Transformers with hand-written hooks and no cache: what the engine is compared with.

The middle residual, the sublayers and the norms after them are named here by hand, model by model, independently of the
engine's table. A token is generated from a whole forward pass over everything before it."""

from __future__ import annotations

from contextlib import contextmanager

import torch

MIDDLE = {
    "gemma2": "pre_feedforward_layernorm",
    "gemma3_text": "pre_feedforward_layernorm",
    "olmo2": "mlp",
    "gpt2": "ln_2",
}
ATTENTION = {"gpt2": "attn", "gpt_neox": "attention"}
PROJECTION = {"gpt2": "attn.c_proj", "gpt_neox": "attention.dense"}
AFTER_NORMS = ("gemma2", "gemma3_text", "olmo2")


class Reference:
    def __init__(self, model):
        self.model = model
        self.kind = model.config.model_type
        base = model.base_model
        self.layers = base.h if self.kind == "gpt2" else base.layers
        self.final = {"gpt2": "ln_f", "gpt_neox": "final_layer_norm"}.get(self.kind, "norm")
        self.parallel = self.kind == "gpt_neox" and model.config.use_parallel_residual

    @contextmanager
    def hooked(self, meet):
        """`meet(hook, layer, x [T, width])` sees every tensor and may return a new one."""
        handles = []

        def change(hook, layer, x):
            new = meet(hook, layer, x[0])
            return None if new is None else new.unsqueeze(0)

        def before(module, hook, layer, carried=False):
            def run(_, args, kwargs):
                old = args[0] if args else kwargs["hidden_states"]
                new = change(hook, layer, old)
                if new is None:
                    return None
                if carried:
                    old.data.copy_(new)
                    return None
                return ((new, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": new})

            handles.append(module.register_forward_pre_hook(run, with_kwargs=True))

        def after(module, hook, layer):
            def run(_, args, out):
                old = out[0] if isinstance(out, tuple) else out
                new = change(hook, layer, old)
                return None if new is None else (new, *out[1:]) if isinstance(out, tuple) else new

            handles.append(module.register_forward_hook(run))

        for index, layer in enumerate(self.layers):
            attention = layer.get_submodule(ATTENTION.get(self.kind, "self_attn"))
            before(layer, "pre_attn", index)
            before(layer.get_submodule(PROJECTION.get(self.kind, "self_attn.o_proj")), "attn_z", index)
            after(
                layer.post_attention_layernorm if self.kind in AFTER_NORMS else attention, "attn_out", index
            )
            if not self.parallel:
                middle = layer.get_submodule(MIDDLE.get(self.kind, "post_attention_layernorm"))
                before(middle, "post_attn", index, carried=True)
            before(layer.mlp, "mlp_in", index)
            after(
                layer.post_feedforward_layernorm if self.kind in AFTER_NORMS else layer.mlp, "mlp_out", index
            )
            after(layer, "post_mlp", index)
        before(self.model.base_model.get_submodule(self.final), "final_hidden", len(self.layers) - 1)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def forward(self, ids, edit=None):
        """Logits [T, vocab], and every tensor before it is edited."""
        seen = {}

        def meet(hook, layer, x):
            seen[hook, layer] = x.clone()
            return None if edit is None else edit(hook, layer, x)

        with self.hooked(meet):
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits, seen

    def generate(self, ids, count, edit=None):
        """Greedy tokens, and the tensors of all tokens but the last. `edit(hook, layer, x, prompt_len)`."""
        text = list(ids)
        seen = {}
        for _ in range(count):
            change = None if edit is None else lambda hook, layer, x: edit(hook, layer, x, len(ids))
            logits, seen = self.forward(text, change)
            text.append(int(logits[-1].argmax()))
        return text[len(ids) :], seen
