"""What was computed once is not computed again: the pages of past prompts, found by what led to them.

Every whole page of 128 tokens has a key: a hash of the key before it, its tokens, and what edits do to them, so that a
key stands for everything its state depends on. Edits join at the pages they touch and from there on; a page that no
edit reaches is shared with requests that have none. A page is entered under its key when all its tokens are computed
for good and is never written again.

Pages hold compressed entries alone. To go on behind one, windows and carries are needed as they were at its end: a
`Snapshot`, taken in passing and kept in the memory of `SnapshotPool`, least recently used out first. A request starts behind
the last page that has one, and always computes at least its last token. It starts no later than the first row that it
captures, since a row that is not computed cannot be seen, unless all rows it would miss are in the `RowCache`.

A request that has ended also leaves its last, unfinished page behind, with the state at its very last token: the next
turn of a conversation then computes its own words only. Whoever starts there goes on in a copy of that page.

With `prompts_only` (batch-invariant engines) only pages computed as a prompt, in whole chunks, are entered: bits depend
on how tokens were cut, and this makes the cut the same.

With `PageFiles` what is evicted goes to disk and is found there again, also by a later process. Pages of a prompt that
was given a name are written at once, and are the last to go from memory and disk.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from birkhoff.config import PAGE_TOKENS
from birkhoff.engine.id_pool import IdPool
from birkhoff.engine.memory_plan import snapshot_bytes
from birkhoff.engine.named_contexts import Contexts
from birkhoff.engine.page_files import PageFiles
from birkhoff.engine.request import Request
from birkhoff.engine.row_cache import RowCache
from birkhoff.engine.snapshot_pool import PooledSnapshot, SnapshotPool
from birkhoff.hooks.batch_tap import RowObserver
from birkhoff.hooks.digest import combine, framed
from birkhoff.hooks.plan import Job, Plan, SiteRows
from birkhoff.model.state import Snapshot, State

KEY_BYTES = 16
SHORTEST_END = 16  # tokens; what is shorter is computed as fast


@dataclass(eq=False)
class Node:
    """One page of some past sequence; with fewer tokens than a page has, the end of one."""

    key: bytes
    page: int
    snapshot: PooledSnapshot | None = None
    tokens: int = PAGE_TOKENS
    parent: bytes = b""  # of an end: the key before it


@dataclass(frozen=True)
class Hit:
    """Pages a request can use as they are, and the state behind the last of them."""

    pages: list[int]
    snapshot: PooledSnapshot
    seen: tuple[tuple[Job, SiteRows], ...] = ()  # captured rows that need not be computed
    copied: tuple[int, ...] = ()  # an unfinished page, to go on in a copy of it

    @property
    def position(self) -> int:
        return self.snapshot.position


@dataclass(eq=False)
class _Chain:
    """A request's keys so far. `open` while they can go on: an edit that cannot be named ends them."""

    keys: list[bytes]
    entered: int = 0  # pages that are in the cache, or never will be
    open: bool = True
    bound: bool = False  # its context has its name


class PrefixCache:
    def __init__(
        self,
        state: State,
        pages: IdPool,
        limit_bytes: int,
        row_bytes: int = 0,
        prompts_only: bool = False,
        files: PageFiles | None = None,
    ) -> None:
        self.state = state
        self.pages = pages
        border = snapshot_bytes(state.config, state.dtype.itemsize, state.mtp is not None)
        self.states = SnapshotPool(limit_bytes, border, state.device)
        self.rows = RowCache(row_bytes) if row_bytes else None
        self.prompts_only = prompts_only
        self.files = files
        self.root = b"" if files is None else bytes.fromhex(files.identity)
        self.root += b"prompts only" if prompts_only else b""  # other cuts, other bits
        self.contexts = Contexts(None if files is None else files.folder / "contexts.json")
        self._precious = self.contexts.precious
        if files is not None:
            files.precious = self._precious
        self.hits = self.hit_tokens = self.evictions = 0
        self._nodes: dict[bytes, Node] = {}
        self._by_page: dict[int, Node] = {}
        self._snapshots: OrderedDict[bytes, Node] = OrderedDict()
        self._ends: dict[
            bytes, Counter[int]
        ] = {}  # by the key before them: how many ends of which length there are
        self._chains: WeakKeyDictionary[Request, _Chain] = WeakKeyDictionary()
        pages.on_eviction = self._evicted

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def held_bytes(self) -> int:
        """Of the states behind pages."""
        return self.states.held_bytes

    def report(self) -> dict[str, Any]:
        """What is held and what came of it, in numbers."""
        files, rows = self.files, self.rows
        return {
            "pages": len(self),
            "snapshot_bytes": self.held_bytes,
            "hits": self.hits,
            "hit_tokens": self.hit_tokens,
            "evictions": self.evictions,
            "rows_served": 0 if rows is None else rows.served_rows,
            "row_bytes": 0 if rows is None else rows.held_bytes,
            "contexts": self.contexts.names,
            "disk": None
            if files is None
            else {
                "bytes": files.held_bytes,
                "written": files.written,
                "refused": files.refused,
                "failures": files.failures,
            },
        }

    def match(self, request: Request) -> Hit | None:
        """The longest known beginning of a request that it can start behind."""
        most = request.num_tokens - 1
        if self.prompts_only:
            most = min(most, len(request.prompt_ids) - 1)
        walked = self._walk(request, most // PAGE_TOKENS)
        known = _startable(walked)
        seen: tuple[tuple[Job, SiteRows], ...] | None = ()
        wanted = self._first_wanted(request)
        for pages in range(len(walked), len(known) - 1, -1):
            end = self._end(request, pages, min(most, wanted))
            if end is not None:
                return self._hit(walked[:pages], end)
        if wanted < len(known) * PAGE_TOKENS:
            seen = self._seen(request, len(known) * PAGE_TOKENS)
            if seen is None:
                known = _startable(walked[: wanted // PAGE_TOKENS])
        return self._hit(known, None, seen or ()) if known else None

    def _hit(self, known: list[Node], end: Node | None, seen: tuple[tuple[Job, SiteRows], ...] = ()) -> Hit:
        last = end or known[-1]
        assert last.snapshot is not None
        self._snapshots.move_to_end(last.key)
        return Hit([node.page for node in known], last.snapshot, seen, () if end is None else (end.page,))

    def _walk(self, request: Request, pages: int) -> list[Node]:
        """The first pages of a request for as long as they are known."""
        nodes: list[Node] = []
        for key in self._keys(request, pages):
            node = self._nodes.get(key) or self._read(key, nodes)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def _end(self, request: Request, pages: int, most: int) -> Node | None:
        """The longest end behind this many pages that a request begins with, no longer than `most` tokens in all."""
        parent = self._parent(request, pages)
        if parent is None:
            return None
        for tokens in sorted(self._ends.get(parent, ()), reverse=True):
            if pages * PAGE_TOKENS + tokens <= most:
                node = self._nodes.get(page_key(request, pages, parent, tokens) or b"")
                if node is not None and node.snapshot is not None:
                    return node
        return None

    def _parent(self, request: Request, pages: int) -> bytes | None:
        """The key before a page; None when it has none that can be named."""
        keys = self._keys(request, pages)
        return None if len(keys) < pages else keys[-1] if keys else self.root

    def leave(self, request: Request) -> None:
        """A request has ended well: keep its unfinished page, too."""
        pages, tokens = divmod(request.computed, PAGE_TOKENS)
        parent = self._parent(request, pages)
        if self.prompts_only or tokens < SHORTEST_END or parent is None or request.slot is None:
            return
        if pages and parent not in self._nodes:
            return
        key = page_key(request, pages, parent, tokens)
        if key is None or key in self._nodes:
            return
        node = self._enter(key, request.pages[pages])
        node.tokens = tokens
        node.parent = parent
        self._ends.setdefault(parent, Counter())[tokens] += 1
        self._hold(node, self.state.save(request.slot, request.computed))

    def _read(self, key: bytes, before: Sequence[Node]) -> Node | None:
        """A page from disk into memory, which must not cost those before it their place."""
        if self.files is None or key not in self.files:
            return None
        held = [node.page for node in before]
        self.pages.share(held)
        taken = self.pages.allocate(1)
        node = None
        if taken is not None:
            (page,) = taken
            places = self.state.page(page)
            found = self.files.read(key, {f"page {name}": like for name, like in places.items()})
            if found is not None:
                for name, place in places.items():
                    place.copy_(found[f"page {name}"])
                rows = {name[5:]: rows for name, rows in found.items() if name.startswith("rows ")}
                node = self._enter(key, page)
                snapshot = Snapshot((len(before) + 1) * PAGE_TOKENS, rows)
                if rows and self.state.fits(snapshot):
                    self._hold(node, snapshot)
            self.pages.release(taken)
        self.pages.release(held)
        return node

    def _write(self, node: Node, snapshot: Snapshot | None = None) -> None:
        """A page to disk, with the state behind it: the one that is held, or `snapshot`."""
        if self.files is None or node.key in self.files or node.tokens < PAGE_TOKENS:
            return
        said = {f"page {name}": place for name, place in self.state.page(node.page).items()}
        if node.snapshot is not None:
            snapshot = self.states.get(node.snapshot)
        rows = {} if snapshot is None else snapshot.rows
        self.files.write(node.key, said | {f"rows {name}": kept for name, kept in rows.items()})

    def _enter(self, key: bytes, page: int) -> Node:
        node = self._nodes[key] = self._by_page[page] = Node(key, page)
        self.pages.keep(page)
        if key in self._precious:
            self.pages.protect([self._nodes[k].page for k in self._precious if k in self._nodes])
        return node

    def start(self, request: Request, hit: Hit) -> None:
        """Put a request that has its slot and pages behind what it shares."""
        assert request.slot is not None and request.pages[: len(hit.pages)] == hit.pages
        self.state.restore(request.slot, self.states.get(hit.snapshot))
        for page in hit.copied:
            self.state.copy_page(page, request.pages[len(hit.pages)])
        self.pages.release(hit.copied)
        request.computed = hit.position
        if request.cached_tokens is None:
            request.cached_tokens = hit.position
            request.shared_pages = len(hit.pages)
        self._chains[request].entered = len(hit.pages)
        self.hits = self.hits + 1
        self.hit_tokens = self.hit_tokens + hit.position
        plan = request.plan
        if plan is not None:  # steered as much as if it had been computed for this very request
            tokens = request.tokens(0, hit.position)
            for edit in plan.edits:
                plan.steered.update(int(o) for o in edit.offsets(0, tokens, len(request.prompt_ids)))
            for job, rows in hit.seen:
                job.deliver(rows)
            if hit.seen and self.rows is not None:
                plan.seen = max(plan.seen, hit.position)
                self.rows.served_rows += sum(len(rows.positions) for _, rows in hit.seen)

    def watch(self, request: Request, start: int, stop: int) -> list[Snapshot]:
        """Ask the coming step for snapshots at the page borders that one chunk passes."""
        borders = range(start // PAGE_TOKENS + 1, stop // PAGE_TOKENS + 1)
        keys = self._keys(request, len(borders) + start // PAGE_TOKENS)
        wanted = []
        for pages in borders:
            if pages > len(keys) or not self._enters(request, pages):
                break
            node = self._nodes.get(keys[pages - 1])
            if node is None or node.snapshot is None:
                wanted.append(Snapshot(pages * PAGE_TOKENS))
        if wanted and request.slot is not None:
            self.state.watched[request.slot] = wanted
        return wanted

    def extend(self, request: Request, passed: Sequence[Snapshot] = ()) -> None:
        """Enter the pages a request has completed; `passed` are snapshots its last step filled."""
        chain = self._chain(request)
        if request.computed // PAGE_TOKENS > chain.entered:
            self._enter_complete(request, chain, {snapshot.position: snapshot for snapshot in passed})
        if request.context is not None and not chain.bound and request.computed >= len(request.prompt_ids):
            chain.bound = True
            self._bind(request.context, self._keys(request, len(request.prompt_ids) // PAGE_TOKENS))

    def _enter_complete(self, request: Request, chain: _Chain, passed: Mapping[int, Snapshot]) -> None:
        assert request.slot is not None
        complete = request.computed // PAGE_TOKENS
        keys = self._keys(request, complete)
        for number in range(chain.entered, min(complete, len(keys))):
            if not self._enters(request, number + 1):
                break
            border = (number + 1) * PAGE_TOKENS
            node = self._nodes.get(keys[number]) or self._enter(keys[number], request.pages[number])
            if node.snapshot is None:
                snapshot = passed.get(border)
                if snapshot is None and request.computed - border <= self.state.lookback:
                    snapshot = self.state.save(request.slot, border)
                if snapshot is not None:
                    self._hold(node, snapshot)
        chain.entered = complete

    def _bind(self, name: str, keys: Sequence[bytes]) -> None:
        """Give the pages of a prompt a name, and write them down."""
        self.contexts.bind(name, keys)
        self._precious = self.contexts.precious
        self.pages.protect([self._nodes[key].page for key in self._precious if key in self._nodes])
        if self.files is not None:
            self.files.precious = self._precious
            for key in keys:
                if key in self._nodes:
                    self._write(self._nodes[key])

    def close(self) -> None:
        """Write down what memory holds, for a later process."""
        for node in self._nodes.values() if self.files is not None else ():
            self._write(node)

    def keep_rows(self, requests: Mapping[Plan, Request]) -> RowObserver | None:
        """Somebody to show rows to on their way to the jobs of these requests."""
        store = self.rows
        if store is None:
            return None

        def keep(plan: Plan, job: Job, rows: SiteRows) -> None:
            request = requests[plan]
            store.put(self._keys(request, request.num_tokens // PAGE_TOKENS), job.after, rows)

        return keep

    def clear(self) -> None:
        """Forget everything; running requests keep what they hold."""
        if self.rows is not None:
            self.rows.clear()
        for node in list(self._nodes.values()):
            self._drop(node)
            self.pages.forget(node.page)

    def restart(self, request: Request) -> None:
        """A request has given its memory back and will be matched again."""
        self._chain(request).entered = 0

    def _enters(self, request: Request, pages: int) -> bool:
        return not self.prompts_only or pages * PAGE_TOKENS <= len(request.prompt_ids)

    def _first_wanted(self, request: Request) -> int:
        """The first position whose rows have to be computed because somebody wants to see them."""
        plan = request.plan
        if plan is None or not plan.jobs:
            return request.num_tokens
        tokens = request.tokens(plan.seen, request.num_tokens)
        firsts = [job.offsets(plan.seen, tokens, len(request.prompt_ids)) for job in plan.jobs]
        return min(
            (plan.seen + int(offsets[0]) for offsets in firsts if len(offsets)), default=request.num_tokens
        )

    def _seen(self, request: Request, stop: int) -> tuple[tuple[Job, SiteRows], ...] | None:
        """Every row that the request's jobs want before `stop` and have not had; None unless all are here."""
        plan, border = request.plan, len(request.prompt_ids)
        if self.rows is None or plan is None:
            return None
        tokens = request.tokens(plan.seen, stop)
        keys = self._keys(request, stop // PAGE_TOKENS)
        found = []
        for job in plan.jobs:
            offsets = [int(offset) for offset in job.offsets(plan.seen, tokens, border)]
            positions = tuple(plan.seen + o for o in offsets)
            ids = tuple(tokens[o] for o in offsets)
            for hook, layer in job.keys if positions else ():
                tensor = self.rows.get(keys, hook, layer, job.after, positions)
                if tensor is None:
                    return None
                inside = sum(position < border for position in positions)
                found.append((job, SiteRows(hook, layer, tensor, positions, ids, inside)))
        return tuple(found)

    def _chain(self, request: Request) -> _Chain:
        if request not in self._chains:
            self._chains[request] = _Chain([])
        return self._chains[request]

    def _keys(self, request: Request, pages: int) -> list[bytes]:
        """Keys of a request's first pages, fewer when an edit cannot be named."""
        chain = self._chain(request)
        while chain.open and len(chain.keys) < pages:
            before = chain.keys[-1] if chain.keys else self.root
            key = page_key(request, len(chain.keys), before)
            if key is None:
                chain.open = False
            else:
                chain.keys.append(key)
        return chain.keys[:pages]

    def _hold(self, node: Node, snapshot: Snapshot) -> None:
        """Keep the state behind a page, at the cost of those used longest ago."""
        if self._make_room(node, snapshot):
            node.snapshot = self.states.put(snapshot)
            self._snapshots[node.key] = node
        else:
            self._write(node, snapshot)

    def _make_room(self, node: Node, snapshot: Snapshot) -> bool:
        """Whether there is room for a snapshot, in the end; precious ones make room only for one of their own."""
        if not self.states.fits(snapshot, empty=True):
            return False
        while not self.states.fits(snapshot):
            oldest = next(
                (other for key, other in self._snapshots.items() if key not in self._precious), None
            )
            if oldest is None:
                if node.key not in self._precious:
                    return False
                oldest = next(iter(self._snapshots.values()))
            self._write(oldest)  # a page on disk is of use with its snapshot only
            self._release_snapshot(oldest)
        return True

    def _release_snapshot(self, node: Node) -> None:
        if node.snapshot is not None:
            self.states.drop(node.snapshot)
            node.snapshot = None
            del self._snapshots[node.key]

    def _evicted(self, page: int) -> None:
        self.evictions += 1
        self._write(self._by_page[page])
        self._drop(self._by_page[page])

    def _drop(self, node: Node) -> None:
        self._release_snapshot(node)
        del self._nodes[node.key], self._by_page[node.page]
        if node.tokens < PAGE_TOKENS:
            lengths = self._ends[node.parent]
            lengths[node.tokens] -= 1
            self._ends[node.parent] = +lengths  # only what there is
            if not self._ends[node.parent]:
                del self._ends[node.parent]


def _startable(nodes: Sequence[Node]) -> list[Node]:
    """Up to the last page that a request can start behind."""
    deepest = max((number for number, node in enumerate(nodes, 1) if node.snapshot is not None), default=0)
    return list(nodes[:deepest])


def page_key(request: Request, page: int, before: bytes, length: int = PAGE_TOKENS) -> bytes | None:
    """128 bits of everything the state behind the first `length` tokens of a page depends on; None when an edit there
    has no name."""
    start = page * PAGE_TOKENS
    stop = page * PAGE_TOKENS + length
    border = len(request.prompt_ids)
    tokens = request.tokens(start, stop)
    said = [before, struct.pack(f"<{len(tokens)}q", *tokens)]
    for edit in request.plan.edits if request.plan is not None else ():
        offsets = [int(offset) for offset in edit.offsets(start, tokens, border)]
        if not offsets:
            continue
        prompt = [offset for offset in offsets if start + offset < border]
        for phase, touched in (("prefill", prompt), ("decode", offsets[len(prompt) :])):
            if touched:
                digest = combine(edit.digest_parts(phase))  # type: ignore[arg-type]
                if digest is None:
                    return None
                said += [digest, struct.pack(f"<{len(touched)}q", *touched)]
    return hashlib.blake2b(framed(*said), digest_size=KEY_BYTES).digest()
