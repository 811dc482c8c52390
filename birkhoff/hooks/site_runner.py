"""What happens at one site of a step: capture, edits in their order, capture of the result.

Eager steps (`batch_tap.py`) and recorded steps (`graph_tap.py`) differ in how they store captured rows and in what
their edit stages are; the sequence, and the split into the tensor a sublayer reads and the tensor that is carried
past it, are here for both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from birkhoff.hooks.attention_change import RowChanges
from birkhoff.hooks.edit import EditStage, ExcludedPath, Path, Routing, SiteContext
from birkhoff.hooks.key_rules import KeyRules, key_rules
from birkhoff.hooks.sites import (
    ATTN_WEIGHTS,
    FINAL_HIDDEN,
    MHC_ATTN_POST_MIX,
    MHC_FFN_POST_MIX,
    MHC_HEAD_MIX,
    MHC_STREAMS_FINAL,
    MHC_STREAMS_PRE_ATTN,
    MHC_STREAMS_PRE_MLP,
    Site,
)
from birkhoff.hooks.tap import Reads, RowReader, TensorPair, split_parts, stack_parts

Capture = Callable[[Sequence[torch.Tensor]], None]  # takes the tensors that a site shows
RaggedCapture = Callable[[RowReader], None]  # takes a function that computes the rows of tokens
Stages = Callable[[ExcludedPath], Sequence[EditStage]]
POST_MIX_SITES = (MHC_ATTN_POST_MIX.id, MHC_FFN_POST_MIX.id)
STREAM_SITES = frozenset(
    site.id
    for site in (MHC_STREAMS_PRE_ATTN, MHC_STREAMS_PRE_MLP, MHC_STREAMS_FINAL, MHC_HEAD_MIX, FINAL_HIDDEN)
)  # between the sublayers of a layer, or after the last one


class PostMix:
    """The write-out weights [n, m] of the sublayer that last wrote the streams, shared by the layers of a step."""

    post: torch.Tensor | None = None


class SiteRunner:
    """Captures and edits of one site. `paths` are the paths of its edits, `stages` the edits without those of one
    path."""

    def __init__(
        self,
        before: Capture | None = None,
        after: Capture | None = None,
        stages: Stages | None = None,
        paths: Collection[Path] = (),
    ):
        self.before = before
        self.after = after
        self.probes: list[Callable[[torch.Tensor], None]] = []  # read the tensor before its edits
        self._stages = stages
        self._paths = frozenset(paths)

    @property
    def edits(self) -> bool:
        return bool(self._paths)

    def see(self, parts: Sequence[torch.Tensor]) -> None:
        self._probe(parts[0])
        for capture in (self.before, self.after):
            if capture is not None:
                capture(parts)

    def _probe(self, x: torch.Tensor) -> None:
        for probe in self.probes:
            probe(x)

    def run(self, x: torch.Tensor, context: SiteContext) -> torch.Tensor:
        """A site with one tensor."""
        self._probe(x)
        if self.before is not None:
            self.before([x])
        x = self._edit(x, "none", context)
        if self.after is not None:
            self.after([x])
        return x

    def part(self, x: torch.Tensor, context: SiteContext) -> TensorPair:
        """A stream site: the tensor that is read and the tensor that is carried, the same one unless edits differ.

        Captures after the edits show the carried tensor, or the read tensor if only that is edited."""
        self._probe(x)
        if self.before is not None:
            self.before([x])
        if self._paths <= {"both"}:
            read = carried = self._edit(x, "none", context)
        else:
            read = self._edit(x, "carry", context)
            carried = self._edit(x, "read", context)
        if self.after is not None:
            self.after([read if self._paths == {"read"} else carried])
        return read, carried

    def _edit(self, x: torch.Tensor, excluded: ExcludedPath, context: SiteContext) -> torch.Tensor:
        if self._stages is not None:
            for stage in self._stages(excluded):
                x = stage(x, context)
        return x


class RaggedRunner:
    """Captures of one ragged site, before and after its edits, and the edits: the model applies them itself."""

    def __init__(self, changes: RowChanges = ()):
        self.before: RaggedCapture | None = None
        self.after: RaggedCapture | None = None
        self.changes = changes
        self._rules: dict[tuple[int, int, int], KeyRules | None] = {}

    def rules(self, rows: int, heads: int, ratio: int) -> KeyRules | None:
        """The edits as a table, made once."""
        size = (rows, heads, ratio)
        if size not in self._rules:
            self._rules[size] = key_rules(self.changes, *size) if self.changes else None
        return self._rules[size]

    def read(self, before: RowReader, after: RowReader) -> None:
        for capture, reader in ((self.before, before), (self.after, after)):
            if capture is not None:
                capture(reader)


class LayerTap:
    """The tap of one layer: a runner for each site where something happens. `edited_step`: some layer of the step is
    edited or probed."""

    def __init__(self, post_mix: PostMix, edited_step: bool = True):
        self._post_mix = post_mix
        self.edited_step = edited_step
        self.sites: dict[int, SiteRunner] = {}  # by site id
        self.ragged_sites: dict[int, RaggedRunner] = {}

    @property
    def ragged(self) -> bool:
        return bool(self.ragged_sites)

    @property
    def streams_only(self) -> bool:
        return not self.edited_step and not self.ragged_sites and self.sites.keys() <= STREAM_SITES

    def read(self, site: Site, before: RowReader, after: RowReader | None = None) -> None:
        runner = self.ragged_sites.get(site.id)
        if runner is not None:
            runner.read(before, after or before)

    def changes(self, site: Site) -> RowChanges:
        runner = self.ragged_sites.get(site.id)
        return () if runner is None else runner.changes

    def rules(self, rows: int, heads: int, ratio: int) -> KeyRules | None:
        runner = self.ragged_sites.get(ATTN_WEIGHTS.id)
        return None if runner is None else runner.rules(rows, heads, ratio)

    def at(self, layer: int) -> LayerTap:
        return self

    def see(self, site: Site, *parts: torch.Tensor) -> None:
        runner = self.sites.get(site.id)
        if runner is not None:
            runner.see(parts)

    def __call__(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        runner = self.sites.get(site.id)
        if runner is not None:
            x = runner.run(x, SiteContext(self._post_mix.post))
        if site.id in POST_MIX_SITES:
            self._post_mix.post = x
        return x

    def part(self, site: Site, x: torch.Tensor, reads: Reads | None = None) -> TensorPair:
        runner = self.sites.get(site.id)
        return (x, x) if runner is None else runner.part(x, SiteContext(self._post_mix.post, reads))

    def route(self, site: Site, ids: torch.Tensor, weights: torch.Tensor, routing: Routing) -> TensorPair:
        runner = self.sites.get(site.id)
        if runner is None or not runner.edits:
            self.see(site, ids, weights)
            return ids, weights
        context = SiteContext(self._post_mix.post, routing=routing)
        return split_parts(runner.run(stack_parts(ids, weights), context), ids)
