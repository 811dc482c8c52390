"""Which files hold a dictionary: recognised by what lies at the path, never by guessing at tensors.

    cfg.json + sae_weights.safetensors    SAELens
    params.npz, or any .npz               Gemma Scope
    ae.pt, or any .pt                     dictionary_learning
    manifest.json                         our own, one file per site

Where a dictionary belongs in a model comes from the files when they say it, and from the caller otherwise; a caller who
says something else than the files is refused, except for files that other tools wrote under their own names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from birkhoff.errors import SaeError, SaeFileError, quoted
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.load_dictionary_learning import dictionary_learning_file, load_dictionary_learning
from birkhoff.sae.load_gemma_scope import gemma_scope_file, load_gemma_scope
from birkhoff.sae.load_saelens import is_saelens, load_saelens, read_labels, save_saelens
from birkhoff.sae.sae_manifest import MANIFEST, load_manifest, save_manifest


def load_all(
    path: Path,
    hook: str | None = None,
    layer: int | None = None,
    view: str | None = None,
    spread: str | None = None,
) -> list[Sae]:
    """Every dictionary at a path: several only of a manifest with several sites."""
    if not path.exists():
        raise SaeFileError(f"{path} does not exist. Give the directory (or file) that holds the dictionary.")
    asked = {"hook": hook, "layer": layer, "view": view, "spread": spread}
    if is_saelens(path):
        return [_placed(*load_saelens(path), asked, path)]
    if (path / MANIFEST).is_file():
        return _chosen(load_manifest(path), asked, path)
    archive = gemma_scope_file(path)
    state = dictionary_learning_file(path)
    if archive is not None or state is not None:
        made = load_gemma_scope(archive) if archive is not None else load_dictionary_learning(state or path)
        return [
            _placed(made | {"labels": read_labels(path if path.is_dir() else path.parent)}, {}, asked, path)
        ]
    present = sorted(entry.name for entry in path.iterdir())[:6] if path.is_dir() else [path.name]
    raise SaeFileError(
        f"{path} holds no dictionary that we read; it holds {', '.join(present) or 'nothing'}. Expected cfg.json with "
        "sae_weights.safetensors (SAELens), params.npz (Gemma Scope), ae.pt (dictionary_learning) or manifest.json."
    )


def load_one(path: Path, hook: str | None, layer: int | None, view: str | None, spread: str | None) -> Sae:
    found = load_all(path, hook, layer, view, spread)
    if len(found) > 1:
        sites = ", ".join(f"{sae.hook}[{sae.layer}]" for sae in found)
        raise SaeError(
            f"{path} holds dictionaries for {len(found)} sites ({sites}). Say which: hook= and layer=."
        )
    return found[0]


def save_one(sae: Sae, path: Path, layout: str) -> Path:
    if layout == "saelens":
        save_saelens(sae, path)
    elif layout == "manifest":
        save_manifest([sae], path)
    else:
        raise SaeError(f"layout is {quoted(layout)}, expected 'saelens' or 'manifest'.")
    return path


def _chosen(saes: list[Sae], asked: dict[str, Any], path: Path) -> list[Sae]:
    """Those of a manifest that a caller means."""
    found = [
        sae for sae in saes if all(wish is None or getattr(sae, name) == wish for name, wish in asked.items())
    ]
    if not found:
        sites = ", ".join(f"{sae.hook}[{sae.layer}] as {sae.view}" for sae in saes)
        wishes = ", ".join(f"{name}={wish!r}" for name, wish in asked.items() if wish is not None)
        raise SaeError(f"{path} has no dictionary with {wishes}; it has {sites}.")
    return found


def _placed(made: dict[str, Any], place: dict[str, Any], asked: dict[str, Any], path: Path) -> Sae:
    said = {name: place.get(name) for name in asked}
    for name, wish in asked.items():
        if wish is not None and said[name] is not None and wish != said[name] and name in ("hook", "layer"):
            raise SaeError(
                f"{path} says its {name} is {quoted(said[name])}, and {quoted(wish)} was asked for. Leave {name} out, "
                "or move it knowingly with Sae.at(hook, layer)."
            )
    merged: dict[str, Any] = {name: said[name] if wish is None else wish for name, wish in asked.items()}
    if asked["view"] is not None and asked["spread"] is None:
        merged["spread"] = None if asked["view"] != said["view"] else said["spread"]
    merged["view"] = merged["view"] or "single"
    if place.get("activation") == "batchtopk" and made.get("activation") == "jumprelu":
        made = made | {"activation": "batchtopk"}
    return Sae(**made, **merged)
