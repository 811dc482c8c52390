"""Prefix cache: pages of past prompts, found by a hash of everything that led to them.

Every whole page (`PAGE_TOKENS` tokens) has a key: a hash of the previous page's key, its tokens, and the edits that
touch them. A key therefore covers everything that the page's state depends on. Edits enter the keys of the pages they
touch and of all later ones; a page before any edit is shared with unedited requests. A page is inserted under its key
when all its tokens are final, and is never written again.

Pages hold compressed entries only. To resume after a page, windows and carries are needed as they were at its end: a
`Snapshot`, taken during prefill and kept in the `SnapshotPool`, least recently used evicted first. A request resumes
after the last matching page that has a snapshot, and always computes at least its last token. It resumes no later than
the first row that it captures, because a row that is not computed cannot be captured, unless all rows it would miss are
in the `RowCache`.

A finished request also leaves its last, partial page, with the state at its very last token: the next turn of a
conversation then computes only its new tokens. A request that resumes there continues in a copy of that page.

With `prompts_only` (batch-invariant engines), only pages computed as prompt in whole chunks are inserted: the bits
depend on chunk boundaries, and this makes them the same.

With `PageFiles`, evicted pages are written to disk and found there again, also by a later process. Pages of a named
prompt are written at once and evicted last, from memory and from disk.
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
from birkhoff.engine.named_contexts import NamedContexts
from birkhoff.engine.page_files import PageFiles
from birkhoff.engine.request import Request
from birkhoff.engine.row_cache import RowCache
from birkhoff.engine.snapshot_pool import PooledSnapshot, SnapshotPool
from birkhoff.hooks.batch_tap import RowObserver
from birkhoff.hooks.digest import Phase, combine, framed
from birkhoff.hooks.plan import Job, Plan, SiteRows
from birkhoff.model.cache_size import snapshot_bytes
from birkhoff.model.state import Snapshot, State

KEY_BYTES = 16
MIN_PARTIAL_TOKENS = 16  # a shorter partial page is recomputed as fast

CachedRows = tuple[tuple[Job, SiteRows], ...]


@dataclass(eq=False)
class CachedPage:
    """One page of a past sequence; a partial page has fewer than `PAGE_TOKENS` tokens."""

    key: bytes
    page: int
    snapshot: PooledSnapshot | None = None
    tokens: int = PAGE_TOKENS
    parent: bytes = b""  # of a partial page: the key of the page before it


@dataclass(frozen=True)
class PrefixHit:
    """Pages that a request can share, and the state after the last of them."""

    pages: list[int]
    snapshot: PooledSnapshot
    rows: CachedRows = ()  # captured rows that need not be computed
    copied: tuple[int, ...] = ()  # a partial page, to be copied

    @property
    def position(self) -> int:
        return self.snapshot.position


@dataclass(eq=False)
class _KeyChain:
    """The page keys of one request so far. `open` is False after an edit without a digest: no further keys."""

    keys: list[bytes]
    inserted: int = 0  # leading pages that are in the cache, or never will be
    open: bool = True
    bound: bool = False  # its context name is bound


class PrefixCache:
    """`limit_bytes` is for snapshots and `row_bytes` for captured rows; pages belong to the scheduler's pool."""

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
        boundary_bytes = snapshot_bytes(state.config, state.dtype.itemsize, state.mtp is not None)
        self.snapshots = SnapshotPool(limit_bytes, boundary_bytes, state.device)
        self.rows = RowCache(row_bytes) if row_bytes else None
        self.prompts_only = prompts_only
        self.files = files
        self.root = b"" if files is None else bytes.fromhex(files.identity)
        self.root += b"prompts only" if prompts_only else b""  # other chunk boundaries, other bits
        self.contexts = NamedContexts(None if files is None else files.folder / "contexts.json")
        self._protected = self.contexts.page_keys
        if files is not None:
            files.protected = self._protected
        self.hits = self.hit_tokens = self.evictions = 0
        self._by_key: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._with_snapshot: OrderedDict[bytes, CachedPage] = OrderedDict()  # least recently used first
        # By parent key: count of partial pages by length.
        self._partial_lengths: dict[bytes, Counter[int]] = {}
        self._chains: WeakKeyDictionary[Request, _KeyChain] = WeakKeyDictionary()
        pages.on_eviction = self._on_eviction

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def held_bytes(self) -> int:
        """Bytes of snapshots."""
        return self.snapshots.held_bytes

    def report(self) -> dict[str, Any]:
        """Contents and hit statistics, as plain data."""
        files, rows = self.files, self.rows
        disk = None
        if files is not None:
            disk = {
                "bytes": files.held_bytes,
                "written": files.written,
                "refused": files.refused,
                "failures": files.failures,
                "too_large": files.too_large,
            }
        return {
            "pages": len(self),
            "snapshot_bytes": self.held_bytes,
            "hits": self.hits,
            "hit_tokens": self.hit_tokens,
            "evictions": self.evictions,
            "rows_served": 0 if rows is None else rows.served_rows,
            "row_bytes": 0 if rows is None else rows.held_bytes,
            "rows_too_large": 0 if rows is None else rows.rows_too_large,
            "contexts": self.contexts.names,
            "disk": disk,
        }

    def match(self, request: Request) -> PrefixHit | None:
        """The longest cached prefix that the request can resume after."""
        limit = request.num_tokens - 1
        if self.prompts_only:
            limit = min(limit, len(request.prompt_ids) - 1)
        cached = self._cached_pages(request, limit // PAGE_TOKENS)
        usable = _up_to_snapshot(cached)
        first_captured = self._first_captured(request)
        for count in range(len(cached), len(usable) - 1, -1):
            partial = self._find_partial(request, count, min(limit, first_captured))
            if partial is not None:
                return self._hit(cached[:count], partial)
        rows: CachedRows | None = ()
        if first_captured < len(usable) * PAGE_TOKENS:
            rows = self._cached_rows(request, len(usable) * PAGE_TOKENS)
            if rows is None:
                usable = _up_to_snapshot(cached[: first_captured // PAGE_TOKENS])
        return self._hit(usable, None, rows or ()) if usable else None

    def _hit(self, pages: list[CachedPage], partial: CachedPage | None, rows: CachedRows = ()) -> PrefixHit:
        last = partial or pages[-1]
        assert last.snapshot is not None
        self._with_snapshot.move_to_end(last.key)
        copied = () if partial is None else (partial.page,)
        return PrefixHit([each.page for each in pages], last.snapshot, rows, copied)

    def _cached_pages(self, request: Request, count: int) -> list[CachedPage]:
        """The first pages of a request, up to `count`, while they are cached in memory or on disk."""
        pages: list[CachedPage] = []
        for key in self._keys(request, count):
            page = self._by_key.get(key) or self._read(key, pages)
            if page is None:
                break
            pages.append(page)
        return pages

    def _find_partial(self, request: Request, pages: int, limit: int) -> CachedPage | None:
        """The longest matching partial page after `pages` pages that ends within `limit` tokens."""
        parent = self._parent(request, pages)
        if parent is None:
            return None
        for tokens in sorted(self._partial_lengths.get(parent, ()), reverse=True):
            if pages * PAGE_TOKENS + tokens <= limit:
                partial = self._by_key.get(page_key(request, pages, parent, tokens) or b"")
                if partial is not None and partial.snapshot is not None:
                    return partial
        return None

    def _parent(self, request: Request, pages: int) -> bytes | None:
        """The key of the page before page number `pages`; None when an edit without a digest precedes it."""
        keys = self._keys(request, pages)
        return None if len(keys) < pages else keys[-1] if keys else self.root

    def insert_partial_page(self, request: Request) -> None:
        """Insert the last, partial page of a request that finished normally."""
        pages, tokens = divmod(request.num_computed_tokens, PAGE_TOKENS)
        parent = self._parent(request, pages)
        if self.prompts_only or tokens < MIN_PARTIAL_TOKENS or parent is None or request.slot is None:
            return
        if pages and parent not in self._by_key:
            return
        key = page_key(request, pages, parent, tokens)
        if key is None or key in self._by_key:
            return
        partial = self._insert(key, request.pages[pages])
        partial.tokens = tokens
        partial.parent = parent
        self._partial_lengths.setdefault(parent, Counter())[tokens] += 1
        self._store_snapshot(partial, self.state.save(request.slot, request.num_computed_tokens))

    def _read(self, key: bytes, before: Sequence[CachedPage]) -> CachedPage | None:
        """Read a page from disk into memory, without evicting the pages `before` it."""
        if self.files is None or key not in self.files:
            return None
        shared = [each.page for each in before]
        self.pages.share(shared)
        allocated = self.pages.allocate(1)
        cached = None
        if allocated is not None:
            (page,) = allocated
            destinations = self.state.page(page)
            tensors = self.files.read(key, {f"page {name}": like for name, like in destinations.items()})
            if tensors is not None:
                for name, destination in destinations.items():
                    destination.copy_(tensors[f"page {name}"])
                rows = {name[5:]: tensor for name, tensor in tensors.items() if name.startswith("rows ")}
                cached = self._insert(key, page)
                snapshot = Snapshot((len(before) + 1) * PAGE_TOKENS, rows)
                if rows and self.state.fits(snapshot):
                    self._store_snapshot(cached, snapshot)
            self.pages.release(allocated)
        self.pages.release(shared)
        return cached

    def _write(self, cached: CachedPage, snapshot: Snapshot | None = None) -> None:
        """Write a whole page to disk with its stored snapshot, or with `snapshot` if it has none."""
        if self.files is None or cached.key in self.files or cached.tokens < PAGE_TOKENS:
            return
        tensors = {f"page {name}": tensor for name, tensor in self.state.page(cached.page).items()}
        if cached.snapshot is not None:
            snapshot = self.snapshots.get(cached.snapshot)
        rows = {} if snapshot is None else snapshot.rows
        self.files.write(cached.key, tensors | {f"rows {name}": tensor for name, tensor in rows.items()})

    def _insert(self, key: bytes, page: int) -> CachedPage:
        cached = self._by_key[key] = self._by_page[page] = CachedPage(key, page)
        self.pages.keep(page)
        if key in self._protected:
            self._protect_pages()
        return cached

    def _protect_pages(self) -> None:
        self.pages.protect([self._by_key[key].page for key in self._protected if key in self._by_key])

    def restore(self, request: Request, hit: PrefixHit) -> None:
        """Resume an admitted request after the pages of `hit`."""
        assert request.slot is not None and request.pages[: len(hit.pages)] == hit.pages
        self.state.restore(request.slot, self.snapshots.get(hit.snapshot))
        for page in hit.copied:
            self.state.copy_page(page, request.pages[len(hit.pages)])
        self.pages.release(hit.copied)
        request.num_computed_tokens = hit.position
        if request.cached_tokens is None:
            request.cached_tokens = hit.position
            request.shared_pages = len(hit.pages)
        self._chains[request].inserted = len(hit.pages)
        self.hits += 1
        self.hit_tokens += hit.position
        plan = request.plan
        if plan is not None:  # the cached tokens were edited as if they had been computed for this request
            tokens = request.tokens(0, hit.position)
            for edit in plan.edits:
                plan.steered.update(int(o) for o in edit.offsets(0, tokens, len(request.prompt_ids)))
            for job, rows in hit.rows:
                job.deliver(rows)
            if hit.rows and self.rows is not None:
                plan.delivered_until = max(plan.delivered_until, hit.position)
                self.rows.served_rows += sum(len(rows.positions) for _, rows in hit.rows)

    def request_snapshots(self, request: Request, start: int, stop: int) -> list[Snapshot]:
        """Make the coming step take snapshots at the page boundaries in tokens `start..stop`; returns them, to be
        filled by the step."""
        boundaries = range(start // PAGE_TOKENS + 1, stop // PAGE_TOKENS + 1)
        keys = self._keys(request, len(boundaries) + start // PAGE_TOKENS)
        snapshots = []
        for pages in boundaries:
            if pages > len(keys) or not self._cacheable(request, pages):
                break
            cached = self._by_key.get(keys[pages - 1])
            if cached is None or cached.snapshot is None:
                snapshots.append(Snapshot(pages * PAGE_TOKENS))
        if snapshots and request.slot is not None:
            self.state.watched[request.slot] = snapshots
        return snapshots

    def insert_pages(self, request: Request, snapshots: Sequence[Snapshot] = ()) -> None:
        """Insert the pages that a request has completed; `snapshots` were taken by its last step."""
        chain = self._chain(request)
        if request.num_computed_tokens // PAGE_TOKENS > chain.inserted:
            self._insert_complete(request, chain, {each.position: each for each in snapshots})
        prompt_done = request.num_computed_tokens >= len(request.prompt_ids)
        if request.context is not None and not chain.bound and prompt_done:
            chain.bound = True
            self._bind(request.context, self._keys(request, len(request.prompt_ids) // PAGE_TOKENS))

    def _insert_complete(self, request: Request, chain: _KeyChain, snapshots: Mapping[int, Snapshot]) -> None:
        assert request.slot is not None
        computed = request.num_computed_tokens
        complete = computed // PAGE_TOKENS
        keys = self._keys(request, complete)
        for index in range(chain.inserted, min(complete, len(keys))):
            if not self._cacheable(request, index + 1):
                break
            boundary = (index + 1) * PAGE_TOKENS
            cached = self._by_key.get(keys[index]) or self._insert(keys[index], request.pages[index])
            if cached.snapshot is None:
                snapshot = snapshots.get(boundary)
                if snapshot is None and computed - boundary <= self.state.lookback:
                    snapshot = self.state.save(request.slot, boundary)
                if snapshot is not None:
                    self._store_snapshot(cached, snapshot)
        chain.inserted = complete

    def _bind(self, name: str, keys: Sequence[bytes]) -> None:
        """Bind a context name to the pages of a prompt, protect them and write them to disk."""
        self.contexts.bind(name, keys)
        self._protected = self.contexts.page_keys
        self._protect_pages()
        if self.files is not None:
            self.files.protected = self._protected
            for key in keys:
                if key in self._by_key:
                    self._write(self._by_key[key])

    def close(self) -> None:
        """Write all pages in memory to disk, for a later process."""
        for cached in self._by_key.values() if self.files is not None else ():
            self._write(cached)

    def row_observer(self, requests: Mapping[Plan, Request]) -> RowObserver | None:
        """A callback that stores rows delivered to the jobs of these requests; None without a row cache."""
        store = self.rows
        if store is None:
            return None

        def keep(plan: Plan, job: Job, rows: SiteRows) -> None:
            request = requests[plan]
            store.put(self._keys(request, request.num_tokens // PAGE_TOKENS), job.after, rows)

        return keep

    def clear(self) -> None:
        """Remove all pages and rows; running requests keep their pages."""
        if self.rows is not None:
            self.rows.clear()
        for cached in list(self._by_key.values()):
            self._remove(cached)
            self.pages.forget(cached.page)

    def reset(self, request: Request) -> None:
        """Forget which pages a preempted request has inserted; it is matched again at its next admission."""
        self._chain(request).inserted = 0

    def _cacheable(self, request: Request, pages: int) -> bool:
        return not self.prompts_only or pages * PAGE_TOKENS <= len(request.prompt_ids)

    def _first_captured(self, request: Request) -> int:
        """The first position whose rows must be computed because a job captures them."""
        plan = request.plan
        if plan is None or not plan.jobs:
            return request.num_tokens
        tokens = request.tokens(plan.delivered_until, request.num_tokens)
        offsets = [job.offsets(plan.delivered_until, tokens, len(request.prompt_ids)) for job in plan.jobs]
        return min(
            (plan.delivered_until + int(each[0]) for each in offsets if len(each)), default=request.num_tokens
        )

    def _cached_rows(self, request: Request, stop: int) -> CachedRows | None:
        """All rows before `stop` that the jobs of a request have yet to receive; None unless all are cached."""
        plan, prompt_len = request.plan, len(request.prompt_ids)
        if self.rows is None or plan is None:
            return None
        tokens = request.tokens(plan.delivered_until, stop)
        keys = self._keys(request, stop // PAGE_TOKENS)
        cached = []
        for job in plan.jobs:
            offsets = [int(offset) for offset in job.offsets(plan.delivered_until, tokens, prompt_len)]
            positions = tuple(plan.delivered_until + offset for offset in offsets)
            ids = tuple(tokens[offset] for offset in offsets)
            for hook, layer in job.keys if positions else ():
                tensor = self.rows.get(keys, hook, layer, job.after, positions)
                if tensor is None:
                    return None
                cached.append((job, SiteRows(hook, layer, tensor, positions, ids)))
        return tuple(cached)

    def _chain(self, request: Request) -> _KeyChain:
        if request not in self._chains:
            self._chains[request] = _KeyChain([])
        return self._chains[request]

    def _keys(self, request: Request, pages: int) -> list[bytes]:
        """Keys of a request's first pages; fewer when an edit has no digest."""
        chain = self._chain(request)
        while chain.open and len(chain.keys) < pages:
            before = chain.keys[-1] if chain.keys else self.root
            key = page_key(request, len(chain.keys), before)
            if key is None:
                chain.open = False
            else:
                chain.keys.append(key)
        return chain.keys[:pages]

    def _store_snapshot(self, cached: CachedPage, snapshot: Snapshot) -> None:
        """Store the state after a page, evicting older snapshots; on disk when memory has no room."""
        if self._make_room(cached, snapshot):
            cached.snapshot = self.snapshots.put(snapshot)
            self._with_snapshot[cached.key] = cached
        else:
            self._write(cached, snapshot)

    def _make_room(self, cached: CachedPage, snapshot: Snapshot) -> bool:
        """Evict snapshots until `snapshot` fits; protected ones only for another protected page."""
        if not self.snapshots.fits(snapshot, empty=True):
            return False
        while not self.snapshots.fits(snapshot):
            oldest = next(
                (other for key, other in self._with_snapshot.items() if key not in self._protected), None
            )
            if oldest is None:
                if cached.key not in self._protected:
                    return False
                oldest = next(iter(self._with_snapshot.values()))
            self._write(oldest)  # a page on disk is useful only with its snapshot
            self._release_snapshot(oldest)
        return True

    def _release_snapshot(self, cached: CachedPage) -> None:
        if cached.snapshot is not None:
            self.snapshots.release(cached.snapshot)
            cached.snapshot = None
            del self._with_snapshot[cached.key]

    def _on_eviction(self, page: int) -> None:
        self.evictions += 1
        self._write(self._by_page[page])
        self._remove(self._by_page[page])

    def _remove(self, cached: CachedPage) -> None:
        self._release_snapshot(cached)
        del self._by_key[cached.key], self._by_page[cached.page]
        if cached.tokens < PAGE_TOKENS:
            lengths = self._partial_lengths[cached.parent]
            lengths[cached.tokens] -= 1
            self._partial_lengths[cached.parent] = +lengths  # drops zero counts
            if not self._partial_lengths[cached.parent]:
                del self._partial_lengths[cached.parent]


def _up_to_snapshot(pages: Sequence[CachedPage]) -> list[CachedPage]:
    """The pages up to the last one with a snapshot."""
    count = max((index for index, each in enumerate(pages, 1) if each.snapshot is not None), default=0)
    return list(pages[:count])


def page_key(request: Request, page: int, before: bytes, length: int = PAGE_TOKENS) -> bytes | None:
    """128-bit key of everything that the state after the first `length` tokens of a page depends on; None when an edit
    there has no digest. `before` is the key of the previous page."""
    start = page * PAGE_TOKENS
    stop = page * PAGE_TOKENS + length
    prompt_len = len(request.prompt_ids)
    tokens = request.tokens(start, stop)
    parts = [before, struct.pack(f"<{len(tokens)}q", *tokens)]
    for edit in request.plan.edits if request.plan is not None else ():
        offsets = [int(offset) for offset in edit.offsets(start, tokens, prompt_len)]
        if not offsets:
            continue
        prompt = [offset for offset in offsets if start + offset < prompt_len]
        by_phase: tuple[tuple[Phase, list[int]], ...] = (
            ("prefill", prompt),
            ("decode", offsets[len(prompt) :]),
        )
        for phase, edited in by_phase:
            if edited:
                digest = combine(edit.digest_parts(phase))
                if digest is None:
                    return None
                parts += [digest, struct.pack(f"<{len(edited)}q", *edited)]
    return hashlib.blake2b(framed(*parts), digest_size=KEY_BYTES).digest()
