"""The oracle with forward hooks that apply an edit at any site and on any path."""

from __future__ import annotations

import torch

LAYER = 2


class Hooked:
    """Forward hooks on the oracle that change the input or output of a module."""

    def __init__(self, oracle):
        self.oracle, self.handles = oracle, []

    def input(self, module, change):
        def before(_, args, kwargs):
            if args:
                return (change(args[0]), *args[1:]), kwargs
            name = next(iter(kwargs))
            return args, {**kwargs, name: change(kwargs[name])}

        self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))

    def output(self, module, change, part=None):
        def after(_, args, result):
            if part is None:
                return change(result)
            return tuple(change(r) if i == part else r for i, r in enumerate(result))

        self.handles.append(module.register_forward_hook(after))

    def logits(self, ids):
        try:
            with torch.no_grad():
                return self.oracle(torch.tensor([ids])).logits[0]
        finally:
            for handle in self.handles:
                handle.remove()


def streams(change):
    """Apply a change of flat rows [.., m*d] to a tensor [.., m, d]."""
    return lambda x: change(x.flatten(-2)).view(x.shape)


def hook_oracle(oracle, hook, change, path="both", layer=LAYER):
    """Hooks that apply `change` to the flat rows of a site, for the consumers on `path`."""
    h, layer = Hooked(oracle), oracle.model.layers[layer]
    if hook == "mhc_streams_pre_attn":
        if path in ("both", "carry"):
            h.input(layer, streams(change))
        if path == "read":
            h.input(layer.attn_hc, streams(change))
        if path == "carry":
            raw = {}
            h.handles.insert(
                0,
                layer.register_forward_pre_hook(
                    lambda m, a, k: raw.update(x=a[0]), with_kwargs=True, prepend=True
                ),
            )
            h.input(layer.attn_hc, lambda x: raw["x"])
    elif hook == "mhc_streams_pre_mlp":
        # The streams between the two sublayers belong to no module. The part carried past the second sublayer leaves
        # the layer through its mixer, so its change is mixed and added to the output of the layer.
        seen = {}

        def remember(_, args):
            seen["streams"] = args[0]
            return (streams(change)(args[0]), *args[1:]) if path != "carry" else None

        def mixed(_, args, out):
            difference = streams(change)(seen["streams"]) - seen["streams"]
            return out + torch.matmul(seen["mix"].transpose(-1, -2), difference)

        h.handles.append(layer.ffn_hc.register_forward_pre_hook(remember))
        h.handles.append(layer.ffn_hc.register_forward_hook(lambda _, args, out: seen.update(mix=out[1])))
        if path != "read":
            h.handles.append(layer.register_forward_hook(mixed))
    elif hook == "mhc_streams_final":
        h.input(oracle.model.hc_head, streams(change))
    elif hook == "pre_attn":
        h.output(layer.attn_hc, change, part=2)
    elif hook == "mlp_in":
        h.output(layer.ffn_hc, change, part=2)
    elif hook == "post_attn":
        h.output(layer.self_attn, change, part=0)
    elif hook == "mlp_out":
        h.output(layer.mlp, change)
    elif hook == "final_hidden":
        h.output(oracle.model.hc_head, change)
    return h
