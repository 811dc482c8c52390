"""Golden values: the sites and logits of a trusted run, in files that any program can write.

A directory with `goldens.json` ({"tokens": [...], "label": ...}) and arrays, either in `goldens.safetensors` or as
`.npy` files: `HOOK.LAYER` for a site [tokens, ...] and `logits` [tokens, vocabulary]. Another implementation needs
only NumPy to write one; `tokens.npy` can replace the JSON. Nothing is unpickled.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from birkhoff.errors import DataError, OptionError, quoted
from birkhoff.hooks.sites import BY_NAME
from birkhoff.option_checks import as_int
from birkhoff.small_file import MANIFEST_BYTES, read_json
from birkhoff.validate.runs import ForwardRun, Sites

FORMAT = 1


def save_goldens(run: ForwardRun, directory: str | Path) -> Path:
    """Write a run to a new or empty directory."""
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise OptionError(f"{directory} is not empty. Choose another directory for the goldens.")
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {f"{name}.{layer}": x.contiguous() for (name, layer), x in run.sites.items()}
    if run.logits is not None:
        arrays["logits"] = run.logits.contiguous()
    save_file(arrays, directory / "goldens.safetensors")
    metadata = {"format": FORMAT, "label": run.label, "tokens": list(run.tokens)}
    (directory / "goldens.json").write_text(json.dumps(metadata) + "\n", encoding="utf-8")
    return directory


def read_goldens(directory: str | Path) -> ForwardRun:
    """Read a directory of goldens."""
    directory = Path(directory)
    if not directory.is_dir():
        raise DataError(
            f"{directory} is not a directory with goldens. Make one: birkhoff validate A --save-goldens DIR"
        )
    label, tokens = _metadata(directory)
    arrays: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            arrays.update(load_file(file))
        except (SafetensorError, OSError, ValueError) as error:
            raise DataError(
                f"{file.name} cannot be read as safetensors ({error}). Make the goldens again."
            ) from None
    for file in sorted(directory.glob("*.npy")):
        if file.name != "tokens.npy":
            arrays[file.name.removesuffix(".npy")] = torch.from_numpy(_npy(file))
    return _run(directory, label, tokens, arrays)


def _run(directory: Path, label: str, tokens: tuple[int, ...], arrays: dict[str, torch.Tensor]) -> ForwardRun:
    sites: Sites = {}
    logits = None
    for name, array in arrays.items():
        if array.dim() < 2 or array.shape[0] != len(tokens) or not array.is_floating_point():
            raise DataError(
                f"{name} of {directory.name} is {array.dtype} {tuple(array.shape)}, expected floats with one row for "
                f"each of {len(tokens)} tokens."
            )
        hook, _, layer = name.rpartition(".")
        if name == "logits":
            logits = array.float()
        elif hook in BY_NAME and layer.isdecimal() and len(layer) < 6:
            sites[hook, int(layer)] = array.float()
        else:
            raise DataError(
                f"{directory.name} holds {quoted(name)}, expected logits or HOOK.LAYER such as mlp_out.3."
            )
    if not sites and logits is None:
        raise DataError(f"{directory} holds no arrays, expected goldens.safetensors or .npy files.")
    return ForwardRun(label, tokens, sites, logits)


def _metadata(directory: Path) -> tuple[str, tuple[int, ...]]:
    file = directory / "goldens.json"
    if file.is_file():
        try:
            raw = read_json(file, MANIFEST_BYTES)
            tokens = raw["tokens"]
            label = str(raw.get("label", "goldens"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{file} does not say which tokens were run ({error}). Make the goldens again."
            ) from None
    elif (directory / "tokens.npy").is_file():
        label = "goldens"
        tokens = _npy(directory / "tokens.npy").reshape(-1).tolist()
    else:
        raise DataError(
            f"{directory} has neither goldens.json nor tokens.npy, so its rows belong to no tokens."
        )
    if (
        not isinstance(tokens, list)
        or not tokens
        or not all((i := as_int(t)) is not None and i >= 0 for t in tokens)
    ):
        raise DataError(f"the tokens of {directory} are {quoted(tokens)}, expected a list of token ids.")
    return label, tuple(tokens)


def _npy(file: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(file, allow_pickle=False)
        return array
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{file.name} is not a plain .npy array ({error}). Make the goldens again.") from None
