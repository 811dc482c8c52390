"""Golden values: the sites and logits of a trusted run, in files that any program can write.

A directory with `goldens.json` ({"tokens": [...], "label": ...}) and arrays, either in `goldens.safetensors` or as
`.npy` files: `HOOK.LAYER` for a site [tokens, ...] and `logits` [tokens, vocabulary]. Another implementation needs
only NumPy to write one; `tokens.npy` can replace the JSON. Nothing is unpickled.

Harnesses of other ports name the same arrays in other ways, which are read too: the layer first (`3_mlp_out`,
`layer_3_mlp_out`, `layers.3.mlp_out`, `blk.3.mlp_out`), `input_ids.npy` for the tokens, and a leading batch dimension
of one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from birkhoff.atomic_file import save_tensors
from birkhoff.errors import DataError, OptionError, quoted
from birkhoff.hooks.sites import BY_NAME
from birkhoff.option_checks import as_int, check_choice
from birkhoff.small_file import MANIFEST_BYTES, read_json
from birkhoff.validate.runs import ForwardRun, Sites, finished_blocks

FORMAT = 1
FORMS = ("safetensors", "npy")
TOKEN_FILES = ("tokens.npy", "input_ids.npy")
_LAYER_FIRST = re.compile(r"(?:layers?[_.]?|blk\.)?(\d{1,5})[_.]([a-z][a-z0-9_]*)")


def save_goldens(run: ForwardRun, directory: str | Path, form: str = "safetensors") -> Path:
    """Write a run to a new or empty directory, as one safetensors file or as `.npy` files, one for each array."""
    check_choice("goldens form", form, FORMS)
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise OptionError(f"{directory} is not empty. Choose another directory for the goldens.")
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {f"{name}.{layer}": x.contiguous() for (name, layer), x in run.sites.items()}
    if run.logits is not None:
        arrays["logits"] = run.logits.contiguous()
    if form == "npy":
        for name, array in arrays.items():
            np.save(directory / f"{name}.npy", array.float().numpy(), allow_pickle=False)
        np.save(directory / "tokens.npy", np.asarray(run.tokens, np.int64), allow_pickle=False)
    else:
        save_tensors(directory / "goldens.safetensors", arrays)
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
        if file.name not in TOKEN_FILES:
            arrays[file.name.removesuffix(".npy")] = torch.from_numpy(_npy(file))
    return _run(directory, label, tokens, arrays)


def _run(directory: Path, label: str, tokens: tuple[int, ...], arrays: dict[str, torch.Tensor]) -> ForwardRun:
    sites: Sites = {}
    logits = None
    for name, array in arrays.items():
        if array.dim() > 2 and array.shape[0] == 1 != len(tokens):
            array = array[0]  # a batch of one
        if array.dim() < 2 or array.shape[0] != len(tokens) or not array.is_floating_point():
            raise DataError(
                f"{name} of {directory.name} is {array.dtype} {tuple(array.shape)}, expected floats with one row for "
                f"each of {len(tokens)} tokens."
            )
        site = _site(name)
        if name == "logits":
            logits = array.float()
        elif site in sites:
            raise DataError(
                f"{directory.name} holds {site[0]} of layer {site[1]} twice, once as {quoted(name)}."
            )
        elif site is not None:
            sites[site] = (
                _finished_scores(name, array.float()) if site[0] == "index_scores" else array.float()
            )
        else:
            raise DataError(
                f"{directory.name} holds {quoted(name)}, expected logits or HOOK.LAYER such as mlp_out.3."
            )
    if not sites and logits is None:
        raise DataError(f"{directory} holds no arrays, expected goldens.safetensors or .npy files.")
    return ForwardRun(label, tokens, sites, logits)


def _finished_scores(name: str, scores: torch.Tensor) -> torch.Tensor:
    """Scores of the indexer [tokens, tokens // 4]; what stands for unfinished blocks, such as -inf, becomes zero."""
    finished = finished_blocks(len(scores))
    if scores.shape != finished.shape:
        raise DataError(
            f"{name} is {tuple(scores.shape)}, expected {tuple(finished.shape)}: one score for each block of 4 tokens."
        )
    return scores.masked_fill(~finished, 0.0)


def _site(name: str) -> tuple[str, int] | None:
    """Hook and layer of an array's name; None if it has neither form."""
    hook, _, layer = name.rpartition(".")
    if not (hook in BY_NAME and layer.isdecimal() and len(layer) < 6):
        match = _LAYER_FIRST.fullmatch(name)
        if match is None:
            return None
        layer, hook = match.groups()
    return (hook, int(layer)) if hook in BY_NAME else None


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
    elif (token_file := next((n for n in TOKEN_FILES if (directory / n).is_file()), None)) is not None:
        label = "goldens"
        tokens = _npy(directory / token_file).reshape(-1).tolist()
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
