"""V4 in NumPy float64, one token at a time, written from the specification only.

It shares no code with the package: weights are a mapping from released names to arrays, sizes the released
`config.json`. Windows, carries and compressed entries are plain lists. It is slow and meant to be read together with
the specification, whose section numbers are in the comments.

`cast` is applied wherever the release keeps a value in bfloat16 (`exact` keeps float64), and `released` adds the
rounding of 11.3. `watch(name, layer, value) -> value | None` is called at every named stage and may replace the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray
Watch = Callable[[str, int, Array], Array | None]


# ----------------------------------------------------------------------------------------------- number formats (11)


def exact(x: Array) -> Array:
    return x


def bf16(x: Array) -> Array:
    """Nearest bfloat16, ties to even: eight significant bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)


def power_at_least(ratio: float) -> float:
    """The smallest power of two that is not below `ratio`."""
    mantissa, exponent = math.frexp(ratio)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def e4m3(x: Array) -> Array:
    """Nearest E4M3 value of |x| <= 448, ties to even: four significant bits, steps of 2^-9 near zero."""
    exponent = np.maximum(np.frexp(x)[1] - 1, -6)
    step = np.ldexp(1.0, exponent - 3)
    return np.clip(np.rint(x / step) * step, -448.0, 448.0)


def e2m1(x: Array) -> Array:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with its sign, ties to the even code."""
    table = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    distance = np.abs(np.abs(x)[..., None] - table)
    # Ties go to even codes: odd codes get a distance that is larger by a negligible amount.
    code = np.argmin(distance + 1e-12 * (np.arange(8) % 2), axis=-1)
    return np.copysign(table[code], x)


def in_groups(
    x: Array, group: int, largest: float, smallest_amax: float, nearest: Callable[[Array], Array]
) -> Array:
    """Round each group of the last axis of a vector to `nearest` times one power of two (11.3)."""
    out = np.empty_like(x)
    for row in np.ndindex(x.shape[:-1]):
        for start in range(0, x.shape[-1], group):
            members = x[row][start : start + group]
            scale = power_at_least(max(np.abs(members).max(), smallest_amax) / largest)
            out[row][start : start + group] = nearest(members / scale) * scale
    return out


def fp8(x: Array, group: int) -> Array:
    return in_groups(x, group, 448.0, 1e-4, e4m3)


def fp4(x: Array) -> Array:
    return in_groups(x, 32, 6.0, 6 * 2.0**-126, e2m1)


def hadamard(x: Array) -> Array:
    """Walsh-Hadamard in Sylvester order: entry (i, j) is the parity of the bits that i and j share."""
    n = x.shape[-1]
    sign = np.array([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)])
    return x @ sign / math.sqrt(n)


# ----------------------------------------------------------------------------------------------------- small pieces


def rms_norm(x: Array, weight: Array | float, eps: float) -> Array:
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def frequencies(config: Mapping[str, Any], compressed: bool) -> Array:
    """Section 5: plain for sliding layers, YaRN where there is a compressor."""
    dim = config["qk_rope_head_dim"]
    theta = config["compress_rope_theta"] if compressed else config["rope_theta"]
    omega = np.array([theta ** (-2.0 * i / dim) for i in range(dim // 2)])
    scaling = config.get("rope_scaling")
    if not compressed or not scaling:
        return omega

    def channel(beta: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(math.floor(channel(scaling["beta_fast"])), 0)
    high: float = min(math.ceil(channel(scaling["beta_slow"])), dim - 1)
    if low == high:
        high += 0.001
    share = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    return omega * (1 - share) + omega / scaling["factor"] * share


def rope(x: Array, position: int, omega: Array, inverse: bool = False) -> Array:
    """Rotate the last channels of x in adjacent pairs."""
    angle = position * omega * (-1 if inverse else 1)
    out = x.copy()
    turning = x[..., -2 * len(omega) :]
    a, b = turning[..., 0::2], turning[..., 1::2]
    out[..., -2 * len(omega) :: 2] = a * np.cos(angle) - b * np.sin(angle)
    out[..., -2 * len(omega) + 1 :: 2] = a * np.sin(angle) + b * np.cos(angle)
    return out


def sinkhorn(logits: Array, iters: int, eps: float) -> Array:
    """Section 3.2; rows j are sources and columns k destinations."""
    mix = np.exp(logits - logits.max(axis=1, keepdims=True))
    mix = mix / mix.sum(axis=1, keepdims=True) + eps
    mix = mix / (mix.sum(axis=0, keepdims=True) + eps)
    for _ in range(iters - 1):
        mix = mix / (mix.sum(axis=1, keepdims=True) + eps)
        mix = mix / (mix.sum(axis=0, keepdims=True) + eps)
    return mix


def best(scores: Array, count: int) -> list[int]:
    """The indices of the `count` largest, the lower index first among equals."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


# -------------------------------------------------------------------------------------------------------- the model


class Compressor:
    """Section 6.4: collects the rows of a layer and compresses each complete block into an entry."""

    def __init__(self, model: Float64, prefix: str, ratio: int, seal: Callable[[Array], Array]):
        self.model, self.prefix, self.ratio, self.seal = model, prefix, ratio, seal
        self.rows: list[tuple[Array, Array]] = []
        self.entries: list[Array] = []

    def push(self, x: Array, position: int) -> None:
        weights, ratio = self.model.weights, self.ratio
        values = weights[f"{self.prefix}.wkv.weight"] @ x
        gates = weights[f"{self.prefix}.wgate.weight"] @ x + weights[f"{self.prefix}.ape"][position % ratio]
        self.rows.append((values, gates))
        if (position + 1) % ratio:
            return
        items = self.rows[-ratio:]
        if ratio == 4:
            half = len(values) // 2
            older = self.rows[-2 * ratio : -ratio]  # empty for the first block
            items = [(u[:half], g[:half]) for u, g in older] + [(u[half:], g[half:]) for u, g in items]
        gate = np.exp(np.stack([g for _, g in items]) - np.stack([g for _, g in items]).max(axis=0))
        pooled = (gate * np.stack([u for u, _ in items])).sum(axis=0) / gate.sum(axis=0)
        cast, block = self.model.cast, position // ratio
        entry = cast(rms_norm(cast(pooled), weights[f"{self.prefix}.norm.weight"], self.model.eps))
        self.entries.append(self.seal(cast(rope(entry, block * ratio, self.model.omega[True]))))
        self.rows = self.rows[-ratio:]


class Attention:
    """Section 6: one layer's window, entries and index keys."""

    def __init__(self, model: Float64, prefix: str, layer: int, ratio: int):
        self.model, self.prefix, self.layer, self.ratio = model, prefix, layer, ratio
        self.omega = model.omega[ratio > 0]
        self.keys: list[Array] = []  # the window, oldest first
        self.compressor = self.index = None
        if ratio:
            self.compressor = Compressor(model, f"{prefix}.compressor", ratio, model.round_key)
        if ratio == 4:
            self.index = Compressor(model, f"{prefix}.indexer.compressor", ratio, model.round_index)

    def __call__(self, x: Array, position: int) -> Array:
        model, prefix = self.model, self.prefix
        latent = self.latent(x)
        self.keys.append(self.key(x, position))
        self.keys = self.keys[-model.config["sliding_window"] :]
        attended = list(self.keys)
        if self.compressor is not None:
            self.compressor.push(x, position)
            entries = self.compressor.entries
            chosen: list[int] = list(range(len(entries)))
            if self.index is not None:
                self.index.push(x, position)
                chosen = self.choose(x, self.index_queries(latent, position), self.index.entries)
            attended += [entries[w] for w in chosen]
        mixed = self.attend(self.queries(latent, position), attended)
        return model.linear(f"{prefix}.wo_b", self.gather(mixed, position))

    def latent(self, x: Array) -> Array:
        model = self.model
        projected = model.linear(f"{self.prefix}.wq_a", x)
        return model.cast(rms_norm(projected, model.weights[f"{self.prefix}.q_norm.weight"], model.eps))

    def queries(self, latent: Array, position: int) -> Array:
        heads = self.model.linear(f"{self.prefix}.wq_b", latent).reshape(
            self.model.config["num_attention_heads"], -1
        )
        return self.rotated_queries(heads, position)

    def rotated_queries(self, heads: Array, position: int) -> Array:
        cast = self.model.cast
        return cast(rope(cast(rms_norm(heads, 1.0, self.model.eps)), position, self.omega))

    def key(self, x: Array, position: int) -> Array:
        return self.sealed_key(self.model.linear(f"{self.prefix}.wkv", x), position)

    def sealed_key(self, projected: Array, position: int) -> Array:
        model = self.model
        key = model.cast(rms_norm(projected, model.weights[f"{self.prefix}.kv_norm.weight"], model.eps))
        return model.round_key(model.cast(rope(key, position, self.omega)))

    def index_queries(self, latent: Array, position: int) -> Array:
        projected = self.model.linear(f"{self.prefix}.indexer.wq_b", latent)
        return self.rotated_index_queries(projected.reshape(self.model.config["index_n_heads"], -1), position)

    def rotated_index_queries(self, heads: Array, position: int) -> Array:
        return self.model.round_index(self.model.cast(rope(heads, position, self.omega)))

    def index_scores(self, x: Array, queries: Array, keys: list[Array]) -> Array:
        """Section 6.5: rectified products with signed weights."""
        head_weights = self.model.cast(self.model.weights[f"{self.prefix}.indexer.weights_proj.weight"] @ x)
        head_weights = head_weights / math.sqrt(queries.shape[0] * queries.shape[1])
        return np.array([(head_weights * np.maximum(queries @ key, 0.0)).sum() for key in keys])

    def choose(self, x: Array, queries: Array, keys: list[Array]) -> list[int]:
        return sorted(best(self.index_scores(x, queries, keys), self.model.config["index_topk"]))

    def attend(self, queries: Array, attended: list[Array]) -> Array:
        """Section 6.2: softmax with one additional logit (the sink), which has no value vector."""
        keys, cast = np.stack(attended), self.model.cast
        logits = queries @ keys.T / math.sqrt(keys.shape[1])
        top = logits.max(axis=1, keepdims=True)
        weight = np.exp(logits - top)
        total = weight.sum(axis=1) + np.exp(self.model.weights[f"{self.prefix}.attn_sink"] - top[:, 0])
        return cast(cast(weight) @ keys / total[:, None])

    def gather(self, mixed: Array, position: int) -> Array:
        """Section 6.3 up to the input of wo_b: inverse rotation, then one matrix per group of heads."""
        groups, cast = self.model.config["o_groups"], self.model.cast
        turned = cast(rope(mixed, position, self.omega, inverse=True)).reshape(groups, -1)
        first = self.model.weights[f"{self.prefix}.wo_a.weight"].reshape(groups, -1, turned.shape[1])
        return cast(np.einsum("gri,gi->gr", first, turned).reshape(-1))


class Float64:
    """A model with one sequence: `step` processes the next token, `draft` runs the MTP block."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Any],
        released: bool = False,
        cast: Callable[[Array], Array] = exact,
        watch: Watch | None = None,
    ):
        self.config, self.released, self.cast = config, released, cast
        self.weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
        self._watch = watch or (lambda name, layer, value: None)
        self.eps, self.streams_count = config["rms_norm_eps"], config["hc_mult"]
        self.omega = {kind: frequencies(config, kind) for kind in (False, True)}
        ratios = config["compress_ratios"][: config["num_hidden_layers"]]
        self.layers = [Attention(self, f"layers.{i}.attn", i, ratio) for i, ratio in enumerate(ratios)]
        self.mtp = Attention(self, "mtp.0.attn", len(ratios), 0)
        self.position = 0
        self.streams: Array = np.zeros(0)  # of the last token, before the head

    def watch(self, name: str, layer: int, value: Array) -> Array:
        replaced = self._watch(name, layer, value)
        return value if replaced is None else replaced

    def step(self, token: int) -> Array:
        """Section 2 for the next token -> logits."""
        streams = np.stack([self.weights["embed.weight"][token]] * self.streams_count)
        for i, attention in enumerate(self.layers):
            streams = self.layer(f"layers.{i}", attention, streams, token, self.position)
        last = len(self.layers) - 1
        self.streams = streams = self.watch("mhc_streams_final", last, streams)
        self.position += 1
        merged = self.watch("final_hidden", last, self.head("hc_head", streams))
        return self.logits(self.norm("norm", merged))

    def draft(self, streams: Array, token: int, position: int) -> tuple[Array, Array]:
        """Section 9: streams at `position` and the next token -> logits two positions ahead, and the output streams."""
        embedded = self.linear("mtp.0.e_proj", self.norm("mtp.0.enorm", self.weights["embed.weight"][token]))
        projected = [self.linear("mtp.0.h_proj", self.norm("mtp.0.hnorm", stream)) for stream in streams]
        mixed = self.cast(np.stack([embedded + stream for stream in projected]))
        out = self.layer("mtp.0", self.mtp, mixed, token, position)
        return self.logits(self.norm("mtp.0.norm", self.head("mtp.0.hc_head", out))), out

    def layer(self, prefix: str, attention: Attention, streams: Array, token: int, position: int) -> Array:
        i = attention.layer
        streams = self.watch("mhc_streams_pre_attn", i, streams)
        u, post, mix = self.read(f"{prefix}.hc_attn", streams)
        u = self.watch("pre_attn", i, u)
        y = self.watch("post_attn", i, attention(self.norm(f"{prefix}.attn_norm", u), position))
        streams = self.watch("mhc_streams_pre_mlp", i, self.write(streams, y, post, mix))
        u, post, mix = self.read(f"{prefix}.hc_ffn", streams)
        u = self.watch("mlp_in", i, u)
        y = self.watch("mlp_out", i, self.moe(f"{prefix}.ffn", self.norm(f"{prefix}.ffn_norm", u), token))
        return self.write(streams, y, post, mix)

    # 3: streams

    def _mixing(self, prefix: str, streams: Array) -> Array:
        flat = streams.reshape(-1)
        return self.weights[f"{prefix}_fn"] @ flat / math.sqrt(np.mean(flat * flat) + self.eps)

    def read(self, prefix: str, streams: Array) -> tuple[Array, Array, Array]:
        m, eps = self.streams_count, self.config["hc_eps"]
        base, scale, logits = (
            self.weights[f"{prefix}_base"],
            self.weights[f"{prefix}_scale"],
            self._mixing(prefix, streams),
        )
        pre = sigmoid(logits[:m] * scale[0] + base[:m]) + eps
        post = 2 * sigmoid(logits[m : 2 * m] * scale[1] + base[m : 2 * m])
        mixing = (logits[2 * m :] * scale[2] + base[2 * m :]).reshape(m, m)
        return self.cast(pre @ streams), post, sinkhorn(mixing, self.config["hc_sinkhorn_iters"], eps)

    def write(self, streams: Array, y: Array, post: Array, mix: Array) -> Array:
        return self.cast(np.stack([post[k] * y + mix[:, k] @ streams for k in range(self.streams_count)]))

    def head(self, prefix: str, streams: Array) -> Array:
        scale, base = self.weights[f"{prefix}_scale"], self.weights[f"{prefix}_base"]
        return self.cast(
            (sigmoid(self._mixing(prefix, streams) * scale + base) + self.config["hc_eps"]) @ streams
        )

    # 4: linear layers

    def linear(self, name: str, x: Array) -> Array:
        """A layer that the release stores in FP8 or FP4, with its input rounded."""
        return self.cast(self.weights[f"{name}.weight"] @ (fp8(x, 128) if self.released else x))

    def norm(self, name: str, x: Array) -> Array:
        return self.cast(rms_norm(x, self.weights[f"{name}.weight"], self.eps))

    def logits(self, hidden: Array) -> Array:
        return self.weights["head.weight"] @ hidden

    def round_key(self, key: Array) -> Array:
        still = len(key) - self.config["qk_rope_head_dim"]
        if not self.released or not still:
            return key
        return np.concatenate((fp8(key[:still], 64), key[still:]))

    def round_index(self, x: Array) -> Array:
        return fp4(self.cast(hadamard(x))) if self.released else x

    # 7: experts

    def moe(self, prefix: str, x: Array, token: int) -> Array:
        ids, weights = self.route(prefix, x, token)
        routed = sum(self.expert(f"{prefix}.experts.{e}", x, w) for e, w in zip(ids, weights, strict=True))
        return self.cast(routed + self.expert(f"{prefix}.shared_experts", x, 1.0))

    def route(self, prefix: str, x: Array, token: int) -> tuple[list[int], list[float]]:
        scores = np.sqrt(np.logaddexp(0.0, self.weights[f"{prefix}.gate.weight"] @ x))
        if f"{prefix}.gate.tid2eid" in self.weights:
            ids = [int(e) for e in self.weights[f"{prefix}.gate.tid2eid"][token]]
        else:
            ids = best(scores + self.weights[f"{prefix}.gate.bias"], self.config["num_experts_per_tok"])
        return ids, list(scores[ids] / scores[ids].sum() * self.config["routed_scaling_factor"])

    def expert(self, prefix: str, x: Array, weight: float) -> Array:
        return self.linear(f"{prefix}.w2", self.inside_expert(prefix, x, weight))

    def inside_expert(self, prefix: str, x: Array, weight: float) -> Array:
        limit = self.config["swiglu_limit"]
        a = np.minimum(self.linear(f"{prefix}.w1", x), limit)
        b = np.clip(self.linear(f"{prefix}.w3", x), -limit, limit)
        return self.cast(a * sigmoid(a) * b * weight)
