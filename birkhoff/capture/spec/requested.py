"""The names under which rows were requested, and the sites they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from birkhoff.errors import SiteError, quoted
from birkhoff.hooks.site_names import Address, follow_alias, from_tool
from birkhoff.hooks.sites import BY_NAME


@dataclass(frozen=True)
class Requested:
    """`names`: (hook, layer) as a request names it -> address as tapped."""

    names: Mapping[Address, Address]
    num_layers: int

    def address(self, hook: str, layer: int | None) -> Address:
        """Address of rows requested as (hook, layer); aliases and negative layers are accepted. The layer may be None
        if the hook was captured at one layer."""
        addresses = set(self.names.values())
        if hook in BY_NAME and BY_NAME[hook].once:
            layer = self.num_layers - 1
        for streams in (True, False):  # a name of another tool for what was requested by ours
            foreign = from_tool(hook, self.num_layers, streams)
            address = None if foreign is None else follow_alias(*foreign, self.num_layers)
            if address in addresses and layer in (None, foreign and foreign[1]):
                return address
        if layer is None:
            layers = [at for name, at in self.names if name == hook]
            if len(layers) > 1:
                raise SiteError(f"{hook} was captured at layers {layers}. Say which: acts[hook, layer].")
            layer = layers[0] if layers else -1
        key = (hook, layer + self.num_layers if layer < 0 else layer)
        if key in self.names:
            return self.names[key]
        if key in addresses:  # requested under an alias
            return key
        available = ", ".join(f"{name}[{at}]" for name, at in sorted(self.names))
        raise SiteError(
            f"{quoted(hook)}[{layer}] was not captured. This capture holds {quoted(available, 400)}."
        )
