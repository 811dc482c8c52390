"""A decoder in the calling convention of vLLM's layers, without vLLM: (output of the last sublayer, residual)."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from birkhoff.vllm.armed_layers import arm_ordinary
from birkhoff.vllm.switched_model import arm_model

D, LAYERS = 8, 3


class Norm(nn.Module):
    def forward(self, x, residual=None):
        if residual is None:
            return x / x.norm(dim=-1, keepdim=True)
        total = x + residual
        return total / total.norm(dim=-1, keepdim=True), total


class Linear(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.weight = torch.randn(D, D, generator=torch.Generator().manual_seed(seed))

    def forward(self, hidden_states=None, positions=None):
        return hidden_states @ self.weight


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Linear(2 * number), Linear(2 * number + 1)

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Decoder(nn.Module):
    """Layers `start..stop` of a pipeline stage; the last stage has the final norm."""

    def __init__(self, start, stop):
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))
        self.norm = Norm()
        self.start_layer, self.end_layer = start, stop

    def forward(self, x):
        residual = None
        for layer in self.layers[self.start_layer : self.end_layer]:
            x, residual = layer(None, x, residual)
        return self.norm(x, residual)[0] if self.end_layer == LAYERS else x + residual


class Toy(nn.Module):
    def __init__(self, start=0, stop=LAYERS):
        super().__init__()
        self.model = Decoder(start, stop)

    def forward(self, x):
        return self.model(x)


def arm(model, armed, call, idle=lambda: False):
    arm_model(model, partial(arm_ordinary, architecture="LlamaForCausalLM", armed=armed, call=call), idle)


def embed(token_ids):
    """One row per token, the same for the same token."""
    rows = [torch.randn(D, generator=torch.Generator().manual_seed(1000 + token)) for token in token_ids]
    return torch.stack(rows)


class Seen(dict):
    """Keeps the rows of every site that is called."""

    def __call__(self, x, layer, site):
        self[site.name, layer] = x.clone()
