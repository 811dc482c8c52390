"""Edits as canonical bytes, and the two hashes of a request made of them.

Bytes of an edit at a site: operation, hook, layer, path, streams, flags, the vector as float32, scale and bounds as
float64 (a scale of 1 is left out), and which positions. The phase is no part of them: an edit of both phases and one of
the prompt alone do the same to a prompt. What is not there adds nothing, and the order in which hooks, layers and added
vectors arrive does not matter. Names take no part, only what they stand for.

`hash_steering_config` is the same for fields as they come over the wire: effective vectors by hook and layer, the
content a name stands for, and opaque canonical blocks of features.
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
    """One edit at one site. `positions` says which tokens of the phase, empty for all of them."""
    hook, layer = key
    flags = bytes([edit.norm_match, edit.post_mix])
    streams = b"" if edit.streams is None else ",".join(map(str, edit.streams)).encode()
    scale = b"" if edit.scale == 1 else number(edit.scale)
    bounds = framed(number(edit.low), number(edit.high)) if edit.op == "clamp" else b""
    places = b"" if edit.positions is None else np.asarray(edit.positions, "<i8").tobytes()
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
        places,
    )
    return DigestPart(edit.op, content)


def hash_steering_config(
    effective_vectors: Vectors | None = None,
    module_ref: bytes | None = None,
    sae_clamp_specs: Sequence[bytes] = (),
    sae_full_reconstruction_specs: Sequence[bytes] = (),
) -> int:
    """A positive number of 63 bits, or 0 when nothing is steered."""
    return short(
        digest_steering_config(effective_vectors, module_ref, sae_clamp_specs, sae_full_reconstruction_specs)
    )


def digest_steering_config(
    effective_vectors: Vectors | None = None,
    module_ref: bytes | None = None,
    sae_clamp_specs: Sequence[bytes] = (),
    sae_full_reconstruction_specs: Sequence[bytes] = (),
) -> bytes | None:
    """The same as 128 bits, or None. A module is named by its content digest."""
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
