"""Dictionaries that read and write rows of several sites: crosscoders and transcoders.

A crosscoder is one dictionary over rows of several sites, usually the streams of several layers: its features are
computed from all of them side by side, and a decoder of its own for each site reconstructs its row. A transcoder reads
the rows of one site (or several) and reconstructs those of another one, usually the input and the output of a sublayer.
Both are an encoder of the concatenated input rows and a decoder to the concatenated output rows.

    views   single   rows of a hook without streams
            flat     the streams side by side
            mean     the mean of the streams; what is written changes every stream alike

The files are `crosscoder.json` and `crosscoder.safetensors`. How one is spliced in: `analysis/crosscoder_splice.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from birkhoff.atomic_file import save_tensors, write_atomic
from birkhoff.errors import SaeError, SaeFileError, quoted
from birkhoff.hooks.site_names import Address
from birkhoff.hooks.sites import in_order
from birkhoff.sae.dictionary import Sae
from birkhoff.small_file import read_json

SETTINGS, WEIGHTS = "crosscoder.json", "crosscoder.safetensors"
VERSION = 1
VIEWS = ("single", "flat", "mean")
_MATRICES = ("encoder", "decoder")


@dataclass(frozen=True)
class SitePart:
    """The rows of one hook and layer as they are read or written: a view of them, `width` numbers wide."""

    hook: str
    layer: int
    view: str
    width: int

    def __post_init__(self) -> None:
        streams = self.hook.startswith("mhc_streams")
        allowed = ("flat", "mean") if streams else ("single",)
        if self.view not in allowed:
            raise SaeError(
                f"view is {quoted(self.view)} at {self.hook}, expected {' or '.join(allowed)} in a crosscoder."
            )

    @property
    def address(self) -> Address:
        return self.hook, self.layer

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, width], float32, of the site's rows [n, d] or [n, m, d]."""
        rows = rows.float()
        if self.view == "mean":
            rows = rows.mean(1)
        rows = rows.flatten(1)
        if rows.shape[1] != self.width:
            raise SaeError(
                f"rows of {self.hook}[{self.layer}] are {rows.shape[1]} wide in the view {self.view!r}, expected "
                f"{self.width}: the dictionary is of another model."
            )
        return rows

    def replaced(self, rows: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The site's rows after what is read of them became `new` [n, width]."""
        if self.view == "mean":
            return (rows.float() + (new - self.read(rows)).unsqueeze(1)).to(rows.dtype)
        return new.view(rows.shape).to(rows.dtype)


class Crosscoder:
    """`inputs` are the sites that features are computed from, `outputs` those that they reconstruct; equal for a
    crosscoder. `sae` holds the matrices over the concatenated rows and the activation."""

    def __init__(self, sae: Sae, inputs: Sequence[SitePart], outputs: Sequence[SitePart] | None = None):
        self.inputs = tuple(inputs)
        self.outputs = self.inputs if outputs is None else tuple(outputs)
        self.sae = sae
        for name, sites, width in (
            ("inputs", self.inputs, sae.encoder.shape[1]),
            ("outputs", self.outputs, sae.decoder.shape[1]),
        ):
            if not sites or len({site.address for site in sites}) < len(sites):
                raise SaeError(f"{name} are {quoted(sites, 200)}, expected one or more sites, each once.")
            if sum(site.width for site in sites) != width:
                raise SaeError(
                    f"{name} have {sum(site.width for site in sites)} numbers together, and the matrix {width}."
                )
        if sae.normalize != "none" or sae.is_partial:
            raise SaeError("a crosscoder has all its features and does not normalise rows.")

    @property
    def kind(self) -> str:
        return "crosscoder" if self.inputs == self.outputs else "transcoder"

    @property
    def features(self) -> int:
        return self.sae.d_sae

    @property
    def causal(self) -> bool:
        """Whether all inputs are computed before any output, so that one pass can encode and write."""
        last = max(in_order(site.address) for site in self.inputs)
        first = min(in_order(site.address) for site in self.outputs)
        return last < first

    def encode(self, rows: Mapping[Address, torch.Tensor]) -> torch.Tensor:
        """Features [n, F] of the rows of the input sites, which are [n, d] or [n, m, d] each."""
        missing = [site.address for site in self.inputs if site.address not in rows]
        if missing:
            raise SaeError(
                f"rows of {missing[0][0]}[{missing[0][1]}] are missing, which this {self.kind} reads."
            )
        return self.sae.encode(torch.cat([site.read(rows[site.address]) for site in self.inputs], 1))

    def decode(self, features: torch.Tensor) -> dict[Address, torch.Tensor]:
        """Reconstructed rows [n, width] of every output site."""
        return self._split(self.sae.decode(features))

    def change(self, difference: torch.Tensor) -> dict[Address, torch.Tensor]:
        """What a difference of features [n, F] adds to every output site."""
        return self._split(difference @ self.sae.decoder.to(difference.device))

    def norms(self) -> torch.Tensor:
        """Norms of the decoder rows [F, outputs]: where a feature writes."""
        parts = self.sae.decoder.split([site.width for site in self.outputs], 1)
        return torch.stack([part.norm(dim=1) for part in parts], 1)

    def save(self, directory: str | Path, half: bool = False) -> Path:
        """Write its files; with `half` matrices are rounded to bfloat16."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        sae = self.sae
        tensors = {name: getattr(sae, name) for name in (*_MATRICES, "encoder_bias", "decoder_bias")}
        tensors |= {f"activation.{name}": value for name, value in sae.activation.tensors().items()}
        if sae.x_max is not None:
            tensors["x_max"] = sae.x_max
        if half:
            tensors |= {name: tensors[name].bfloat16() for name in _MATRICES}
        save_tensors(directory / WEIGHTS, {name: value.contiguous() for name, value in tensors.items()})
        facts = {
            "version": VERSION,
            "kind": self.kind,
            "inputs": [asdict(site) for site in self.inputs],
            "outputs": [asdict(site) for site in self.outputs],
            "activation": sae.activation.name,
            "k": getattr(sae.activation, "k", None),
            "rectified": getattr(sae.activation, "rectified", False),
            "labels": {str(feature): label for feature, label in sae.labels.items()},
            "metadata": sae.metadata,
        }
        write_atomic(directory / SETTINGS, json.dumps(facts, indent=1) + "\n")
        return directory

    @staticmethod
    def load(directory: str | Path) -> Crosscoder:
        """Read the files of `save`."""
        directory = Path(directory)
        try:
            facts = read_json(directory / SETTINGS)
            tensors = load_file(directory / WEIGHTS)
        except FileNotFoundError as error:
            name = Path(str(error.filename or directory)).name
            raise SaeFileError(
                f"{directory} has no {name}, expected {SETTINGS} and {WEIGHTS}, which birkhoff sae crosscoder writes."
            ) from None
        except (OSError, ValueError, SafetensorError) as error:
            raise SaeFileError(f"{directory} cannot be read as a crosscoder: {str(error)[:300]}.") from None
        try:
            if facts["version"] != VERSION:
                raise SaeFileError(f"{directory} has version {facts['version']}, expected {VERSION}.")
            inputs, outputs = ([SitePart(**site) for site in facts[name]] for name in ("inputs", "outputs"))
            parameters: dict[str, Any] = {
                name.removeprefix("activation."): value.float()
                for name, value in tensors.items()
                if name.startswith("activation.")
            }
            if facts["activation"] == "topk":
                parameters |= {"k": facts["k"], "rectified": facts["rectified"]}
            sae = Sae(
                tensors["encoder"],
                tensors["encoder_bias"],
                tensors["decoder"],
                tensors["decoder_bias"],
                activation=facts["activation"],
                labels={int(feature): label for feature, label in facts["labels"].items()},
                x_max=tensors.get("x_max"),
                metadata=facts["metadata"],
                transcodes=True,
                **parameters,
            )
            return Crosscoder(sae, inputs, inputs if inputs == outputs else outputs)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SaeFileError(f"{directory} cannot be read as a crosscoder: {error!r}.") from None

    def __repr__(self) -> str:
        def names(sites: Sequence[SitePart]) -> str:
            return ", ".join(f"{site.hook}[{site.layer}] {site.view}" for site in sites)

        target = "" if self.kind == "crosscoder" else f" -> {names(self.outputs)}"
        return f"{self.kind.capitalize()}({self.features} features of {names(self.inputs)}{target})"

    def _split(self, rows: torch.Tensor) -> dict[Address, torch.Tensor]:
        parts = rows.split([site.width for site in self.outputs], -1)
        return {site.address: part for site, part in zip(self.outputs, parts)}


class CrossMeasure:
    """Explained variance of every output, features per row and share of features that never fired, over batches."""

    def __init__(self, crosscoder: Crosscoder):
        self._crosscoder = crosscoder
        sites = crosscoder.outputs
        self._rows = 0
        self._active = 0
        self._fired = torch.zeros(crosscoder.features, dtype=torch.bool)
        self._sums = [torch.zeros(site.width, dtype=torch.float64) for site in sites]
        self._squares = [0.0] * len(sites)
        self._residuals = [0.0] * len(sites)

    def add(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add rows [n, input width] and [n, output width]."""
        sae, sites = self._crosscoder.sae, self._crosscoder.outputs
        features = sae.encode(inputs)
        left = outputs - sae.decode(features)
        widths = [site.width for site in sites]
        for index, (rows, rest) in enumerate(zip(outputs.split(widths, 1), left.split(widths, 1))):
            self._sums[index] += rows.double().sum(0).cpu()
            self._squares[index] += float(rows.double().square().sum())
            self._residuals[index] += float(rest.double().square().sum())
        self._rows += len(inputs)
        self._active += int((features != 0).sum())
        self._fired |= (features != 0).any(0).cpu()

    def result(self) -> dict[str, Any]:
        explained = {}
        for index, site in enumerate(self._crosscoder.outputs):
            spread = self._squares[index] - float(self._sums[index].square().sum()) / max(self._rows, 1)
            share = 1 - self._residuals[index] / spread if spread > 0 else math.nan
            explained[f"{site.hook}.{site.layer}"] = share
        return {
            "explained_variance": explained,
            "l0": self._active / max(self._rows, 1),
            "dead_share": 1 - float(self._fired.float().mean()),
            "rows": self._rows,
        }
