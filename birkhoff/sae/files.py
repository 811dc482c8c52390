"""Files of dictionaries: the format is recognised by the files at the path, not by guessing from tensors.

    cfg.json + sae_weights.safetensors    SAELens
    params.npz, params.safetensors        Gemma Scope; or any .npz
    ae.pt, or any .pt                     dictionary_learning
    manifest.json                         our own, one file per site

The site of a dictionary is read from the files if they have it and taken from the caller otherwise; a caller that
contradicts the files is refused, except for files of other tools: the site that follows from their own names is only
the default. A path may also be a name: of a published dictionary (`releases.py`) or a folder on the hub
(`org/name/folder`), both looked up in the hub cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from birkhoff.embedded import dictionary_path
from birkhoff.errors import SaeError, SaeFileError, quoted
from birkhoff.hf_hub import resolve
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.load_dictionary_learning import dictionary_learning_file, load_dictionary_learning
from birkhoff.sae.load_gemma_scope import gemma_scope_file, load_gemma_scope
from birkhoff.sae.releases import Release, find_release
from birkhoff.sae.sae_manifest import MANIFEST, load_manifest, save_manifest
from birkhoff.sae.saelens_files import is_saelens, load_saelens, save_saelens
from birkhoff.sae.stored_parts import read_labels

# hook, layer, view and spread that a caller asks for; None or missing where they do not
Site = dict[str, Any]


def locate_sae(name: str | Path) -> tuple[Path, Release | None]:
    """The path of a dictionary given by path or name, and what is known of a published one."""
    path = dictionary_path(Path(name).expanduser())
    if path != Path(name).expanduser():
        return path, None
    release = None if path.exists() else find_release(str(name))
    return (resolve(str(release.where)) if release is not None else resolve(name)), release


def load_all(
    path: Path, site: Site | None = None, centered: bool | None = None, input_scale: float | None = None
) -> list[Sae]:
    """All dictionaries at a path: more than one only for a manifest with several sites."""
    _check_format(path)
    requested = dict.fromkeys(("hook", "layer", "view", "spread")) | (site or {})
    if is_saelens(path):
        arguments, stored, default = load_saelens(path, centered, input_scale)
        return [_make(arguments, stored, default, requested, path)]
    if centered is not None or input_scale is not None:
        raise SaeError(
            "centered and input_scale describe files of SAELens, which these are not. Leave them out."
        )
    if (path / MANIFEST).is_file():
        return _select(load_manifest(path), requested, path)
    archive = gemma_scope_file(path)
    default = None
    if archive is not None:
        arguments, default = load_gemma_scope(archive)
    else:
        arguments = load_dictionary_learning(dictionary_learning_file(path) or path)
    arguments["labels"] = read_labels(path if path.is_dir() else path.parent)
    return [_make(arguments, {}, default, requested, path)]


def check_named(name: str | Path) -> None:
    """Refuse a path or name without files of a dictionary, as `load_named` does, without reading them."""
    _check_format(locate_sae(name)[0])


def _check_format(path: Path) -> None:
    """Raise `SaeFileError` unless there are files of a format that we read."""
    if not path.exists():
        raise SaeFileError(f"{path} does not exist. Give the directory (or file) that holds the dictionary.")
    if is_saelens(path) or (path / MANIFEST).is_file():
        return
    if gemma_scope_file(path) is not None or dictionary_learning_file(path) is not None:
        return
    present = sorted(entry.name for entry in path.iterdir())[:6] if path.is_dir() else [path.name]
    raise SaeFileError(
        f"{path} holds no dictionary that we read; it holds {', '.join(present) or 'nothing'}. Expected cfg.json with "
        "sae_weights.safetensors (SAELens), params.npz (Gemma Scope), ae.pt (dictionary_learning) or manifest.json."
    )


def load_named(
    name: str | Path, site: Site | None = None, centered: bool | None = None, input_scale: float | None = None
) -> list[Sae]:
    """All dictionaries at a path or of a name; a published one brings what its files do not say."""
    path, release = locate_sae(name)
    if release is not None:
        centered = (release.centered or None) if centered is None else centered
        input_scale = release.input_scale if input_scale is None else input_scale
    saes = load_all(path, site, centered, input_scale)
    if len(saes) == 1:  # descriptions go by number, so a directory has those of one dictionary
        saes[0].directory = path if path.is_dir() else path.parent
    return saes


def only_one(saes: list[Sae], name: str | Path) -> Sae:
    """The one dictionary among those found under a name."""
    if len(saes) > 1:
        sites = ", ".join(f"{sae.hook}[{sae.layer}]" for sae in saes)
        raise SaeError(
            f"{name} holds dictionaries for {len(saes)} sites ({sites}). Say which: hook= and layer=."
        )
    return saes[0]


def save_one(sae: Sae, path: Path, layout: str) -> Path:
    if layout == "saelens":
        save_saelens(sae, path)
    elif layout == "manifest":
        save_manifest([sae], path)
    else:
        raise SaeError(f"layout is {quoted(layout)}, expected 'saelens' or 'manifest'.")
    return path


def _select(saes: list[Sae], requested: dict[str, Any], path: Path) -> list[Sae]:
    """The dictionaries of a manifest that match the request."""
    matching = [
        sae
        for sae in saes
        if all(value is None or getattr(sae, name) == value for name, value in requested.items())
    ]
    if not matching:
        sites = ", ".join(f"{sae.hook}[{sae.layer}] as {sae.view}" for sae in saes)
        filters = ", ".join(f"{name}={value!r}" for name, value in requested.items() if value is not None)
        raise SaeError(f"{path} has no dictionary with {filters}; it has {sites}.")
    return matching


def _make(
    arguments: dict[str, Any],
    site: dict[str, Any],
    default: tuple[str, int] | None,
    requested: dict[str, Any],
    path: Path,
) -> Sae:
    """Make the dictionary from the arguments of `Sae`, the site in the files, the site that is used if there is no
    other, and the site that was requested."""
    in_files = {name: site.get(name) for name in requested}
    for name in ("hook", "layer"):
        value, stored = requested[name], in_files[name]
        if value is not None and stored is not None and value != stored:
            raise SaeError(
                f"{path} says its {name} is {quoted(stored)}, and {quoted(value)} was asked for. Leave {name} out, "
                "or move it knowingly with Sae.at(hook, layer)."
            )
    merged: dict[str, Any] = {
        name: in_files[name] if value is None else value for name, value in requested.items()
    }
    if requested["view"] is not None and requested["spread"] is None:
        merged["spread"] = None if requested["view"] != in_files["view"] else in_files["spread"]
    merged["view"] = merged["view"] or "single"
    if default is not None and merged["view"] == "single":
        merged["hook"] = merged["hook"] or default[0]
        merged["layer"] = default[1] if merged["layer"] is None else merged["layer"]
    if site.get("activation") == "batchtopk" and arguments.get("activation") == "jumprelu":
        arguments = arguments | {"activation": "batchtopk"}
    return Sae(**arguments, **merged)
