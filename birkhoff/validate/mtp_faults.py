"""Known mistakes in ports of the MTP block, each identified by reproducing it, as those of the trunk in `faults.py`.

Most are made where the block's input is joined: which token is embedded, what of the trunk is read, and in which order
norms and projections are applied. The others take a tensor of the trunk in place of the block's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from birkhoff.model.mtp import MTP
from birkhoff.model.transformer import Transformer
from birkhoff.validate.runs import Fault, MtpInput

TEXTS = {
    "mtp-shift": "the MTP block is given another token than the next: row t joins the streams at t with the embedding "
    "of the token at t + 1",
    "mtp-norm-order": "the norms of the MTP block's input are missing, swapped or in another place: enorm normalises "
    "the embedding and hnorm every stream by itself, both before e_proj and h_proj",
    "mtp-projections-swapped": "e_proj and h_proj are swapped: e_proj takes the embedding, h_proj the streams; a joint "
    "matrix eh_proj holds e_proj in its first half of columns",
    "mtp-embedding": "the MTP block's embedding is wrong: it is the row of embed.weight, in every stream, at every "
    "position",
    "mtp-input-merged": "the MTP block reads one merged row of the trunk instead of its four streams before the head",
    "mtp-head-shared": "the MTP block's output is merged or normalised with the trunk's weights instead of its own "
    "hc_head_* and norm",
}


def mtp_faults(model: Transformer) -> list[tuple[str, Fault]]:
    """Return (variant, fault) for every form of every mistake, the most common first."""
    return [
        ("the token itself", Fault("mtp-shift", mtp_input=_ahead(0))),
        ("two ahead", Fault("mtp-shift", mtp_input=_ahead(2))),
        ("enorm and hnorm swapped", Fault("mtp-norm-order", mtp_input=_joined(_norms_swapped))),
        ("after the projections", Fault("mtp-norm-order", mtp_input=_joined(_norms_after))),
        ("hnorm over all streams", Fault("mtp-norm-order", mtp_input=_joined(_one_norm))),
        ("no enorm", Fault("mtp-norm-order", mtp_input=_joined(_no_enorm))),
        ("no hnorm", Fault("mtp-norm-order", mtp_input=_joined(_no_hnorm))),
        ("swapped", Fault("mtp-projections-swapped", mtp_input=_joined(_projections_swapped))),
        ("zero at position 0", Fault("mtp-embedding", mtp_input=_first_masked)),
        ("rows of the head", Fault("mtp-embedding", mtp_input=_from_head)),
        ("in stream 0 only", Fault("mtp-embedding", mtp_input=_joined(_one_stream))),
        ("missing", Fault("mtp-embedding", mtp_input=_joined(_no_embedding))),
        ("before the final norm", Fault("mtp-input-merged", mtp_input=_merged(False))),
        ("after the final norm", Fault("mtp-input-merged", mtp_input=_merged(True))),
        ("norm", Fault("mtp-head-shared", weights=_of_trunk(model, "norm."))),
        ("hc_head", Fault("mtp-head-shared", weights=_of_trunk(model, "hc_head_"))),
        ("hc_head and norm", Fault("mtp-head-shared", weights=_of_trunk(model, "norm.", "hc_head_"))),
    ]


Join = Callable[
    [MTP, torch.Tensor, torch.Tensor], torch.Tensor
]  # block, streams [n, m, d], embeddings [n, d]


def _joined(join: Join) -> MtpInput:
    def joined(model: Transformer, streams: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return join(_block(model), streams[:-1], model.embedding(tokens[1:]))

    return joined


def _block(model: Transformer) -> MTP:
    assert model.mtp is not None
    return model.mtp


def _ahead(count: int) -> MtpInput:
    """Embed the token at t + count; the last rows, which have none, get the first tokens."""

    def joined(model: Transformer, streams: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return _block(model).join_input(streams[:-1], model.embedding(tokens.roll(-count)[:-1]))

    return joined


def _norms_swapped(mtp: MTP, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    return _sum(mtp.e_proj(mtp.hnorm(embedded)), mtp.h_proj(mtp.enorm(streams)))


def _norms_after(mtp: MTP, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    return _sum(mtp.enorm(mtp.e_proj(embedded)), mtp.hnorm(mtp.h_proj(streams)))


def _one_norm(mtp: MTP, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    size = streams.float().flatten(1).pow(2).mean(-1).add(mtp.hnorm.eps).rsqrt()[:, None, None]
    normed = (streams.float() * size * mtp.hnorm.weight.float()).to(streams.dtype)
    return _sum(mtp.e_proj(mtp.enorm(embedded)), mtp.h_proj(normed))


def _no_enorm(mtp: MTP, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    return _sum(mtp.e_proj(embedded), mtp.h_proj(mtp.hnorm(streams)))


def _no_hnorm(mtp: MTP, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    return _sum(mtp.e_proj(mtp.enorm(embedded)), mtp.h_proj(streams))


def _projections_swapped(mtp: MTP, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    return _sum(mtp.h_proj(mtp.enorm(embedded)), mtp.e_proj(mtp.hnorm(streams)))


def _one_stream(mtp: MTP, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    joined: torch.Tensor = mtp.h_proj(mtp.hnorm(streams))
    joined[:, 0] += mtp.e_proj(mtp.enorm(embedded))
    return joined


def _no_embedding(mtp: MTP, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    joined: torch.Tensor = mtp.h_proj(mtp.hnorm(streams))
    return joined


def _sum(embedded: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
    return embedded.unsqueeze(1) + projected


def _first_masked(model: Transformer, streams: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    embedded = model.embedding(tokens[1:])
    embedded[0] = 0
    return _block(model).join_input(streams[:-1], embedded)


def _from_head(model: Transformer, streams: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    rows = model.head.weight[tokens[1:]].to(model.dtype)
    return _block(model).join_input(streams[:-1], rows)


def _merged(normalised: bool) -> MtpInput:
    def joined(model: Transformer, streams: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        row = model.merge_streams(streams[:-1])
        row = model.norm(row) if normalised else row
        return _block(model).join_input(row.unsqueeze(1).expand_as(streams[:-1]), model.embedding(tokens[1:]))

    return joined


def _of_trunk(model: Transformer, *prefixes: str) -> Callable[[str, torch.Tensor], torch.Tensor | None]:
    """The trunk's tensors in place of the block's that have these prefixes."""
    own = {name: tensor for name, tensor in model.named_weights() if name.startswith(prefixes)}

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        return own.get(name.removeprefix("mtp.0.")) if name.startswith("mtp.0.") else None

    return change
