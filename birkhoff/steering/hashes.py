"""Edits as canonical bytes, and the hashes of a request made from them.

Bytes of an edit at a site: operation, hook, layer, path, streams, flags, the vector as float32, scale and bounds as
float64 (a scale of 1 is omitted), and the positions. The phase is not included: an edit of both phases and one of
the prompt alone have the same effect on a prompt. Absent fields add nothing, and the order of hooks, layers and
added vectors has no effect. Vectors enter by content, not by name.

`hash_steering_config` does the same for request fields: effective vectors by hook and layer, the content of a named
module, and canonical bytes of feature specs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from birkhoff.hooks.digest import Block, DigestPart, combine, float32_bytes, framed, number, short
from birkhoff.hooks.edit import SiteEdit
from birkhoff.hooks.plan import Key

Vectors = Mapping[str, Mapping[int, tuple[Any, float]]]  # hook, layer -> numbers and scale


def site_part(key: Key, edit: SiteEdit, positions: bytes) -> DigestPart:
    """One edit at one site. `positions`: canonical bytes of the selected tokens of the phase, empty for all."""
    hook, layer = key
    flags = bytes([edit.norm_match, edit.post_mix])
    streams = b"" if edit.streams is None else ",".join(map(str, edit.streams)).encode()
    scale = b"" if edit.scale == 1 else number(edit.scale)
    bounds = framed(number(edit.low), number(edit.high)) if edit.op in ("clamp", "bound") else b""
    patched = b"" if edit.positions is None else np.asarray(edit.positions, "<i8").tobytes()
    more: list[bytes] = []  # what most edits do not have
    if edit.entries is not None or edit.renormalise:
        entries = b"" if edit.entries is None else np.asarray(edit.entries, "<i8").tobytes()
        more = [entries, bytes([edit.renormalise])]
    if edit.gate is not None:
        more = [*(more or [b"", b""]), edit.gate.content]
    content = framed(
        hook.encode(),
        str(layer).encode(),
        edit.path.encode(),
        streams,
        flags,
        float32_bytes(edit.vector),
        scale,
        bounds,
        positions,
        patched,
        *more,
    )
    return DigestPart(edit.op, content)


def hash_steering_config(
    effective_vectors: Vectors | None = None,
    module_ref: bytes | None = None,
    sae_clamp_specs: Sequence[bytes] = (),
    sae_full_reconstruction_specs: Sequence[bytes] = (),
) -> int:
    """A positive integer of 63 bits, or 0 if nothing is steered."""
    return short(
        digest_steering_config(effective_vectors, module_ref, sae_clamp_specs, sae_full_reconstruction_specs)
    )


def digest_steering_config(
    effective_vectors: Vectors | None = None,
    module_ref: bytes | None = None,
    sae_clamp_specs: Sequence[bytes] = (),
    sae_full_reconstruction_specs: Sequence[bytes] = (),
) -> bytes | None:
    """The same as 128 bits, or None. `module_ref` is the content digest of a module."""
    parts = [DigestPart("add", content) for content in _vectors(effective_vectors or {})]
    if module_ref is not None:
        parts.append(DigestPart("add", framed(b"module", module_ref)))
    blocks: tuple[tuple[Block, Iterable[bytes]], ...] = (
        ("delta", sae_clamp_specs),
        ("full", sae_full_reconstruction_specs),
    )
    parts += [DigestPart(block, spec) for block, specs in blocks for spec in specs]
    return combine(parts)


def _vectors(vectors: Vectors) -> Iterable[bytes]:
    for hook, layers in vectors.items():
        for layer, (values, scale) in layers.items():
            scaled = b"" if scale == 1 else number(scale)
            yield framed(b"vector", hook.encode(), str(int(layer)).encode(), float32_bytes(values), scaled)
