"""Hashes of the steering fields of a request: effective vectors by hook and layer, the content of a named module, and
canonical bytes of feature specs. The digests of resolved edits are made by `hooks/resolved_edit.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from birkhoff.hooks.digest import Block, DigestPart, combine, float32_bytes, framed, number, short

Vectors = Mapping[str, Mapping[int, tuple[Any, float]]]  # hook, layer -> numbers and scale


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
