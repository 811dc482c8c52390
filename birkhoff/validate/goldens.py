"""Golden values: the sites and logits of a trusted run, in files that any program can write.

A directory with `goldens.json` ({"tokens": [...], "label": ...}) and arrays, either in `goldens.safetensors` or as
`.npy` files: `HOOK.LAYER` for a site [tokens, ...] and `logits` [tokens, vocabulary]; of the MTP block `mtp.HOOK` and
`mtp.logits` [tokens - 1, ...]. Another implementation needs only NumPy to write one; `tokens.npy` can replace the JSON.
Nothing is unpickled.

Harnesses of other ports name the same arrays in other ways, which are read too: the layer first (`3_mlp_out`,
`layer_3_mlp_out`, `layers.3.mlp_out`, `blk.3.mlp_out`), the MTP block as `mtp_mlp_out`, `mtp.0.mlp_out` or
`mlp_out.mtp`, `input_ids.npy` for the tokens, and a leading batch dimension of one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
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
from birkhoff.validate.runs import MTP, ForwardRun, Sites, finished_blocks, layer_label

FORMAT = 1
FORMS = ("safetensors", "npy")
TOKEN_FILES = ("tokens.npy", "input_ids.npy")
_MTP = re.compile(r"mtp(?:[_.]0)?[_.](?P<first>[a-z][a-z0-9_]*)|(?P<last>[a-z][a-z0-9_]*)\.mtp")
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
    if run.mtp is not None:
        arrays |= {f"mtp.{name}": x.contiguous() for (name, _), x in run.mtp.sites.items()}
        if run.mtp.logits is not None:
            arrays["mtp.logits"] = run.mtp.logits.contiguous()
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
    trunk, block = _Arrays(), _Arrays()
    for name, array in arrays.items():
        mtp = _MTP.fullmatch(name)
        rows = len(tokens) - 1 if mtp else len(tokens)
        if array.dim() > 2 and array.shape[0] == 1 != rows:
            array = array[0]  # a batch of one
        if array.dim() < 2 or array.shape[0] != rows or not array.is_floating_point():
            raise DataError(
                f"{name} of {directory.name} is {array.dtype} {tuple(array.shape)}, expected floats with one row for "
                + (
                    f"each of {rows} tokens that have a next one: the MTP block has no row for the last."
                    if mtp
                    else f"each of {rows} tokens."
                )
            )
        hook = (mtp["first"] or mtp["last"]) if mtp else name
        site = (hook, MTP) if mtp and hook in BY_NAME else _site(name)
        part = block if mtp else trunk
        if hook == "logits" and part.logits is None:
            part.logits = array.float()
        elif hook == "logits" or site in part.sites:
            raise DataError(f"{directory.name} holds {_described(site)} twice, once as {quoted(name)}.")
        elif site is not None:
            part.sites[site] = (
                _finished_scores(name, array.float()) if site[0] == "index_scores" else array.float()
            )
        else:
            raise DataError(
                f"{directory.name} holds {quoted(name)}, expected logits or HOOK.LAYER such as mlp_out.3; of the MTP "
                "block mtp.logits or mtp.HOOK such as mtp.mlp_out."
            )
    if not arrays:
        raise DataError(f"{directory} holds no arrays, expected goldens.safetensors or .npy files.")
    mtp_run = (
        ForwardRun(label, tokens[1:], block.sites, block.logits)
        if block.sites or block.logits is not None
        else None
    )
    return ForwardRun(label, tokens, trunk.sites, trunk.logits, mtp_run)


@dataclass
class _Arrays:
    """The arrays of the trunk, or of the MTP block."""

    sites: Sites = field(default_factory=dict)
    logits: torch.Tensor | None = None


def _described(site: tuple[str, int] | None) -> str:
    return "logits" if site is None else f"{site[0]} of {layer_label(site[1])}"


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
