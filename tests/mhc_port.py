"""The arithmetic of the layer-only port of mHC, written from its published formulas, for comparison with ours.

    f = X / sqrt(sum(X^2) / (m d) + 1e-6 / (m d)), flattened      mixes = f W^T, rounded to bfloat16
    a = sigmoid(alpha_pre * pre + S_pre)                          p = 2 sigmoid(alpha_post * post + S_post)
    R = exp(alpha_res * res + S_res), then 20 times rows and columns divided by their sums
    u = sum_i a_i X_i        X' = R X + p y        read_out(X) = X[0]

The matrix is stacked [pre; res; post]. Every choice in which it differs from V4 is a switch, so that a test can measure
each alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Port:
    W: torch.Tensor  # [(2+m)m, m*d], rows pre, res, post
    S_pre: torch.Tensor  # (1, m)
    S_res: torch.Tensor  # (m, m)
    S_post: torch.Tensor  # (m, 1)
    alpha_pre: float
    alpha_res: float
    alpha_post: float
    iterations: int = 20
    round_mixes: bool = True
    eps_on_pre: float = 0.0
    sinkhorn_eps: float = 0.0
    sum_of_squares: bool = True
    to_from: bool = True

    @property
    def m(self) -> int:
        return self.S_pre.shape[1]

    def init_state(self, x):
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.m, x.shape[-1]).clone()

    def pre_block(self, X):
        m, flat = self.m, X.flatten(-2).float()
        total = flat.square().sum(-1, keepdim=True)
        size = flat.shape[-1]
        f = flat / ((total + 1e-6) / size if self.sum_of_squares else total / size + 1e-6).sqrt()
        mixes = f @ self.W.T
        if self.round_mixes:
            mixes = mixes.bfloat16().float()
        pre, res, post = mixes.split((m, m * m, m), -1)
        a = torch.sigmoid(self.alpha_pre * pre + self.S_pre[0]) + self.eps_on_pre
        p = 2 * torch.sigmoid(self.alpha_post * post + self.S_post[:, 0])
        logits = self.alpha_res * res.unflatten(-1, (m, m)) + self.S_res
        eps = self.sinkhorn_eps
        R = torch.exp(logits - logits.amax(-1, keepdim=True))
        R = R / R.sum(-1, keepdim=True) + eps
        R = R / (R.sum(-2, keepdim=True) + eps)
        for _ in range(self.iterations - 1):
            R = R / (R.sum(-1, keepdim=True) + eps)
            R = R / (R.sum(-2, keepdim=True) + eps)
        return (a.unsqueeze(-1) * X.float()).sum(-2).to(X.dtype), p, R

    def post_block(self, X, y, p, R):
        mixed = R @ X.float() if self.to_from else R.transpose(-1, -2) @ X.float()
        return (mixed + p.unsqueeze(-1) * y.float().unsqueeze(-2)).to(X.dtype)

    def read_out(self, X):
        return X[..., 0, :]

    def tensors(self):
        """Its weights as its own call names them."""
        m = self.m
        W_pre, W_res, W_post = self.W.split((m, m * m, m))
        return {
            "W_pre": W_pre,
            "W_res": W_res,
            "W_post": W_post,
            "S_pre": self.S_pre,
            "S_res": self.S_res,
            "S_post": self.S_post,
            "alpha_pre": self.alpha_pre,
            "alpha_res": self.alpha_res,
            "alpha_post": self.alpha_post,
        }


def port_of(layer, **switches) -> Port:
    """A port with the weights of one of our layers."""
    m = layer.streams
    pre, post, res = layer.fn.detach().split((m, m, m * m))
    s_pre, s_post, s_res = layer.base.detach().split((m, m, m * m))
    alpha_pre, alpha_post, alpha_res = layer.scale.tolist()
    return Port(
        torch.cat([pre, res, post]),
        s_pre.view(1, m),
        s_res.view(m, m),
        s_post.view(m, 1),
        alpha_pre,
        alpha_res,
        alpha_post,
        **switches,
    )
