"""Every tensor that can be captured or edited: one row per site.

A site is called a *hook* on the public surface, under the same name. Ids 0..11 are fixed and new sites are appended, so
that compiled graphs and capture files stay valid. Shapes are per row, in the letters `d` hidden, `m` streams, `E`
routed experts, `k` experts per token, `h` attention heads of `c` channels, `z` the heads of an attention side by side.
A site that can be edited is an assignment in the model code (`x = tap(site, x)`); one that can only be captured is a
bare `tap.see(site, x)`. `edit`: it takes vectors and dictionaries of features; other sites take the edits in `ops`, by
name, or none.

A ragged site has any number of rows for a token: what a token attends to grows with the text. Its rows are computed
only for the tokens that are captured (`tap.read`), and every row says in its first numbers what it is about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIXER_OPS = ("clamp", "patch", "scale")
Layers = Literal["all", "compressed", "indexed"]  # those with a compressor, those with an indexer


@dataclass(frozen=True)
class Site:
    """One tensor of the forward pass."""

    id: int
    name: str
    shape: str  # letters of the row shape, e.g. "md" for (m, d)
    edit: bool
    doc: str
    dtype: Literal["model", "float32"] = "model"
    once: bool = False  # once per model, stored at the last layer
    plain: bool = False  # on every ordinary single-stream model
    absent: bool = False  # ordinary models only: V4 has no such tensor
    ops: tuple[str, ...] = ()  # edits of a site that takes no vectors
    ordinary: str = ""  # its meaning on an ordinary model, where that differs
    ragged: bool = False  # any number of rows for a token
    layers: Layers = "all"

    @property
    def editable(self) -> bool:
        """Whether any edit changes it."""
        return self.edit or bool(self.ops)


def _mixer(id: int, name: str, shape: str, doc: str, once: bool = False) -> Site:
    return Site(id, name, shape, False, doc, "float32", once=once, ops=MIXER_OPS)


def _ragged(id: int, name: str, shape: str, doc: str, layers: Layers = "all") -> Site:
    return Site(id, name, shape, False, doc, "float32", ragged=True, layers=layers)


PRE_ATTN = Site(
    0,
    "pre_attn",
    "d",
    True,
    "input of the attention sublayer, before its norm",
    plain=True,
    ordinary="the residual entering the layer",
)
POST_ATTN = Site(
    1,
    "post_attn",
    "d",
    True,
    "attention output, before it is written to the streams",
    plain=True,
    ordinary="the residual after attention was added",
)
POST_MLP = Site(
    2, "post_mlp", "d", True, "single residual after the MLP of an ordinary model", plain=True, absent=True
)
MLP_IN = Site(
    3,
    "mlp_in",
    "d",
    True,
    "input of the expert sublayer, before its norm",
    ordinary="the input of the MLP, after its norm if it has one",
)
MLP_OUT = Site(
    4,
    "mlp_out",
    "d",
    True,
    "expert output, before it is written to the streams",
    ordinary="what the MLP adds to the residual",
)
MHC_STREAMS_PRE_ATTN = Site(5, "mhc_streams_pre_attn", "md", True, "streams entering the attention sublayer")
MHC_STREAMS_PRE_MLP = Site(6, "mhc_streams_pre_mlp", "md", True, "streams entering the expert sublayer")
MHC_STREAMS_FINAL = Site(7, "mhc_streams_final", "md", True, "streams before the head merges them", once=True)
MHC_ATTN_POST_MIX = _mixer(8, "mhc_attn_post_mix", "m", "write-out weights of the attention sublayer")
MHC_FFN_POST_MIX = _mixer(9, "mhc_ffn_post_mix", "m", "write-out weights of the expert sublayer")
MHC_ATTN_RES_MIX = _mixer(10, "mhc_attn_res_mix", "mm", "mixer [from, to] of the attention sublayer")
MHC_FFN_RES_MIX = _mixer(11, "mhc_ffn_res_mix", "mm", "mixer [from, to] of the expert sublayer")
MHC_ATTN_PRE_MIX = _mixer(12, "mhc_attn_pre_mix", "m", "read-in weights of the attention sublayer")
MHC_FFN_PRE_MIX = _mixer(13, "mhc_ffn_pre_mix", "m", "read-in weights of the expert sublayer")
MHC_HEAD_MIX = _mixer(14, "mhc_head_mix", "m", "read-out weights of the head", once=True)
FINAL_HIDDEN = Site(
    15,
    "final_hidden",
    "d",
    True,
    "merged streams before the final norm",
    once=True,
    ordinary="the residual before the final norm",
)
MOE_ROUTER_LOGITS = Site(
    16, "moe_router_logits", "E", False, "gate product before sqrt-softplus and bias", "float32"
)
MOE_TOPK = Site(17, "moe_topk", "k2", False, "chosen expert id and its weight", "float32", ops=("experts",))
ATTN_OUT = Site(
    18, "attn_out", "d", True, "what the attention of an ordinary model adds to the residual", absent=True
)
ATTN_Z = Site(
    19,
    "attn_z",
    "z",
    True,
    "heads of an ordinary model's attention side by side, before the output projection",
    absent=True,
)
ATTN_HEAD_OUT = Site(
    20, "attn_head_out", "hc", True, "output of every attention head, before the grouped output projection"
)
ATTN_WEIGHTS = _ragged(
    21,
    "attn_weights",
    "2+h",
    "one row for each key that the token attends to: first token, end, and the weight of every head",
)
INDEX_SCORES = _ragged(
    22,
    "index_scores",
    "2",
    "one row for each finished block: its number and the score of the indexer",
    "indexed",
)
INDEX_BLOCKS = _ragged(
    23,
    "index_blocks",
    "3",
    "one row for each block that the indexer chose: its number, first token and end",
    "indexed",
)
ENTRY_TOKENS = _ragged(
    24,
    "entry_tokens",
    "2+c",
    "where a token completes a compressed entry, one row for each token in it: entry, token, and the pooling "
    "weight of every channel",
    "compressed",
)

# The hooks of a layer in the order of the forward pass, of V4 and of ordinary models; then those after the last layer.
_LAYER_ORDER = (
    MHC_STREAMS_PRE_ATTN,
    MHC_ATTN_PRE_MIX,
    MHC_ATTN_POST_MIX,
    MHC_ATTN_RES_MIX,
    PRE_ATTN,
    INDEX_SCORES,
    INDEX_BLOCKS,
    ENTRY_TOKENS,
    ATTN_WEIGHTS,
    ATTN_HEAD_OUT,
    ATTN_Z,
    ATTN_OUT,
    POST_ATTN,
    MHC_STREAMS_PRE_MLP,
    MHC_FFN_PRE_MIX,
    MHC_FFN_POST_MIX,
    MHC_FFN_RES_MIX,
    MLP_IN,
    MOE_ROUTER_LOGITS,
    MOE_TOPK,
    MLP_OUT,
    POST_MLP,
    MHC_STREAMS_FINAL,
    MHC_HEAD_MIX,
    FINAL_HIDDEN,
)
SITES: tuple[Site, ...] = tuple(sorted(_LAYER_ORDER, key=lambda site: site.id))
BY_NAME: dict[str, Site] = {site.name: site for site in SITES}
_INDEX = {site.name: index for index, site in enumerate(_LAYER_ORDER)}


def in_order(key: tuple[str, int]) -> tuple[int, int]:
    """Sorts (hook, layer) by when the tensor is computed."""
    hook, layer = key
    return layer, _INDEX[hook]
